"""What dies comes back, nothing counts twice, and nobody waits for who is not there."""

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fairseq_async.errors import ConfigurationError, ExchangeError, RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof, read_token, write_token
from fairseq_async.protocol import (
    Greeting,
    Introduce,
    Introduced,
    Push,
    PushReply,
    Report,
    Request,
    Status,
    Welcome,
    encode,
    parse_answer,
    parse_request,
)
from fairseq_async.server.network import connection_loop
from fairseq_async.server.network.connections import Peer
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.sgd_server import sgd_spec
from scripts.faults.thread_server import ThreadServer
from tests.helpers.run_files import events, snapshot_versions
from tests.helpers.server_client import (
    BOTH_WAYS,
    LAYOUT,
    METHOD,
    StartServer,
    StartThreadServer,
    ask,
    changed,
    join,
    join_patiently,
    kill,
    pull,
    push,
)
from tests.helpers.stand_ins import NoRoom
from tests.helpers.waiting import wait_until


@BOTH_WAYS
def test_a_killed_server_goes_on_from_its_snapshot_and_the_update_in_hand_is_not_lost(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server()
    first = join_patiently(server, 0, snapshot_seconds=1e-3)
    for sequence in range(3):
        push(first, sequence, 0.125, base=sequence)
        wait_until(lambda version=sequence + 1: snapshot_versions(tmp_path)[-1:] == [version])  # type: ignore[misc]
    (tmp_path / "snapshots" / "version-000000000003.pt").unlink()  # as if it had not been written yet
    kill(server)
    answer = push(first, 3, 0.125, base=3)  # updates 0 and 1 are in the snapshot, 2 is taken back, 3 comes again
    assert answer.status is Status.APPLIED and events(tmp_path)[-1]["base_version"] == 2
    assert pull(first) == (3, 1.0 - 3 * 0.125)
    assert [event["sequence"] for event in events(tmp_path)] == [0, 1, 3]
    rollback = json.loads((tmp_path / "rollbacks.jsonl").read_text())
    assert (
        rollback["sequences"] == {"0": 1} and rollback["events"] == 1 and "version-000000000002" in rollback["source"]
    )


@BOTH_WAYS
@pytest.mark.parametrize("breaks_again", [False, True])
def test_a_version_of_before_the_rollback_is_pulled_again_though_its_number_is_the_same(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks_again: bool
) -> None:
    """Also when the new server's first words are lost."""
    server = start_server()
    first, second = (join_patiently(server, worker, snapshot_seconds=1e6) for worker in (0, 1))
    wait_until(lambda: snapshot_versions(tmp_path) == [0])
    push(first, 0, 0.5)
    assert pull(second) == (1, 0.5)
    hello, failures = second.connection.greet, iter([breaks_again])

    def after_failures() -> Welcome:
        if next(failures, False):
            second.connection.channel.close()
            raise ExchangeError("it broke again")
        return hello()

    monkeypatch.setattr(second.connection, "greet", after_failures)
    kill(server)
    answer = push(second, 0, 0.125, base=1)
    assert answer.version != 1  # which the worker would take for the version that it has
    assert pull(second) == (1, 0.875)


def pull_after_loss(client: Client) -> tuple[int, float]:
    client.schedule_event("begin_epoch", 1)  # shared memory alone does not show that the server is gone
    return pull(client)


def test_a_server_that_stays_away_is_waited_for_as_long_as_patience_lasts(start_server: StartServer) -> None:
    server = start_server(restarts=0)
    client = join(server, 0, patience=1.0)
    kill(server)
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="is gone"):
        push(client, 0, 0.5)
    assert time.monotonic() - began >= 1.0
    wait_until(lambda: server.poll() == -signal.SIGKILL)


