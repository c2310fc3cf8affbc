"""Checkpoints of fairseq, read and compared."""

from pathlib import Path
from typing import Any, BinaryIO

import torch


def load(path: Path) -> dict[str, Any]:
    """A checkpoint, with ``weights_only`` on."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def load_without_trust(file: Path | BinaryIO) -> dict[str, Any]:
    """As :func:`load`, in a process that trusts no type but torch's own, as plain fairseq's."""
    trusted = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(trusted)
    return state


def relative_differences(left: Path, right: Path) -> dict[str, float]:
    """|a - b| / |a| of each tensor of two checkpoints' models."""
    a, b = load(left)["model"], load(right)["model"]
    assert a.keys() == b.keys()
    return {n: float((a[n] - b[n]).double().norm() / a[n].double().norm().clamp_min(1e-30)) for n in a}
