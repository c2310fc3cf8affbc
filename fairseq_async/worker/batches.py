"""A digest of a batch, by which the server sees that two workers train on the same data."""

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_BYTES = 1 << 20  # hashed of each tensor: batches that differ do so early in it


def digest_of(batch: object) -> str | None:
    """Returns a digest of the tensors in a batch, whatever containers they are in; None if the batch has no tensor.

    Args:
        batch: what a model is called with: tensors in tuples, lists and mappings, of any depth.
    """
    tensors = list(_tensors(batch))
    if not tensors:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        data = tensor.detach().flatten()[: _BYTES // tensor.element_size()].cpu().contiguous()
        digest.update(data.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(batch: object) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.numel() and not batch.is_sparse:
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
