"""A job with a shard on another machine, as a user starts it; shard and server are killed, one after the other."""

import os
import signal
from pathlib import Path

import pytest
import torch

from fairseq_async.launch import certificates
from fairseq_async.reporting.audit import audit
from tests.helpers.commands import HELPERS, ROOT, Processes, command
from tests.helpers.launched import count, find
from tests.helpers.run_files import snapshot_versions
from tests.helpers.sharded import SCRIPT, shard_hosts
from tests.helpers.waiting import wait_until

SECONDS = 120


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
def test_a_run_outlives_its_shard_and_its_server(
    encrypted: bool, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has started the shard starts it again; the run ends as it should, and its log is whole."""
    monkeypatch.chdir(tmp_path)
    tls: list[object] = []
    if encrypted:
        certificates.make(tmp_path / "tls", ["127.0.0.1"])
        tls = ["--tls", tmp_path / "tls"]
    with shard_hosts(tmp_path, 1, *tls) as hosts:
        method = f"HybridAsync(model, optimizer, total_steps=300, server_shards='{hosts.option}', snapshot_seconds=0.5)"
        Path("train.py").write_text(SCRIPT.replace("METHOD", method))
        launcher = [command("fairseq-async"), "launch", "--workers", 2, "--token-file", hosts.token_file, *tls]
        job = processes.start(
            [*launcher, "--", "python", "train.py"], PYTHONPATH=f"{HELPERS / 'without_fairseq'}:{ROOT}"
        )
        run_dir = Path("async_training")
        wait_until(lambda: count(run_dir, 0) > 10 and bool(snapshot_versions(run_dir)), SECONDS)
        hosts.kill(0)
        hosts.start_again(0)
        before = count(run_dir, 0)
        wait_until(lambda: count(run_dir, 0) > before + 10, SECONDS)
        (server,) = find(run_dir, "gradient_main")
        os.kill(server, signal.SIGKILL)
        output, _ = job.communicate(timeout=SECONDS)
        assert job.returncode == 0, output
        assert output.count("was started again from version-") == 2
        said, _ = hosts.running[0].communicate(timeout=20)
    assert "shard 1 of 2, " in said and said.rstrip().endswith("the run is finished"), said
    assert "the server is gone: its shard is dropped" in said
    assert audit(run_dir).applied > 10
    torch.testing.assert_close(torch.load("answers.pt", weights_only=True), torch.ones(8, 1), atol=0.2, rtol=0)


def test_a_run_whose_workers_wait_for_a_shard_finds_it_when_it_is_back(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the shard they send no updates, so the server has to notice by itself; they do not try all the time.

    If the shard dies within a step, the server fails at that step; its words are then others.
    """
    monkeypatch.chdir(tmp_path)
    with shard_hosts(tmp_path, 1) as hosts:
        method = f"HybridAsync(model, optimizer, total_steps=300, server_shards='{hosts.option}', snapshot_seconds=900)"
        Path("train.py").write_text(SCRIPT.replace("METHOD", method))
        launcher = [command("fairseq-async"), "launch", "--workers", 1, "--token-file", hosts.token_file]
        job = processes.start(
            [*launcher, "--", "python", "train.py"], PYTHONPATH=f"{HELPERS / 'without_fairseq'}:{ROOT}"
        )
        run_dir = Path("async_training")
        wait_until(lambda: count(run_dir, 0) > 10, SECONDS)
        hosts.kill(0)
        log = run_dir / "logs" / "server.log"
        wait_until(lambda: "HalfAppliedError: shard 1 of the server" in log.read_text(), 30)
        hosts.start_again(0)
        output, _ = job.communicate(timeout=SECONDS)
        assert job.returncode == 0, output
        assert log.read_text().count("worker 0 is connected") < 10


def test_one_worker_with_two_shards_elsewhere_trains_as_with_one_process(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    with shard_hosts(tmp_path, 2) as hosts:
        for given in ("", f", server_shards='{hosts.option}'"):
            folder = tmp_path / f"run{len(answers)}"
            folder.mkdir()
            monkeypatch.chdir(folder)
            method = f"AsyncLocalSGD(model, optimizer, total_steps=40, local_steps=5, outer='mla'{given})"
            Path("train.py").write_text(SCRIPT.replace("HybridAsync", "AsyncLocalSGD").replace("METHOD", method))
            launcher = [command("fairseq-async"), "launch", "--workers", 1, "--token-file", hosts.token_file]
            job = processes.start(
                [*launcher, "--", "python", "train.py"], PYTHONPATH=f"{HELPERS / 'without_fairseq'}:{ROOT}"
            )
            output, _ = job.communicate(timeout=SECONDS)
            assert job.returncode == 0, output
            answers.append(torch.load("answers.pt", weights_only=True))
    assert torch.isfinite(answers[0]).all() and torch.equal(*answers)
