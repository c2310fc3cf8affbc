"""What a run leaves in its directory."""

import json
from pathlib import Path
from typing import Any, BinaryIO

import torch


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``events.jsonl``, one for each update."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").open()]


def snapshot_versions(run_dir: Path) -> list[int]:
    """The versions of the server's snapshots, ascending."""
    return sorted(int(path.stem.removeprefix("version-")) for path in run_dir.glob("snapshots/version-*.pt"))


def valid_losses(log: Path) -> list[float]:
    """The validation losses in a log of ``fairseq-train`` with ``--log-format json``."""
    lines = [line.split(" | valid | ", 1)[1] for line in log.read_text().splitlines() if " | valid | " in line]
    return [float(json.loads(line)["valid_loss"]) for line in lines]


TIMED_LAYOUT = [["weight", [1000], "float32"]]


def write_timed_run(
    run_dir: Path, workers: int, step: float, exchange: float, server: float, updates: int = 20
) -> Path:
    """Workers that take turns without a wait."""
    run_dir.mkdir(exist_ok=True)
    description = {"workers": workers, "method": {"barrier": 0}, "layout": TIMED_LAYOUT}
    (run_dir / "run.json").write_text(json.dumps(description))
    events = [
        {
            "time": 1e9 + (number + 1) * (step + exchange) + worker * step / workers,
            "worker": worker,
            "sequence": number,
            "base_version": number,
            "version_after": number,
            "status": "applied",
            "weight": 10.0,
            "staleness": 0,
            "loss": 2.0,
            "push_seconds": 0.75 * exchange,
            "pull_seconds": 0.25 * exchange,
            "server_seconds": server,
        }
        for number in range(updates)
        for worker in range(workers)
    ]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run_dir


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
