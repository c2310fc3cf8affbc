"""Synchronous methods between the ranks of one data-parallel group. They need no server."""

from fairseq_async.collective.adascale import AdaScale
from fairseq_async.collective.adasum import DistributedAdasum
from fairseq_async.collective.hierarchy import NodeAdasum
from fairseq_async.collective.hooks import AdasumState, adasum_hook

__all__ = ["AdaScale", "AdasumState", "DistributedAdasum", "NodeAdasum", "adasum_hook"]
