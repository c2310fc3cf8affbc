"""Adasum between the ranks of a process group (Maleki et al. 2021, arXiv 2006.02924)."""

from fairseq_async.collective.adasum.distributed import DistributedAdasum, check_dense
from fairseq_async.collective.adasum.hierarchy import NodeAdasum
from fairseq_async.collective.adasum.hooks import AdasumState, adasum_hook
from fairseq_async.collective.adasum.rank_states import RankStates

__all__ = ["AdasumState", "DistributedAdasum", "NodeAdasum", "RankStates", "adasum_hook", "check_dense"]
