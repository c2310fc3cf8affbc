"""What the papers say, on tensors. Nothing here knows a process, a socket or a clock."""

from fairseq_async.algorithms.hybrid import HybridAccumulation
from fairseq_async.algorithms.rule import Rule
from fairseq_async.algorithms.update import Update

__all__ = ["HybridAccumulation", "Rule", "Update"]
