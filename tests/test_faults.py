"""What dies comes back, nothing counts twice, and nobody waits for who is not there."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairseq_async.errors import ConfigurationError, ExchangeError, RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import read_token, write_token
from fairseq_async.server import ServerClient
from fairseq_async.server.process import ServerProcess
from tests.servers import ThreadServer
from tests.test_server_process import LAYOUT, METHOD, pull, push

Start = Callable[..., ServerProcess]


@pytest.fixture(params=["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    started: list[ServerProcess] = []

    def begin(workers: int = 2, restarts: int = 3) -> ServerProcess:
        log = tmp_path / "server.log"
        started.append(ServerProcess("tests.sgd_server", workers, tmp_path, log, host=request.param, restarts=restarts))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


Serve = Callable[[int], ThreadServer]


@pytest.fixture(params=["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serve]:
    started: list[ThreadServer] = []

    def begin(workers: int) -> ThreadServer:
        started.append(ThreadServer(workers, tmp_path, request.param))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


def enter(
    server: ServerProcess | ThreadServer, worker: int | None, patience: float = 30.0, **method: Any
) -> ServerClient:
    client = ServerClient(server.address, server.token, worker, patience)
    welcome = client.join(LAYOUT, METHOD | method)
    if not welcome["initialised"]:
        client.slot.fill_(1.0)
        client.initialise(None)
    return client


def snapshots(run_dir: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("version-")) for path in run_dir.glob("snapshots/version-*.pt"))


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def kill(server: ServerProcess) -> None:
    os.kill(server.process.pid, signal.SIGKILL)


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").open()]


def test_a_killed_server_goes_on_from_its_snapshot_and_the_update_in_hand_is_not_lost(
    start: Start, tmp_path: Path
) -> None:
    server = start()
    first = enter(server, 0, snapshot_updates=2, snapshot_seconds=1e6)
    for sequence in range(3):
        push(first, sequence, 0.125, base=sequence)
        expected = 2 if sequence >= 1 else 0
        wait_until(lambda version=expected: snapshots(tmp_path)[-1:] == [version])  # type: ignore[misc]
    kill(server)
    answer = push(first, 3, 0.125, base=3)  # updates 0 and 1 are in the snapshot, 2 is taken back, 3 comes again
    assert answer["status"] == "applied" and answer["base_version"] == 2
    assert pull(first) == (3, 1.0 - 3 * 0.125)
    assert [event["sequence"] for event in events(tmp_path)] == [0, 1, 3]
    rollback = json.loads((tmp_path / "rollbacks.jsonl").read_text())
    assert (
        rollback["sequences"] == {"0": 1} and rollback["events"] == 1 and "version-000000000002" in rollback["source"]
    )


@pytest.mark.parametrize("breaks_again", [False, True])
def test_a_version_of_before_the_rollback_is_pulled_again_though_its_number_is_the_same(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks_again: bool
) -> None:
    """Also when the new server's first words are lost."""
    server = start()
    first, second = (enter(server, worker, snapshot_seconds=1e6) for worker in (0, 1))
    wait_until(lambda: snapshots(tmp_path) == [0])
    push(first, 0, 0.5)
    assert pull(second) == (1, 0.5)
    hello, failures = second._hello, iter([breaks_again])

    def after_failures() -> dict[str, Any]:
        if next(failures, False):
            second._channel.close()
            raise ExchangeError("it broke again")
        return hello()

    monkeypatch.setattr(second, "_hello", after_failures)
    kill(server)
    answer = push(second, 0, 0.125, base=1)
    assert answer["version"] != 1  # which the worker would take for the version that it has
    assert pull(second) == (1, 0.875)


