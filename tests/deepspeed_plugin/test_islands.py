"""Workers of several ranks in DeepSpeed with a barrier, beside plain DeepSpeed on all their ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairseq_async.exchange.authentication import new_token, write_token
from fairseq_async.options.addresses import free_port
from tests.helpers.commands import DEEPSPEED, Processes, command
from tests.helpers.deepspeed_islands import CASES, STEPS, make_model
from tests.helpers.launched import count, rank_of
from tests.helpers.run_files import events
from tests.helpers.waiting import wait_until

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
@pytest.mark.parametrize("name", ["hybrid", "local", "dealt"])
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


def interrupt(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130 and "Traceback" not in output, output


@pytest.mark.timeout(500)
def test_workers_in_zero_3_come_back_join_leave_and_go_on_as_others(processes: Processes, tmp_path: Path) -> None:
    """All ranks of a worker come back where one is killed. The run is then resumed by one worker of three ranks."""
    address, token, run = f"127.0.0.2:{free_port('127.0.0.2')}", tmp_path / "token", tmp_path / "run"
    write_token(token, new_token())
    host, port = address.split(":")
    job = ["--ranks-per-worker", 2, "--token-file", token, "--", sys.executable, *JOB, tmp_path, "endless"]
    launch = [command("fairseq-async"), "launch", "--workers", 1, "--host", host, "--port", port]
    launcher = processes.start([*launch, *job], **DEEPSPEED)
    wait_until(lambda: count(run, 0) > 3, 150)
    first = rank_of(tmp_path, "deepspeed_islands", 0, 0)
    os.kill(rank_of(tmp_path, "deepspeed_islands", 0, 1), signal.SIGKILL)
    before = count(run, 0)
    wait_until(lambda: count(run, 0) > before + 3, 150)
    assert rank_of(tmp_path, "deepspeed_islands", 0, 0) != first, "a rank without the other would wait for it for ever"
    joiner = processes.start([command("fairseq-async"), "join", address, *job], **DEEPSPEED)
    wait_until(lambda: count(run, 1) > 3, 150)
    ranks = [rank_of(tmp_path, "deepspeed_islands", "joins", rank) for rank in (0, 1)]
    interrupt(joiner)
    wait_until(lambda: not any(Path(f"/proc/{rank}/cmdline").exists() for rank in ranks), 30)
    interrupt(launcher)
    code, audit = processes.run([command("fairseq-async"), "audit", run])
    assert code == 0, audit
    assert {event["ranks"] for event in events(run)} == {2}
    last, before = events(run)[-1]["version_after"], count(run, 0)
    job[1] = 3
    launcher = processes.start([*launch, "--resume", *job], **DEEPSPEED)
    wait_until(lambda: count(run, 0) > before + 3, 150)
    interrupt(launcher)
    assert events(run)[-1]["ranks"] == 3 and events(run)[-1]["version_after"] > last
