"""When a server that ends with its workers ends, and what it leaves for the run that was to go on."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fairseq_async.protocol import (
    Alive,
    Answer,
    Goodbye,
    Hello,
    Initialise,
    Leave,
    Push,
    PushReply,
    Report,
    WaitForWork,
    Welcome,
)
from fairseq_async.protocol.notices import ENDED, KEPT, RUN_FINISHED, RUN_OVER, SAVED
from fairseq_async.records.state_files import ending_path
from fairseq_async.regions.global_main import GlobalService
from fairseq_async.server import kept_state
from fairseq_async.server.kept_state import FINAL
from fairseq_async.server.network.connections import Peer
from fairseq_async.server.network.event_loop import EventLoop
from fairseq_async.server.programs import program
from fairseq_async.server.service import Service
from fairseq_async.worker.start import run_directory
from tests.helpers import halving
from tests.helpers.halving import LAYOUT, halving_spec
from tests.helpers.in_process import Connection, new_service, slot, take_snapshot
from tests.helpers.stand_ins import Clock


class Server:
    """A service and its event loop, whose clock a test moves."""

    def __init__(self, run_dir: Path, kind: type[Service] = Service, ends_with_workers: bool = True) -> None:
        self.clock = Clock(1000.0)
        self.service = new_service(2, run_dir, halving.build, self.clock, kind)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.lifeline = socket.socketpair()
        self.connections: dict[int, Connection] = {}
        self.loop = EventLoop(self.listener, self.service, self.lifeline[0], ends_with_workers, stays=True)

    def close(self) -> None:
        for each in (self.listener, *self.lifeline):
            each.close()

    def over_at(self, seconds: float) -> bool:
        self.clock.now = 1000.0 + seconds
        return self.loop._over()

    def enter(self, worker: int, updates_per_step: int = 1) -> Connection:
        connection = Connection(self.service)
        connection.introduce(worker)
        spec = halving_spec(updates_per_step, waits_for_dead=False, worker_timeout=60.0)
        if not connection.ask(Hello(spec, LAYOUT, remote=False), Welcome).initialised:
            slot(self.service, 0).zero_()
            connection.ask(Initialise(False), Welcome)
        return connection


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with closing(Server(tmp_path)) as server:
        yield server


@pytest.mark.parametrize("loading", [False, True], ids=["nobody has come", "workers load their data"])
def test_a_server_waits_for_its_first_workers_however_late_they_are(
    server: Server, tmp_path: Path, loading: bool
) -> None:
    """They may wait in a scheduler's queue; the snapshots of the run that is to go on stay in any case."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "version-000000000500.pt").touch()
    if loading:
        for worker in (0, 1):
            Connection(server.service).introduce(worker, instance=str(worker))
    assert not server.over_at(601.0) and not server.over_at(100_000.0)
    program._finish(server.service, SAVED)
    assert (tmp_path / "snapshots" / "version-000000000500.pt").exists()


def test_a_connection_that_breaks_does_not_end_the_run_of_the_last_worker(server: Server) -> None:
    first, last = server.enter(0), server.enter(1)
    slot(server.service, 1).fill_(1.0)
    last.send(Push(0, 0, 1.0, Report()))
    take_snapshot(server.service)
    first.send(Leave(False))
    first.close()
    assert not server.over_at(1.0)
    last.close()  # without a word
    assert not server.over_at(30.0) and server.over_at(62.0)
    back = server.enter(1)
    assert not server.over_at(63.0)
    back.send(Leave(False))
    assert server.over_at(64.0)


def test_a_worker_that_waits_for_the_end_is_told_of_it_where_the_last_other_falls_silent(server: Server) -> None:
    last, _ = server.enter(0), server.enter(1)
    server.service.membership.wait(0, "end")
    assert not server.over_at(62.0), "worker 1 was not heard of for a minute, and worker 0 has no answer yet"
    last.send(Leave(False))
    assert server.over_at(62.0)


WITHOUT = {
    0: ["without an update, and the model is as it began"],
    1: ["without an update of worker 1: its data is"],
    2: [],
}