def test_a_torn_snapshot_is_skipped(start: Start, tmp_path: Path) -> None:
    server = start()
    first = enter(server, 0, snapshot_updates=1, snapshot_seconds=1e6)
    wait_until(lambda: snapshots(tmp_path) == [0])
    push(first, 0, 0.5)
    wait_until(lambda: snapshots(tmp_path) == [0, 1])
    newest = tmp_path / "snapshots" / "version-000000000001.pt"
    newest.write_bytes(newest.read_bytes()[:200])
    kill(server)
    assert pull_after_loss(first) == (0, 1.0)
    assert f"{newest} is skipped" in (tmp_path / "server.log").read_text()


def pull_after_loss(client: ServerClient) -> tuple[int, float]:
    client.plan(event="begin_epoch", epoch=1)  # shared memory alone does not show that the server is gone
    return pull(client)


def test_a_server_that_stays_away_is_waited_for_as_long_as_patience_lasts(start: Start) -> None:
    server = start(restarts=0)
    client = enter(server, 0, patience=1.0)
    kill(server)
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="is gone"):
        push(client, 0, 0.5)
    assert time.monotonic() - began >= 1.0
    wait_until(lambda: server.poll() == -signal.SIGKILL)


def test_a_worker_that_computes_comes_back_to_a_new_server_by_itself(start: Start, tmp_path: Path) -> None:
    server = start()
    lost: list[str] = []
    first = ServerClient(server.address, server.token, 0, 30.0, lost.append)
    first.join(LAYOUT, METHOD | {"worker_timeout": 1.0, "snapshot_seconds": 1e6})
    first.slot.fill_(1.0)
    first.initialise(None)
    wait_until(lambda: snapshots(tmp_path) == [0])
    first.slot.fill_(7.0)  # where its local steps started
    before = server.process.pid
    kill(server)
    wait_until(lambda: server.process.pid != before)
    wait_until(lambda: first._back_at == 0)
    assert first.slot.tolist() == [7.0] * LAYOUT.size and not lost
    first.leave(finished=False)


def test_a_worker_whose_connection_breaks_takes_its_own_place_again(serve: Serve) -> None:
    server = serve(2)
    client = enter(server, 0)
    push(client, 0, 0.5)
    client._channel.end()
    assert push(client, 1, 0.25, base=1)["version"] == 2
    with pytest.raises(RefusedError, match="worker 0 is here already"):
        enter(server, 0)


def test_a_plan_message_counts_once_however_often_it_comes(serve: Serve) -> None:
    server = serve(2)
    client = enter(server, 0)
    message = {"kind": "plan", "number": "x-1", "event": "begin_epoch", "epoch": 1}
    assert client.ask(message) == client.ask(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_version": 5}, "base version 5: the server is at 1"),
        ({"base_version": -1}, "base version -1"),
        ({"sequence": -3}, "sequence number -3"),
        ({"weight": float("inf")}, "weight inf"),
        ({"weight": -1.0}, "weight -1"),
        ({"weight": "much"}, "malformed"),
        ({"sequence": None}, "malformed"),
        ({"report": {"epochs": float("nan")}}, "epochs is nan"),
        ({"report": 3}, "malformed"),
    ],
)
def test_an_update_that_cannot_be_right_is_refused_and_changes_nothing(
    serve: Serve, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    server = serve(2)
    client = enter(server, 0)
    push(client, 0, 0.5)
    good = {"kind": "push", "sequence": 1, "base_version": 1, "weight": 1.0, "report": {}, "wait": False}
    with pytest.raises(RefusedError, match=message):
        client.ask(good | change, client._sent)
    assert pull(client) == (1, 0.5)
    assert push(client, 1, 0.25, base=1)["version"] == 2
    assert "refused" in (said := capsys.readouterr().err) and "worker 0" in said


def test_a_norm_far_above_the_others_is_refused_when_a_limit_is_given(serve: Serve) -> None:
    server = serve(2)
    client = enter(server, 0, max_update_norm_ratio=1000.0)
    for sequence in range(20):
        push(client, sequence, 1e-3, base=sequence)
    before = pull(client)
    assert push(client, 20, 10.0, base=20)["status"] == "outlier"
    assert pull(client) == before
    assert push(client, 21, 0.5, base=20)["status"] == "applied"


def test_a_paused_worker_is_not_waited_for_and_its_late_update_is_taken(serve: Serve) -> None:
    """Its connection stays open, which is all that a stopped process or a cut cable leaves."""
    server = serve(2)
    method = {"updates_per_step": 2, "barrier": 2, "worker_timeout": 1.0}
    first, second = (enter(server, worker, **method) for worker in (0, 1))
    answer = push(first, 0, 0.5)  # waits for the second's time to run out
    assert answer["status"] == "applied" and pull(first) == (1, 0.5)
    late: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: late.append(push(second, 0, 0.25)))
    thread.start()
    time.sleep(0.2)
    push(first, 1, 0.0, base=1)
    thread.join(10)
    assert late[0]["status"] == "applied" and late[0]["staleness"] == 1
    assert pull(first)[1] == 0.5 - 0.125


