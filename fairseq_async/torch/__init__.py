"""Asynchronous methods for any PyTorch training loop, as context managers round an ordinary optimizer.

They are :class:`AsyncLocalSGD` and :class:`HybridAsync`; ``fairseq_async.torch.hf_trainer`` has a callback for the
``Trainer`` of transformers.
"""

from fairseq_async.torch.hybrid import HybridAsync
from fairseq_async.torch.local_sgd import AsyncLocalSGD

__all__ = ["AsyncLocalSGD", "HybridAsync"]
