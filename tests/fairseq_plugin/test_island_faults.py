"""Workers of several ranks of which one dies, that join and leave, and that go on as workers of other sizes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fairseq_async.exchange.authentication import new_token, write_token
from fairseq_async.options.addresses import free_port
from tests.helpers.commands import HYBRID, MODEL, ROOT, Processes, command, launch_command, synchronous
from tests.helpers.launched import count, find, rank_of
from tests.helpers.run_files import events, relative_differences
from tests.helpers.waiting import wait_until

Launch = Callable[..., tuple[int, str]]
FOREVER = ["--max-update", "1000000", "--disable-validation"]


@pytest.mark.parametrize("method", [[], ["--optimizer", "local_sgd", "--local-steps", 2]], ids=["hybrid", "local"])
def test_all_ranks_of_a_worker_come_back_when_one_is_killed_and_so_does_a_killed_server(
    processes: Processes, data: Path, tmp_path: Path, method: list[object]
) -> None:
    """The other worker is slow, so that the run is not over when this one is back."""
    flags = [*method, "--max-update", 50, "--disable-validation", "--snapshot-seconds", 1]
    given = ["--ranks-per-worker", "2,1", "--slowdown", "1,20"]
    launcher = processes.start(launch_command(data, 2, tmp_path, *flags, launcher=given))
    wait_until(lambda: count(tmp_path, 0) > 3, 90)
    first = rank_of(tmp_path, "fairseq-train ", 0, 0)
    os.kill(rank_of(tmp_path, "fairseq-train ", 0, 1), signal.SIGKILL)
    before = count(tmp_path, 0)
    wait_until(lambda: count(tmp_path, 0) > before + 3, 90)
    assert rank_of(tmp_path, "fairseq-train ", 0, 0) != first, "a rank without the other would wait for it for ever"
    (server,) = find(tmp_path, "fairseq_server|local_sgd_main")
    os.kill(server, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, output
    assert "worker 0 was killed by SIGKILL; start 1 of 3 again" in output and "Traceback" not in output
    updates = events(tmp_path)
    assert {event.get("ranks") for event in updates if event["worker"] == 0} == {2}
    sequences = [event["sequence"] for event in updates if event["worker"] == 0]
    assert sequences == sorted(set(sequences)), "the server has lost what came after its last snapshot, and no more"
    code, audit = processes.run([command("fairseq-async"), "audit", tmp_path])
    assert code == 0, audit


def test_a_worker_of_two_ranks_joins_from_another_machine_and_leaves(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    """It has neither the server's shared memory nor its loopback address."""
    address, token = f"127.0.0.2:{free_port('127.0.0.2')}", tmp_path / "token"
    write_token(token, new_token())
    host, port = address.split(":")
    given = ["--host", host, "--port", port, "--token-file", token]
    launcher = processes.start(launch_command(data, 1, tmp_path, *FOREVER, launcher=given))
    wait_until(lambda: count(tmp_path, 0) > 5, 90)
    job = ["fairseq-train", data, *MODEL, *HYBRID, "--save-dir", tmp_path, *FOREVER]
    joins = ["join", address, "--ranks-per-worker", 2, "--token-file", token, "--", *job]
    joiner = processes.start([command("fairseq-async"), *joins])
    wait_until(lambda: count(tmp_path, 1) > 5, 90)
    ranks = [rank_of(tmp_path, "fairseq-train ", "joins", rank) for rank in (0, 1)]
    joiner.send_signal(signal.SIGINT)
    output, _ = joiner.communicate(timeout=30)
    assert joiner.returncode == 130 and "Traceback" not in output, output
    wait_until(lambda: not any(Path(f"/proc/{rank}/cmdline").exists() for rank in ranks), 30)
    joined = [event for event in events(tmp_path) if event["worker"] == 1]
    assert {event["ranks"] for event in joined} == {2}
    assert [event["sequence"] for event in joined] == list(range(len(joined)))
    before = count(tmp_path, 0)
    wait_until(lambda: count(tmp_path, 0) > before + 5, 90)
    launcher.send_signal(signal.SIGINT)
    assert launcher.communicate(timeout=60) and launcher.returncode == 130


def test_a_run_goes_on_with_workers_of_other_sizes_and_plain_fairseq_reads_its_checkpoint(
    launch: Launch, processes: Processes, data: Path, tmp_path: Path
) -> None:
    """As plain fairseq's run, which goes on with another number of ranks from the beginning of the data."""
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    flags = ["--momentum", "0.9", "--lr", "0.5"]
    method = ["--inner-optimizer", "sgd", "--barrier", *flags]
    first, second = ["--max-update", 5], ["--max-update", 10, "--reset-dataloader"]
    synchronous(processes, data, plain, 4, "--optimizer", "sgd", *flags, *first)
    (tmp_path / "plain.rendezvous").unlink(missing_ok=True)
    # plain fairseq trusts no checkpoint of its own, and its ranks do not unpickle what rank 0 has read
    own, all_read = ["--user-dir", ROOT / "scripts/bench/plain_on_cpu"], "--load-checkpoint-on-all-dp-ranks"
    synchronous(processes, data, plain, 3, "--optimizer", "sgd", *flags, *second, *own, all_read)
    code, output = launch(2, ours, *method, *first, launcher=["--ranks-per-worker", 2])
    assert code == 0, output
    code, output = launch(2, ours, *method, "--max-update", 10, launcher=["--ranks-per-worker", "1,3"])
    assert code == 2 and "workers of other numbers of ranks, which had other parts of the data: give --reset" in output
    assert "Traceback" not in output
    code, output = launch(2, ours, *method, *second, launcher=["--ranks-per-worker", "2,1"])
    assert code == 0, output
    found = relative_differences(plain / "checkpoint_last.pt", ours / "checkpoint_last.pt")
    assert len(found) > 30 and max(found.values()) < 1e-6
    still = ["--finetune-from-model", ours / "checkpoint_last.pt", "--optimizer", "sgd", "--lr", "1e-12"]
    synchronous(processes, data, tmp_path / "read", 2, *still, all_read, "--max-update", 1)
    read = relative_differences(ours / "checkpoint_last.pt", tmp_path / "read/checkpoint_last.pt")
    assert max(read.values()) < 1e-9
