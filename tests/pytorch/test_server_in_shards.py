"""A job whose server is in shards, as a user starts it; one of them is killed."""

import os
import signal
from pathlib import Path

import pytest
import torch

from fairseq_async.reporting.audit import audit
from tests.helpers.commands import HELPERS, ROOT, Processes, command
from tests.helpers.forking import command_line
from tests.helpers.launched import count
from tests.helpers.run_files import snapshot_versions
from tests.helpers.sharded import SCRIPT
from tests.helpers.waiting import wait_until

INT8 = "local_steps=5, compress={'push': 'int8', 'pull': 'int8'}"
IN_FRAGMENTS = "local_steps=6, fragments=3, fragment_delay=1, compress={'pull': 'int8'}"
HYBRID = "HybridAsync(model, optimizer, total_steps=200, server_shards=2, snapshot_seconds=0.5)"


def shards_of(folder: Path) -> list[int]:
    """What the server of the job in this folder has forked: its shard, and at times the writer of a snapshot."""
    server = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_server(pid, folder)]
    return [pid for pid in server if _parent(pid) in server]


def _is_server(pid: int, folder: Path) -> bool:
    try:
        words, _ = command_line(pid)
        return "--listener" in words and Path(f"/proc/{pid}/cwd").readlink() == folder
    except OSError:
        return False


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def test_a_shard_that_is_killed_takes_the_run_back_to_a_snapshot_and_no_further(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is started again with all its shards; the run ends as it should, and its log is whole."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.replace("METHOD", HYBRID))
    launcher = [command("fairseq-async"), "launch", "--workers", 2, "--", "python", "train.py"]
    job = processes.start(launcher, PYTHONPATH=f"{HELPERS / 'without_fairseq'}:{ROOT}")
    run_dir = Path("async_training")
    wait_until(lambda: count(run_dir, 0) > 10 and snapshot_versions(run_dir), 90)
    os.kill(min(shards_of(tmp_path)), signal.SIGKILL)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    assert "was started again from version-" in output
    assert audit(run_dir).applied > 10
    torch.testing.assert_close(torch.load("answers.pt", weights_only=True), torch.ones(8, 1), atol=0.2, rtol=0)
    wait_until(lambda: not shards_of(tmp_path), 20)


@pytest.mark.parametrize("options", [f"outer='mla', {INT8}", f"outer='nesterov', {IN_FRAGMENTS}"])
def test_compressed_updates_starts_ahead_and_fragments_are_those_of_one_process(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """One worker, whose updates come in one order: the results are equal to the bit."""
    answers = []
    for shards in (1, 3):
        folder = tmp_path / str(shards)
        folder.mkdir()
        monkeypatch.chdir(folder)
        method = f"AsyncLocalSGD(model, optimizer, total_steps=40, server_shards={shards}, {options})"
        script = (
            SCRIPT.replace("HybridAsync", "AsyncLocalSGD").replace("METHOD", method).replace("optim.Adam", "optim.SGD")
        )
        Path("train.py").write_text(script)
        launcher = [command("fairseq-async"), "launch", "--workers", 1, "--", "python", "train.py"]
        job = processes.start(launcher, PYTHONPATH=f"{HELPERS / 'without_fairseq'}:{ROOT}")
        output, _ = job.communicate(timeout=120)
        assert job.returncode == 0, output
        answers.append(torch.load("answers.pt", weights_only=True))
    assert torch.isfinite(answers[0]).all() and torch.equal(*answers)
