"""Asynchronous methods for any PyTorch training loop, as context managers round an ordinary optimizer.

They are :class:`AsyncLocalSGD` and :class:`HybridAsync`; ``fairseq_async.pytorch.hf_trainer`` has a callback for the
``Trainer`` of transformers.
"""

from fairseq_async.pytorch.hybrid import HybridAsync
from fairseq_async.pytorch.local_sgd import AsyncLocalSGD
from fairseq_async.pytorch.training import enter_island

__all__ = ["AsyncLocalSGD", "HybridAsync", "enter_island"]
