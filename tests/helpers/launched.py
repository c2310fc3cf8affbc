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

    Without those that one of them has forked: a server forks to write a snapshot, a worker to load its data. With a
    pattern, without the standby of a server, which is the younger of two.
    """
    parents, servers = {}, dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = command_line(int(folder.name))
            state = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        line = " ".join(words)
        environment = "\0".join(f"{name}={value}" for name, value in variables.items())
        if str(run_dir) in line and re.search(pattern, f"{line}\0{environment}"):
            parents[int(folder.name)] = int(state[1])
            if "--notices" in words:
                servers[int(folder.name)] = int(state[19])
    found = [process for process, parent in parents.items() if parent not in parents]
    seen = [process for process in servers if process in found]
    standbys = set(sorted(seen, key=servers.__getitem__)[1:]) if pattern else set()
    return [process for process in found if process not in standbys]


def server_of(run_dir: Path) -> int:
    (pid,) = find(run_dir, r"fairseq_server")
    return pid


def worker_of(run_dir: Path, worker: int) -> int:
    (pid,) = find(run_dir, rf"fairseq-train .*FAIRSEQ_ASYNC_WORKER={worker}\b")
    return pid


def rank_of(run_dir: Path, program: str, worker: int | str, rank: int) -> int:
    """The process of a rank, of a worker by its number, or of one that "joins"."""
    (pid,) = find(run_dir, rf"(?s){program}(?=.*FAIRSEQ_ASYNC_WORKER={worker}\b)(?=.*\0RANK={rank}\b)")
    return pid
