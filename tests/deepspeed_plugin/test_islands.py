"""Workers of several ranks in DeepSpeed with a barrier, beside plain DeepSpeed on all their ranks."""

import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.commands import DEEPSPEED, Processes, command
from tests.helpers.deepspeed_islands import CASES, STEPS, make_model
from tests.helpers.run_files import events

JOB = ["-m", "tests.helpers.deepspeed_islands"]


def check_equal(out: Path, ranks: int, tolerance: float, output: str) -> None:
    """Checks that all ranks of both sides have the same parameters, within this part of their norm."""
    logs = "".join(log.read_text()[-3000:] for log in out.glob("*.log"))
    assert all((out / f"{side}-{rank}.pt").exists() for side in ("plain", "ours") for rank in range(ranks)), (
        output + logs
    )
    plain, *_ = (torch.load(out / f"plain-{rank}.pt", weights_only=True)["parameters"] for rank in range(ranks))
    start = torch.nn.utils.parameters_to_vector(make_model().parameters())
    assert (plain - start).norm() > 0.1 * start.norm()
    for rank in range(ranks):
        ours = torch.load(out / f"ours-{rank}.pt", weights_only=True)["parameters"]
        assert (ours.double() - plain).norm() <= tolerance * plain.norm()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in CASES if "-" in name])
def test_two_workers_of_two_ranks_are_plain_deepspeed_on_four(processes: Processes, tmp_path: Path, name: str) -> None:
    """After 50 steps. ZeRO 1 and 2 have nothing to divide in a worker; in ZeRO 3 each rank hands its part over. In half
    precision, the two sides round other sums."""
    _, output = processes.run([sys.executable, *JOB, tmp_path, name], seconds=350, **DEEPSPEED)
    check_equal(tmp_path, 4, 1e-6 if name.startswith("fp32") else 1e-2, output)
    assert [event["worker"] for event in events(tmp_path / "run")].count(1) == STEPS


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["hybrid", "local"])
def test_a_worker_of_two_ranks_and_one_of_one_are_plain_deepspeed_on_three(
    processes: Processes, tmp_path: Path, name: str
) -> None:
    """A worker has the weight of its samples: with equal weights the difference is well beyond the tolerance."""
    job = [*JOB, tmp_path, name, "2,1"]
    code, output = processes.run([sys.executable, *job], seconds=150, **DEEPSPEED)
    assert code == 0, output
    launcher = [command("fairseq-async"), "launch", "--workers", 2, "--ranks-per-worker", "2,1", "--", sys.executable]
    code, output = processes.run([*launcher, *job], seconds=200, **DEEPSPEED)
    assert code == 0, output
    check_equal(tmp_path, 3, 1e-6, output)
