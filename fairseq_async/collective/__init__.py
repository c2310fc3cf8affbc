"""Adasum and AdaScale between the ranks of one synchronous data-parallel group. They need no server."""

from fairseq_async.collective.adascale import AdaScale
from fairseq_async.collective.adasum import AdasumState, DistributedAdasum, NodeAdasum, adasum_hook

__all__ = ["AdaScale", "AdasumState", "DistributedAdasum", "NodeAdasum", "adasum_hook"]
