"""The papers' methods as computations on tensors. Nothing here knows a process, a socket or a clock."""

from fairseq_async.algorithms.adascale import AdaScaleGain
from fairseq_async.algorithms.adasum import adasum
from fairseq_async.algorithms.admission import NormGate, StalenessPolicy
from fairseq_async.algorithms.codecs import (
    BF16,
    DQSGD,
    E3M0,
    AdaComp,
    AdaCompBins,
    Codec,
    ErrorFeedback,
    Int8,
    TopK,
)
from fairseq_async.algorithms.fragments import Fragment, FragmentedRule, fragments_of, in_turn
from fairseq_async.algorithms.hierarchy import Region
from fairseq_async.algorithms.hybrid import HybridAccumulation
from fairseq_async.algorithms.local_steps import local_steps, shard_probabilities
from fairseq_async.algorithms.outer.momentum_look_ahead import HeLoCo, MomentumLookAhead
from fairseq_async.algorithms.outer.outer_optimizers import BufferedNesterov, DelayedNesterov, NesterovMomentum
from fairseq_async.algorithms.rule import Rule, Update
from fairseq_async.algorithms.worker_buffers import WorkerBuffers

__all__ = [
    "BF16",
    "DQSGD",
    "E3M0",
    "AdaComp",
    "AdaCompBins",
    "AdaScaleGain",
    "BufferedNesterov",
    "Codec",
    "DelayedNesterov",
    "HeLoCo",
    "ErrorFeedback",
    "Fragment",
    "FragmentedRule",
    "HybridAccumulation",
    "MomentumLookAhead",
    "Int8",
    "NesterovMomentum",
    "NormGate",
    "Region",
    "Rule",
    "StalenessPolicy",
    "TopK",
    "Update",
    "WorkerBuffers",
    "adasum",
    "fragments_of",
    "in_turn",
    "local_steps",
    "shard_probabilities",
]
