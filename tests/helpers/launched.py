"""The processes of a run that ``fairseq-async launch`` has started, and what they have done so far."""

import json
import re
from pathlib import Path


def count(run_dir: Path, worker: int) -> int:
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return sum(json.loads(line)["worker"] == worker for line in lines if line.endswith("\n"))


def find(run_dir: Path, pattern: str) -> list[int]:
    """Processes of this run whose command line has the pattern."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text().replace("\0", " ")
            environment = (folder / "environ").read_text(errors="replace")
        except OSError:
            continue
        if str(run_dir) in line and re.search(pattern, line + environment):
            found.append(int(folder.name))
    return found


def server_of(run_dir: Path) -> int:
    (pid,) = find(run_dir, r"fairseq_server")
    return pid


def worker_of(run_dir: Path, worker: int) -> int:
    (pid,) = find(run_dir, rf"fairseq-train .*FAIRSEQ_ASYNC_WORKER={worker}\b")
    return pid