@pytest.mark.parametrize("senders", WITHOUT)
def test_a_run_that_ends_without_an_update_of_a_worker_ends_with_a_warning(server: Server, senders: int) -> None:
    said: list[str] = []
    server.service.snapshots.tell = said.append
    workers = [server.enter(0), server.enter(1)]
    for number in range(senders):
        slot(server.service, number).fill_(1.0)
        workers[number].send(Push(0, 0, 1.0, Report()))
    for each in workers:
        each.send(WaitForWork(for_end=True))
    server.service.tick()
    assert server.service.finished
    assert len(said) == len(WITHOUT[senders]) and all(map(str.__contains__, said, WITHOUT[senders]))


def test_a_finished_run_waits_longer_for_a_worker_0_that_died_than_for_others(server: Server) -> None:
    """For as long as it loads its model, too: it writes the last checkpoint."""
    first = server.enter(0)
    server.enter(1).send(Leave(True))
    first.close()
    assert not server.over_at(1.0) and not server.over_at(59.0)
    Connection(server.service).introduce(0, instance="again")
    assert not server.over_at(60.0) and server.over_at(62.0)


def test_a_finished_run_does_not_wait_until_another_worker_has_loaded_its_model(server: Server) -> None:
    """It shows life meanwhile, and can lose nothing."""
    server.enter(0).send(Leave(True))
    late = Connection(server.service)
    late.introduce(1)
    server.loop.peers = [late.peer]
    found = []
    for seconds in (1.0, 19.0, 21.0):
        server.clock.now = 1000.0 + seconds
        late.send(Alive())
        found.append(server.over_at(seconds))
    assert found == [False, False, True]


def test_a_finished_run_that_was_stopped_waits_for_late_workers_as_long_as_any_other(server: Server) -> None:
    server.enter(0).send(Leave(True))
    assert not server.over_at(5.0)
    server.clock.now = 4000.0
    server.loop._excuse_silence(1005.0, 0.0)
    assert not server.over_at(3019.0) and server.over_at(3021.0)


def test_a_finished_run_ends_without_a_worker_that_hangs_before_its_first_update_as_without_any_other(
    server: Server,
) -> None:
    """It can lose none any more, so that its first one has no longer time."""
    first, hangs = server.enter(0), server.enter(1)
    first.send(Push(0, 0, 1.0, Report()))
    first.send(Leave(True))
    server.loop.peers = [hangs.peer]
    found = []
    for seconds in (1.0, 31.0, 60.0, 62.0):
        server.clock.now = 1000.0 + seconds
        hangs.send(Alive())
        found.append(server.over_at(seconds))
    assert found == [False, False, False, True]


def test_the_silence_that_is_excused_is_what_the_server_has_not_read_and_no_shorter_one_is(server: Server) -> None:
    """The timeout is a minute: half of it, besides the wait that it meant, may be a long step of its own."""
    server.enter(0)
    member = server.service.membership.members[0]
    for read_at, wait, excused in ((1060.0, 10.0, 0.0), (1059.0, 10.0, 41.0), (1070.0, 0.0, 0.0), (1000.0, 1.0, 100.0)):
        server.clock.now, before = 1100.0, member.heard
        assert server.loop._excuse_silence(read_at, wait) == 1100.0
        assert member.heard - before == excused


