"""What the papers say, on tensors. Nothing here knows a process, a socket or a clock."""

from fairseq_async.algorithms.adascale import AdaScaleGain
from fairseq_async.algorithms.adasum import adasum
from fairseq_async.algorithms.hybrid import HybridAccumulation
from fairseq_async.algorithms.outer import BufferedNesterov, DelayedNesterov, NesterovMomentum
from fairseq_async.algorithms.outliers import NormGate
from fairseq_async.algorithms.rounds import local_steps, shard_probabilities
from fairseq_async.algorithms.rule import Rule
from fairseq_async.algorithms.staleness import Lateness
from fairseq_async.algorithms.update import Update

__all__ = [
    "AdaScaleGain",
    "BufferedNesterov",
    "DelayedNesterov",
    "HybridAccumulation",
    "Lateness",
    "NesterovMomentum",
    "NormGate",
    "Rule",
    "Update",
    "adasum",
    "local_steps",
    "shard_probabilities",
]
