"""Jobs of ``--optimizer adasum`` and ``adascale``, each of one or two ranks of ``fairseq_ranks.py``."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.commands import HELPERS, MODEL, PACKAGE, Processes
from tests.helpers.run_files import relative_differences

SECONDS = 280
SGD = ["--inner-optimizer", "sgd", "--lr", "0.5", "--dropout", "0"]
ADAM = ["--inner-optimizer", "adam", "--adam-betas", "(0.9, 0.98)"]
ADASUM = ["--optimizer", "adasum"]
ADASCALE = ["--optimizer", "adascale"]


@dataclass
class Job:
    ranks: int
    flags: list[object]
    spoil: str = ""
    goes_on: str = ""  # with the checkpoint of another job
    path: Path = field(default=Path(), init=False)  # without an ending

    def log(self, rank: int = 0) -> str:
        return Path(f"{self.path}-{rank}.log").read_text()

    def code(self, rank: int = 0) -> int:
        return int(self.log(rank).split()[-1])

    def error(self, rank: int = 0) -> str:
        (line,) = [line for line in self.log(rank).splitlines() if "error: " in line]
        assert self.code(rank) == 2 and "Traceback" not in self.log(rank)
        return line

    def steps(self) -> list[dict[str, float]]:
        """What fairseq has logged of each step."""
        found = [line for line in self.log().splitlines() if line.startswith('{"epoch"') and '"update"' in line]
        return [{name: float(value) for name, value in json.loads(line).items()} for line in found]

    @property
    def checkpoint(self) -> Path:
        return self.path.with_suffix(".pt")


def run_jobs(jobs: dict[str, Job], data: Path, folder: Path) -> dict[str, Job]:
    """Runs jobs on two ranks, which are started once."""
    written = []
    for name, job in jobs.items():
        job.path, saved = folder / name, folder / (job.goes_on or name)
        flags = [data, *MODEL, "--user-dir", PACKAGE, "--save-dir", saved, "--log-interval", 1, *job.flags]
        written.append({"name": name, "ranks": job.ranks, "spoil": job.spoil, "flags": [str(flag) for flag in flags]})
    (folder / "jobs.json").write_text(json.dumps(written))
    script = HELPERS / "fairseq_ranks.py"
    with Processes() as processes:
        ranks = [processes.start([sys.executable, script, folder / "jobs.json", rank]) for rank in (0, 1)]
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    assert all((job.path.parent / f"{name}-0.log").exists() for name, job in jobs.items()), outputs
    return jobs


def checkpoint_differences(jobs: dict[str, Job], left: str, right: str) -> float:
    """The largest of the tensors', but for a key's bias, whose gradient is rounding noise."""
    differences = relative_differences(jobs[left].checkpoint, jobs[right].checkpoint)
    return max(value for name, value in differences.items() if not name.endswith("k_proj.bias"))
