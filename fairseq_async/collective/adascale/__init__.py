"""AdaScale around a torch optimizer, on one rank or several (Johnson et al. 2020, arXiv 2007.05105)."""

from fairseq_async.collective.adascale.adam_norm import AdamNorm, Masters
from fairseq_async.collective.adascale.adascale import AdaScale

__all__ = ["AdaScale", "AdamNorm", "Masters"]
