"""Reads a server's state from a file, and digests it; two states have the same digest only if all bits are equal."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def digest(value: Any) -> str:
    """Returns the digest of tensors, numbers and containers of them; equal for equal bits."""
    found = hashlib.sha256()
    for part in _parts(value):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> list[bytes]:
    if isinstance(value, Tensor):
        return [
            str(value.dtype).encode(),
            str(tuple(value.shape)).encode(),
            value.detach().contiguous().numpy().tobytes(),
        ]
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=repr) for part in (repr(key).encode(), *_parts(value[key]))]
    if isinstance(value, list | tuple):
        return [part for each in value for part in _parts(each)]
    return [repr(value).encode()]


def read_snapshot(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