def test_a_server_is_started_again_and_its_end_is_seen_where_there_is_no_room_for_a_line_about_it(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", NoRoom())
    server = start_server(restarts=1)
    first = join_patiently(server, 0)
    wait_until(lambda: snapshot_versions(tmp_path) == [0])
    kill(server)
    assert pull_after_loss(first) == (0, 1.0)
    kill(server)
    wait_until(lambda: server.poll() == -signal.SIGKILL)


def memories_open() -> int:
    """How many descriptors of shared memory this process has."""
    return sum("/dev/shm/" in os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())


@BOTH_WAYS
def test_a_worker_that_computes_comes_back_to_a_new_server_by_itself(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server()
    lost: list[str] = []
    first = Client(LastingConnection(server.address, server.token, 0, 30.0, lost.append))
    first.join(LAYOUT, sgd_spec(worker_timeout=1.0, snapshot_seconds=1e6))
    first.slot.fill_(1.0)
    first.initialise(None)
    wait_until(lambda: snapshot_versions(tmp_path) == [0])
    first.slot.fill_(7.0)  # where its local steps started
    before, has_open = server.process.pid, memories_open()
    kill(server)
    wait_until(lambda: server.process.pid != before)
    wait_until(lambda: first.connection.restored_version == 0)
    assert first.slot.tolist() == [7.0] * LAYOUT.size and not lost
    assert memories_open() == has_open, "the dead server's is closed"
    first.pull(lambda flat: None)
    first.connection.channel.end()
    push(first, 0, 0.5)
    assert first.connection.restored_version is None, "it is the same server"
    threads = threading.active_count()
    first.leave(finished=False)
    assert threading.active_count() == threads - 1, (
        "it holds the slot, a tensor, which no thread may free as Python ends"
    )


def test_a_worker_whose_connection_breaks_takes_its_own_place_again(start_thread_server: StartThreadServer) -> None:
    server = start_thread_server(2)
    client = join_patiently(server, 0)
    push(client, 0, 0.5)
    client.connection.channel.end()
    assert push(client, 1, 0.25, base=1).version == 2
    with pytest.raises(RefusedError, match="worker 0 is here already"):
        join_patiently(server, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_version": 5}, "base version 5: the server is at 1"),
        ({"base_version": -1}, "base version -1"),
        ({"sequence": -3}, "sequence number -3"),
        ({"weight": float("inf")}, "weight inf"),
        ({"weight": -1.0}, "weight -1"),
        ({"weight": "much"}, "malformed message: weight: Input should be a valid number"),
        ({"sequence": None}, "malformed message: sequence: Input should be a valid integer"),
        ({"report": {"epochs": float("nan")}}, "malformed message: report: epochs: Input should be a finite number"),
        ({"report": 3}, "malformed message: report: "),
    ],
)
def test_an_update_that_cannot_be_right_is_refused_and_changes_nothing(
    start_thread_server: StartThreadServer, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    server = start_thread_server(2)
    client = join_patiently(server, 0)
    push(client, 0, 0.5)
    good = Push(1, 1, 1.0)
    assert message in ask(client, changed(good, change))["error"]
    assert pull(client) == (1, 0.5)
    assert push(client, 1, 0.25, base=1).version == 2
    assert "refused" in (said := capsys.readouterr().err) and "worker 0" in said


@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_an_update_that_the_server_fails_to_look_at_may_be_sent_again(
    start_thread_server: StartThreadServer, monkeypatch: pytest.MonkeyPatch, updates_per_step: int
) -> None:
    server = start_thread_server(1)
    client = join_patiently(server, 0, updates_per_step=updates_per_step)
    with monkeypatch.context() as changes:
        changes.setattr(ParameterServer, "admit", Mock(side_effect=MemoryError))
        with pytest.raises(RefusedError, match="internal error"):
            push(client, 0, 0.5)
    assert pull(client) == (0, 1.0)
    assert push(client, 0, 0.5).status is Status.APPLIED


def test_a_norm_far_above_the_others_is_refused_when_a_limit_is_given(start_thread_server: StartThreadServer) -> None:
    server = start_thread_server(2)
    client = join_patiently(server, 0, max_update_norm_ratio=1000.0)
    for sequence in range(20):
        push(client, sequence, 1e-3, base=sequence)
    before = pull(client)
    assert push(client, 20, 10.0, base=20).status is Status.OUTLIER
    assert pull(client) == before
    assert push(client, 21, 0.5, base=20).status is Status.APPLIED


def test_a_paused_worker_is_not_waited_for_and_its_late_update_is_taken(start_thread_server: StartThreadServer) -> None:
    """Its connection stays open, which is all that a stopped process or a cut cable leaves."""
    server = start_thread_server(2)
    first, second = (
        join_patiently(server, worker, updates_per_step=2, barrier=2, worker_timeout=1.0) for worker in (0, 1)
    )
    answer = push(first, 0, 0.5)  # waits for the second's time to run out
    assert answer.status is Status.APPLIED and pull(first) == (1, 0.5)
    late: list[PushReply] = []
    thread = threading.Thread(target=lambda: late.append(push(second, 0, 0.25)))
    thread.start()
    time.sleep(0.2)
    push(first, 1, 0.0, base=1)
    thread.join(10)
    assert late[0].status is Status.APPLIED and late[0].staleness == 1
    assert pull(first)[1] == 0.5 - 0.125


def test_a_worker_that_nobody_announced_joins_and_leaves(start_thread_server: StartThreadServer) -> None:
    server = start_thread_server(1)
    first = join_patiently(server, 0)
    joiner = join_patiently(server, None)
    assert (joiner.worker, joiner.workers) == (1, 1)
    assert push(joiner, 0, 0.5).version == 1
    assert pull(first) == (1, 0.5)
    joiner.leave(finished=False)
    assert push(first, 0, 0.25, base=1).version == 2
    again = join_patiently(server, None)
    assert again.worker == 1 and again.join(LAYOUT, METHOD).sequence == 1


def test_there_is_room_for_so_many_joiners(start_thread_server: StartThreadServer) -> None:
    server = start_thread_server(1)
    first = join_patiently(server, 0)
    joiners = [join_patiently(server, None) for _ in range(16)]
    with pytest.raises(RefusedError, match="16 workers have joined"):
        Client(LastingConnection(server.address, server.token, None))
    joiners[3].leave(finished=False)
    assert join_patiently(server, None).worker == 4
    assert push(first, 0, 0.5).version == 1


def test_a_server_that_cannot_prove_the_token_is_not_trusted(tmp_path: Path) -> None:
    """It has taken the port of ours, and repeats to the worker what the worker has said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answers: list[bytes] = []

        def impersonate() -> None:
            channel = Channel(listener.accept()[0])
            channel.send(encode(Greeting("0" * 32)))
            answers.append(channel.receive())
            introduce = parse_request(answers[0])
            assert isinstance(introduce, Introduce)
            channel.send(encode(Introduced(introduce.proof, 0, 1, "x", 1.0)))

        thread = threading.Thread(target=impersonate, daemon=True)
        thread.start()
        with pytest.raises(RefusedError, match="does not know this run's token"):
            Client(LastingConnection(f"127.0.0.1:{listener.getsockname()[1]}", "a secret of this run", 0))
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
    for wrong in ("short", "0123456789\0abcdef"):  # no variable of the environment can have a NUL
        write_token(path, wrong)
        with pytest.raises(ConfigurationError, match="token: a token has at least 16 characters, which can be printed"):
            read_token(path)


class LongTurn:
    """An update of worker 0 that takes the server until :meth:`end`, or 20 s; a stranger was greeted before."""

    def __init__(
        self, server: ThreadServer, worker_0: Client, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._began, self._ends, self._handle = threading.Event(), threading.Event(), server.service.handle
        self._pushes = threading.Thread(target=push, args=(worker_0, 0, 0.5))
        host, _, port = server.address.rpartition(":")
        self.stranger = Channel(opened.enter_context(socket.create_connection((host, int(port)))))
        theirs, ours = parse_answer(self.stranger.receive(), Greeting).challenge, challenge()
        own = proof(server.token, "worker", theirs, ours)
        self._introduce = encode(Introduce(own, ours, 1, joins=False, instance="x"))
        monkeypatch.setattr(server.service, "handle", self._take_long)
        self._pushes.start()
        assert self._began.wait(20)

    def _take_long(self, peer: Peer, request: Request, **given: Any) -> None:
        if isinstance(request, Push) and peer.id == 0:
            self._began.set()
            self._ends.wait(20)
        self._handle(peer, request, **given)

    def introduce(self) -> None:
        """Sends the introduction of the stranger, as worker 1, which the server does not read yet."""
        self.stranger.send(self._introduce)

    def end(self) -> Introduced:
        """Ends the turn, and returns the answer to the introduction."""
        self._ends.set()
        answer = parse_answer(self.stranger.receive(), Introduced)
        self._pushes.join(20)
        return answer


def test_a_worker_that_introduces_itself_during_a_long_turn_of_another_is_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn lasts longer than a stranger has to prove itself, and the introduction lies unread meanwhile."""
    monkeypatch.setattr(connection_loop, "_HANDSHAKE_SECONDS", 0.3)
    server = ThreadServer(2, tmp_path)
    with ExitStack() as opened:
        opened.callback(server.stop)
        turn = LongTurn(server, join_patiently(server, 0), opened, monkeypatch)
        turn.introduce()
        time.sleep(0.6)
        assert turn.end().worker == 1
        assert not server.service.refusals.counts["no introduction"]


def test_an_update_on_a_connection_that_was_replaced_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker would send it again on the new connection, and may write something else into the slot before."""
    server = ThreadServer(2, tmp_path)
    with ExitStack() as opened:
        opened.callback(server.stop)
        first, before = join_patiently(server, 0), join_patiently(server, 1)
        turn = LongTurn(server, first, opened, monkeypatch)
        before.connection.channel.send(encode(Push(0, 0, 1.0, Report())))
        before.connection.channel.connection.shutdown(socket.SHUT_RDWR)
        turn.introduce()
        assert turn.end().worker == 1
        wait_until(lambda: len(server._loop.peers) == 2)
        assert server.service.described.coordinator.server.sequences == {0: 0}


def test_strangers_are_closed_and_do_not_pile_up(tmp_path: Path) -> None:
    with ThreadServer(1, tmp_path) as server:
        client = join_patiently(server, 0)
        host, _, port = server.address.rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(400)]
        push(client, 0, 0.5)
        wait_until(lambda: server.service.refusals.counts["no introduction"] >= 400 - 256)
        wait_until(lambda: len(server.service.peers) == 1 and len(server._loop.peers) <= 257)
        strangers[-1].sendall(os.urandom(4096))
        assert push(client, 1, 0.25, base=1).version == 2
        for stranger in strangers:
            stranger.close()