def test_a_server_that_sleeps_as_long_as_it_means_to_excuses_nobody(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here for longer than half the timeout, before the process that started it is gone."""
    waits, excused = list[float](), list[float]()

    def select(timeout: float) -> list[tuple[Any, int]]:
        waits.append(timeout)
        server.clock.now += timeout
        return [(SimpleNamespace(fileobj=server.lifeline[0]), 1)] if len(waits) > 2 else []

    monkeypatch.setattr(server.service, "tick", lambda: 45.0)
    monkeypatch.setattr(server.service.membership, "excuse", excused.append)
    monkeypatch.setattr(server.loop, "_selector", SimpleNamespace(select=select))
    assert not server.loop.run()
    assert waits == [0.0, 45.0, 45.0] and not excused


def test_a_global_server_waits_for_its_regions_however_long_their_line_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on meanwhile, and try to reach it for as long as they run."""
    with closing(Server(tmp_path, GlobalService)) as server:
        told: list[str] = []
        monkeypatch.setattr(server.service, "tell", told.append)
        regions = [server.enter(0), server.enter(1)]
        for region in regions:
            region.close()  # without a word
        assert not server.over_at(62.0) and not server.over_at(100_000.0)
        assert told == ["no region is connected any more: the run waits until one is back, or until Ctrl-C"]
        server.enter(1).send(Leave(False))
        assert server.over_at(100_001.0)  # region 0 is away for longer than the timeout: it may have died


def test_a_global_server_that_goes_on_knows_which_regions_have_left_for_good(tmp_path: Path) -> None:
    """Else it would wait for those that have died without end."""
    with closing(Server(tmp_path, GlobalService)) as before:
        before.enter(0).send(Leave(False))
        before.enter(1)
        take_snapshot(before.service)
    with closing(Server(tmp_path, GlobalService)) as server:
        server.service.resumes = True
        server.enter(1)
        assert server.service.membership.left_for_good == [0]


def test_the_next_run_waits_until_the_one_before_is_gone(server: Server, tmp_path: Path) -> None:
    """Its last snapshot is written before its process has ended, which holds the directory until then."""
    server.enter(0)
    server.enter(1).send(Push(0, 0, 1.0, Report()))
    program._keep(server.service, asked=True)
    assert ending_path(tmp_path).exists() and list(tmp_path.glob("snapshots/version-*.pt"))
    os.close(run_directory.claim(tmp_path, ""))
    assert not ending_path(tmp_path).exists(), "nobody waits for it once more"


@pytest.mark.parametrize("sends", [False, True], ids=["nothing", "half a step"])
@pytest.mark.parametrize("asked", [True, False])
def test_before_the_first_update_only_a_server_that_was_asked_to_end_keeps_nothing(
    server: Server, tmp_path: Path, asked: bool, sends: bool
) -> None:
    """A Ray actor that dies with its node is made again on another one, and its workers have these parameters. A
    gradient that was acknowledged is in the state before the step that it is a part of."""
    first = server.enter(0, updates_per_step=2)
    take_snapshot(server.service)
    if sends:
        assert first.ask(Push(0, 0, 1.0, Report()), PushReply).version == 0
    program._keep(server.service, asked)
    assert bool(list(tmp_path.glob("snapshots/version-*.pt"))) != (asked and not sends)


def test_a_run_that_worker_0_ends_before_the_first_update_has_no_result(server: Server, tmp_path: Path) -> None:
    """An export would take the first parameters for trained ones."""
    server.enter(0).ask(Leave(finished=True), Goodbye)
    assert server.service.finished and not (tmp_path / FINAL).exists()


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_where_no_file_can_be_made_for_the_next_run_a_last_snapshot_is_still_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, which may have room again a moment later."""
    server.enter(0).send(Push(0, 0, 1.0, Report()))
    monkeypatch.setattr(Path, "touch", refuse)
    program._keep(server.service, asked=True)
    assert list(tmp_path.glob("snapshots/version-*.pt"))


def test_a_finished_run_whose_directory_has_become_read_only_ends_with_a_line(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would otherwise count as a server that has died, and be started again."""
    said: list[str] = []
    monkeypatch.setattr(server.service, "tell", said.append)
    first = server.enter(0)
    first.send(Push(0, 0, 1.0, Report()))
    first.send(Leave(True))
    take_snapshot(server.service)
    monkeypatch.setattr(Path, "unlink", refuse)
    program._finish(server.service, SAVED)
    (line,) = said
    assert "cannot be removed: " in line and "remove " in line and "\n" not in line


@pytest.mark.parametrize("last_word", [Leave(False), Push(0, 0, 1.0, Report())], ids=["goodbye", "an update"])
def test_a_server_that_was_started_again_ends_when_nobody_comes_back(tmp_path: Path, last_word: Leave | Push) -> None:
    """Its last worker has died with the server before, and worker 0 waits for this one's end."""
    with closing(Server(tmp_path)) as before:
        before.enter(0).send(last_word)
        worker = before.enter(1)
        slot(before.service, 1).fill_(1.0)
        worker.send(Push(0, 0, 1.0, Report()))
        take_snapshot(before.service)
    with closing(Server(tmp_path)) as server:
        server.service.recover()
        assert not server.over_at(30.0) and server.over_at(62.0)


def test_a_server_that_cannot_go_on_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts it again names the reason, as of a full disk."""
    with closing(Server(tmp_path)) as before:
        before.enter(0).send(Push(0, 0, 1.0, Report()))
        take_snapshot(before.service)
    reader, writer = os.pipe()
    with closing(Server(tmp_path)) as server, open(reader) as report:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(server.service, "recover", lambda: raise_(full))
        with pytest.raises(SystemExit):
            program._recover(server.service, writer)
        assert report.read() == "error: [Errno 28] No space left on device"


def raise_(error: Exception) -> None:
    raise error


# The finished model, until worker 0 has saved it


def enter_last(server: Server, worker: int, instance: str = "x", **changes: Any) -> Welcome:
    """Enters a run that ends with its second version."""
    connection = Connection(server.service)
    connection.introduce(worker, instance)
    spec = replace(halving_spec(1, waits_for_dead=False, worker_timeout=60.0), **{"last_version": 2} | changes)
    server.connections[worker] = connection
    welcome = connection.ask(Hello(spec, LAYOUT, remote=False), Welcome)
    if not welcome.initialised:
        slot(server.service, 0).zero_()
        welcome = connection.ask(Initialise(False), Welcome)
    return welcome


def push(server: Server, worker: int, sequence: int, version: int) -> PushReply:
    slot(server.service, worker).fill_(1.0)
    return server.connections[worker].ask(Push(sequence, version, 1.0, Report()), PushReply)


def finish(server: Server) -> None:
    """Ends the run with an update of each worker."""
    for worker in (0, 1):
        enter_last(server, worker)
    assert not push(server, 1, 0, 0).finished and push(server, 0, 0, 1).finished


def over(server: Server) -> bool:
    server.loop.peers = list(server.service.peers.values())
    return server.loop._note_end()


def versions(run_dir: Path) -> list[int]:
    return [int(path.stem.partition("-")[2]) for path in sorted(run_dir.glob("snapshots/version-*.pt"))]


def test_the_last_state_is_on_disk_before_a_worker_is_told_of_the_end(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is told may be the last that has the parameters, and the server may be killed right then."""
    there: list[tuple[list[int], bool]] = []
    reply = server.service.answer

    def answer(peer: Peer, message: Answer, tensor: torch.Tensor | None = None) -> None:
        if isinstance(message, PushReply) and message.finished:
            there.append((versions(tmp_path), (tmp_path / FINAL).exists()))
        reply(peer, message, tensor)

    monkeypatch.setattr(server.service, "answer", answer)
    finish(server)
    assert there == [([0, 2], True)]
    found = load_file(tmp_path / FINAL)
    assert found.keys() == {"w"} and torch.equal(found["w"], server.service.described.coordinator.server.parameters)


@pytest.mark.parametrize("how", ["at its last version", "as a worker has asked", "in the next job"])
def test_a_worker_0_that_comes_back_after_the_end_gets_the_last_parameters_at_once(tmp_path: Path, how: str) -> None:
    """From the same server, from one that was started again, and from a new one that resumes."""
    with closing(Server(tmp_path)) as before:
        if how == "as a worker has asked":
            for worker in (0, 1):
                enter_last(before, worker)
            push(before, 0, 0, 0)
            before.connections[1].send(Leave(True))
        else:
            finish(before)
        parameters = before.service.described.coordinator.server.parameters.clone()
        before.connections[0].send(Leave(False))
        assert enter_last(before, 0, "y").finished
    with closing(Server(tmp_path)) as server:
        if how == "in the next job":
            server.service.resumes = True
        else:
            server.service.recover()
        welcome = enter_last(server, 0, "z")
        assert welcome.finished and welcome.version == (1 if how == "as a worker has asked" else 2)
        assert torch.equal(server.service.described.coordinator.server.parameters, parameters)
        assert load_file(tmp_path / FINAL)["w"].equal(parameters)


@pytest.mark.parametrize(
    "longer",
    [{"max_epoch": 7}, {"whole_steps": 7}, {"last_version": 7}, {"options": {"updates_per_step": 1, "total_steps": 7}}],
    ids=str,
)
def test_a_run_that_was_ended_goes_on_where_it_is_to_become_longer(tmp_path: Path, longer: dict[str, Any]) -> None:
    with closing(Server(tmp_path)) as before:
        for worker in (0, 1):
            enter_last(before, worker)
        push(before, 0, 0, 0)
        before.connections[1].send(Leave(True))
    with closing(Server(tmp_path)) as server:
        server.service.resumes = True
        assert not enter_last(server, 0, **longer).finished
        assert not (tmp_path / FINAL).exists(), "it is no model of this run"


@pytest.mark.parametrize(
    ("why", "kept", "lines"),
    [(SAVED, [], 0), (KEPT, [0, 2], 0), (ENDED, [0, 2], 1), ("", [0, 2], 1)],
    ids=["saved", "may be started again", "asked to end", "killed"],
)
def test_a_finished_state_stays_until_worker_0_has_ended_in_order(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, kept: list[int], lines: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(server.service, "tell", said.append)
    finish(server)
    program._finish(server.service, why)
    assert versions(tmp_path) == kept and (tmp_path / FINAL).exists() and len(said) == lines
    assert all(f"kept in {tmp_path / FINAL}; fairseq-async export {tmp_path} OUT" in line for line in said)


def test_a_server_stays_after_the_end_and_says_who_has_left(tmp_path: Path) -> None:
    """However long worker 0 is away, since whoever has started it starts it again."""
    with closing(Server(tmp_path, ends_with_workers=False)) as server:
        announced: list[str] = []
        server.loop.announce = announced.append
        finish(server)
        server.clock.now += 1.0
        assert not over(server) and announced == [RUN_FINISHED]
        server.connections[1].send(Leave(False))
        server.connections[0].close()  # it was killed
        server.clock.now += 10_000.0
        assert not over(server) and announced == [RUN_FINISHED]
        for instance in ("y", "z"):
            enter_last(server, 0, instance)
            assert not over(server) and announced.pop() == RUN_FINISHED
            server.connections[0].send(Leave(False))
            assert over(server) and announced == [*announced[:-1], RUN_OVER]
        server.loop.peers = []
        server.lifeline[1].close()
        assert server.loop.run()


def test_on_a_full_disk_the_workers_get_the_last_parameters_and_it_is_tried_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    server.service.snapshots.tell = said.append
    with monkeypatch.context() as full:
        full.setattr(kept_state, "write_final", refuse)
        full.setattr(server.service.snapshots, "take_here", refuse)
        finish(server)  # both are told
        server.clock.now += 61.0
        server.service.tick()
        (line,) = said
        assert "could not be written" in line and "Read-only file system" in line and not (tmp_path / FINAL).exists()
    server.service.tick()
    assert not (tmp_path / FINAL).exists(), "not all the time"
    server.clock.now += 61.0
    server.service.tick()
    assert (tmp_path / FINAL).exists() and versions(tmp_path)[-1] == 2 and len(said) == 1


@pytest.mark.parametrize("why", [SAVED, ENDED])
def test_of_a_run_of_regions_the_last_state_stays_however_it_ends(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A region saves nothing of it, though its worker 0, region 0, has left in order."""
    said: list[str] = []
    monkeypatch.setattr(server.service, "tell", said.append)
    spec = halving_spec(1)
    for worker in (0, 1):
        enter_last(server, worker, framework=spec.framework | {"of_regions": True})
    push(server, 1, 0, 0)
    assert push(server, 0, 0, 1).finished
    server.connections[0].send(Leave(False))
    program._finish(server.service, why)
    assert versions(tmp_path) == [0, 2] and (tmp_path / FINAL).exists()
    export = f"fairseq-async export {tmp_path} OUT writes them for use"
    assert said == [f"the last parameters are kept in {tmp_path / FINAL}; {export}"]


def test_a_finished_server_that_has_something_left_to_do_does_it_though_its_starter_is_gone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a region's, whose last update the global server has not answered."""
    finish(server)
    for each in server.connections.values():
        each.send(Leave(False))
    ticks = list[bool]()

    def tick() -> float:
        server.service.busy = len(ticks) < 2
        ticks.append(server.service.busy)
        assert len(ticks) < 9, "nobody ends it any more"
        return 0.0

    monkeypatch.setattr(server.service, "tick", tick)
    server.service.busy = True
    server.lifeline[1].close()
    assert server.loop.run() and ticks == [True, True, False]


def test_nobody_waits_for_a_run_whose_starter_is_gone_or_lets_its_server_end(monkeypatch: pytest.MonkeyPatch) -> None:
    (stdin, lifeline), (starter, process) = os.pipe(), os.pipe()
    with open(stdin) as own, open(starter):
        monkeypatch.setattr("sys.stdin", own)
        assert not program._is_abandoned(starter)
        os.close(process)
        assert program._is_abandoned(starter) and not program._is_abandoned(None)
        os.close(lifeline)
        assert program._is_abandoned(None)
