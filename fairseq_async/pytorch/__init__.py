"""Asynchronous methods for any PyTorch training loop, as context managers round an ordinary optimizer.

They are :class:`AsyncLocalSGD` and :class:`HybridAsync`; ``fairseq_async.pytorch.hf_trainer`` has a callback for the
``Trainer`` of transformers. :class:`MuonAdamW` is Muon for matrices and AdamW for the rest in one optimizer.
"""

from fairseq_async.algorithms.muon import MuonAdamW, muon_groups
from fairseq_async.pytorch.hybrid import HybridAsync
from fairseq_async.pytorch.islands import enter_island
from fairseq_async.pytorch.local_sgd import AsyncLocalSGD

__all__ = ["AsyncLocalSGD", "HybridAsync", "MuonAdamW", "enter_island", "muon_groups"]
