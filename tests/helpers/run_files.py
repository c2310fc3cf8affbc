"""What a run leaves in its directory."""

import json
from pathlib import Path
from typing import Any


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
