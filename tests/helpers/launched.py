"""The processes of a run that ``fairseq-async launch`` has started, and what they have done so far."""

import json
import re
from pathlib import Path

from tests.helpers.forking import command_line


def count(run_dir: Path, worker: int) -> int:
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return sum(json.loads(line)["worker"] == worker for line in lines if line.endswith("\n"))


def find(run_dir: Path, pattern: str) -> list[int]:
    """Processes of this run whose command line or environment has the pattern.

    Without those that one of them has forked: a server forks to write a snapshot, a worker to load its data.
    """
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = command_line(int(folder.name))
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        line = " ".join(words)
        environment = "\0".join(f"{name}={value}" for name, value in variables.items())
        if str(run_dir) in line and re.search(pattern, f"{line}\0{environment}"):
            parents[int(folder.name)] = int(parent)
    return [process for process, parent in parents.items() if parent not in parents]


def server_of(run_dir: Path) -> int:
    (pid,) = find(run_dir, r"fairseq_server")
    return pid


def worker_of(run_dir: Path, worker: int) -> int:
    (pid,) = find(run_dir, rf"fairseq-train .*FAIRSEQ_ASYNC_WORKER={worker}\b")
    return pid
