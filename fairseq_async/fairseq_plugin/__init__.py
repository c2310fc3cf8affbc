"""What ``fairseq-train --user-dir`` finds here: the optimizers, and checkpoints that load under torch 2.6 and later."""

import atexit
from argparse import Namespace

import torch

from fairseq_async.fairseq_plugin.adascale import AdaScaleOptimizer
from fairseq_async.fairseq_plugin.adasum import AdasumOptimizer
from fairseq_async.fairseq_plugin.local_sgd import LocalSGDFlags
from fairseq_async.fairseq_plugin.optimizer import HybridAsync
from fairseq_async.fairseq_plugin.prefetch import end_prefetching

# torch loads only types that it trusts; fairseq's own checkpoints hold one more, which is plain data.
torch.serialization.add_safe_globals([Namespace])
atexit.register(end_prefetching)

__all__ = ["AdaScaleOptimizer", "AdasumOptimizer", "HybridAsync", "LocalSGDFlags"]
