"""Jobs of ``--optimizer adasum`` and ``adascale``, each of one or two ranks of ``fairseq_ranks.py``."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.checkpoints import relative_differences
from tests.helpers.commands import HELPERS, MODEL, PACKAGE, Processes

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


JOBS = {
    "adam_straight": Job(2, [*ADASUM, *ADAM, "--max-update", 26]),
    "adam_first_part": Job(2, [*ADASUM, *ADAM, "--max-update", 17]),
    "adam_second_part": Job(2, [*ADASUM, *ADAM, "--max-update", 26], goes_on="adam_first_part"),
    "adam_synchronised": Job(2, [*ADASUM, *ADAM, "--max-update", 8, "--adasum-sync-state", 4]),
    "sgd_gradient": Job(2, [*ADASUM, *SGD, "--clip-norm", 0, "--max-update", 14]),
    "sgd_delta": Job(2, [*ADASUM, *SGD, "--clip-norm", 0, "--max-update", 14, "--adasum-form", "delta"]),
    "lamb": Job(2, [*ADASUM, "--inner-optimizer", "lamb", "--max-update", 60, "--update-freq", 2, "--lr", "2e-2"]),
    "nan": Job(2, [*ADASUM, *SGD, "--bf16", "--max-update", 12], spoil="nan"),
    "nan_delta": Job(2, [*ADASUM, *ADAM, "--max-update", 6], spoil="nan"),
    "different": Job(2, [*ADASUM, *SGD, "--max-update", 4], spoil="parameters"),
    "one_node": Job(2, [*ADASUM, *SGD, "--max-update", 4, "--adasum-hierarchy", "node"]),
    "by_ranks": Job(2, [*ADASCALE, *SGD, "--max-update", 20]),
    "by_accumulation": Job(1, [*ADASCALE, *SGD, "--max-update", 20, "--update-freq", 2]),
    "scale_one": Job(1, [*ADASCALE, *SGD, "--max-update", 12, "--update-freq", 2, "--adascale-scale", 1]),
    "plain": Job(1, ["--optimizer", "sgd", *SGD[2:], "--max-update", 12, "--update-freq", 2]),
    "momentum_straight": Job(1, [*ADASCALE, *SGD, "--momentum", "0.9", "--max-update", 40, "--update-freq", 4]),
    "momentum_first_part": Job(1, [*ADASCALE, *SGD, "--momentum", "0.9", "--max-update", 20, "--update-freq", 4]),
    "momentum_second_part": Job(
        1, [*ADASCALE, *SGD, "--momentum", "0.9", "--max-update", 40, "--update-freq", 4], goes_on="momentum_first_part"
    ),
    "other_scale": Job(
        2, [*ADASCALE, *SGD, "--momentum", "0.9", "--max-update", 60, "--update-freq", 1], goes_on="momentum_first_part"
    ),
    "adam_bf16": Job(1, [*ADASCALE, *ADAM, "--bf16", "--max-update", 40, "--update-freq", 4]),
    "differences": Job(
        1, [*ADASCALE, *SGD, "--max-update", 20, "--adascale-scale", 4, "--adascale-estimator", "differences"]
    ),
    "every_other": Job(1, [*ADASCALE, *SGD, "--max-update", 6, "--update-freq", 2, "--adascale-interval", 2]),
    "summed": Job(1, [*ADASCALE, *SGD, "--max-update", 6, "--update-freq", 2], spoil="summed"),
}


def run_jobs(data: Path, folder: Path) -> dict[str, Job]:
    """Runs all jobs on two ranks, which are started once."""
    written = []
    for name, job in JOBS.items():
        job.path, saved = folder / name, folder / (job.goes_on or name)
        flags = [data, *MODEL, "--user-dir", PACKAGE, "--save-dir", saved, "--log-interval", 1, *job.flags]
        written.append({"name": name, "ranks": job.ranks, "spoil": job.spoil, "flags": [str(flag) for flag in flags]})
    (folder / "jobs.json").write_text(json.dumps(written))
    processes, script = Processes(), HELPERS / "fairseq_ranks.py"
    try:
        ranks = [processes.start([sys.executable, script, folder / "jobs.json", rank]) for rank in (0, 1)]
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        processes.end()
    assert JOBS[list(JOBS)[-1]].log().endswith("exit code 0\n"), outputs
    return JOBS


def checkpoint_differences(jobs: dict[str, Job], left: str, right: str) -> float:
    """The largest of the tensors', but for a key's bias, whose gradient is rounding noise."""
    differences = relative_differences(jobs[left].checkpoint, jobs[right].checkpoint)
    return max(value for name, value in differences.items() if not name.endswith("k_proj.bias"))