def test_a_worker_that_nobody_announced_joins_and_leaves(serve: Serve) -> None:
    server = serve(1)
    first = enter(server, 0)
    joiner = enter(server, None)
    assert (joiner.worker, joiner.workers) == (1, 1)
    assert push(joiner, 0, 0.5)["version"] == 1
    assert pull(first) == (1, 0.5)
    joiner.leave(finished=False)
    assert push(first, 0, 0.25, base=1)["version"] == 2
    again = enter(server, None)
    assert again.worker == 1 and again.join(LAYOUT, METHOD)["sequence"] == 1


def test_there_is_room_for_so_many_joiners(serve: Serve) -> None:
    server = serve(1)
    first = enter(server, 0)
    joiners = [enter(server, None) for _ in range(16)]
    with pytest.raises(RefusedError, match="16 workers have joined"):
        ServerClient(server.address, server.token, None)
    joiners[3].leave(finished=False)
    assert enter(server, None).worker == 4
    assert push(first, 0, 0.5)["version"] == 1


def test_a_server_that_cannot_prove_the_token_is_not_trusted(tmp_path: Path) -> None:
    """It has taken the port of ours, and repeats to the worker what the worker has said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answers: list[bytes] = []

        def impersonate() -> None:
            channel = Channel(listener.accept()[0])
            channel.send({"challenge": "0" * 32})
            said = channel.receive()
            answers.append(json.dumps(said).encode())
            channel.send({"proof": said["proof"], "worker": 0, "workers": 1, "timeout": 1.0, "server": "x"})

        thread = threading.Thread(target=impersonate, daemon=True)
        thread.start()
        with pytest.raises(RefusedError, match="does not know this run's token"):
            ServerClient(f"127.0.0.1:{listener.getsockname()[1]}", "a secret of this run", 0)
        thread.join(10)
    assert b"a secret of this run" not in answers[0]


def test_a_token_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigurationError, match=r"--token-file .*token: cannot be read"):
        read_token(path)
    write_token(path, "0123456789abcdef")
    assert read_token(path) == "0123456789abcdef" and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"others can read it; run chmod 600"):
        read_token(path)
    write_token(path, "short")
    with pytest.raises(ConfigurationError, match="at least 16 characters"):
        read_token(path)


def test_strangers_are_closed_and_do_not_pile_up(tmp_path: Path) -> None:
    server = ThreadServer(1, tmp_path)
    try:
        client = enter(server, 0)
        host, _, port = server.address.rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(200)]
        push(client, 0, 0.5)
        wait_until(lambda: server.service.refusals.counts["no introduction"] >= 200 - 64)
        wait_until(lambda: len(server.service.members.peers) == 1 and len(server._loop.peers) <= 65)
        strangers[-1].sendall(os.urandom(4096))
        assert push(client, 1, 0.25, base=1)["version"] == 2
        for stranger in strangers:
            stranger.close()
    finally:
        server.stop()
