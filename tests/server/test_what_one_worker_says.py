"""What one worker says, and what lies in one directory, binds nobody else and ends no run."""

import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairseq_async.errors import RefusedError
from fairseq_async.protocol import (
    Alive,
    Initialise,
    Pull,
    Push,
    Report,
    Request,
    ScheduleEvent,
    encode,
)
from fairseq_async.records.state_files import restored_path
from fairseq_async.reporting import page
from fairseq_async.reporting.runs import load
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.service import Service
from scripts.faults.direct import FakeChannel
from tests.helpers import halving, in_process
from tests.helpers.halving import LAYOUT, begun, hello, layout
from tests.helpers.in_process import Connection, new_service
from tests.helpers.run_files import events
from tests.helpers.server_client import StartThreadServer, join, push


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return new_service(2, tmp_path / "run", halving.build, lambda: 1000.0)


def test_a_clock_that_fails_ends_nothing(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mistake in what time brings is a line in the log, as one in what a message brings is."""
    service.run_dir.mkdir()
    connection = begun(service)

    def fail(now: float) -> Any:
        raise ZeroDivisionError("a mistake")

    assert service.run is not None
    monkeypatch.setattr(service.run.coordinator, "tick", fail)
    assert [service.tick() for _ in range(3)] == [1.0] * 3 and service.refusals.counts["internal error"] == 3
    monkeypatch.undo()
    in_process.slot(service, 0).fill_(1.0)
    assert connection.send(Push(0, 0, 1.0, Report())) and connection.last["status"] == "applied"


@pytest.mark.parametrize("trouble", ["no process", "no directory"])
def test_a_run_goes_on_without_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], trouble: str
) -> None:
    def no_process() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    service = Service(in_process.TOKEN, 2, run_dir, halving.build, lambda: 1000.0)
    monkeypatch.setattr(os, "fork", no_process)
    connection = begun(service)
    if trouble == "no directory":
        shutil.rmtree(run_dir)
    in_process.slot(service, 0).fill_(1.0)
    assert connection.send(Push(0, 0, 1.0, Report())) and connection.last["status"] == "applied"
    service.snapshots._taken_at = None
    assert service.tick() == 1.0
    assert "a snapshot could not be written: " in capfd.readouterr().err
    connection.send(Alive())
    in_process.end(service)


def test_a_flood_of_mistakes_fills_no_log(service: Service, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(100):
        service.refusals.count_mistake("worker 1", ValueError("line\nfeed \x1b[31m"))
    service.refusals.count("messages", "worker \x1b", "a\nb")
    said = capfd.readouterr().err
    assert said.count("refused (internal error") == 7 and len(said) < 10_000
    assert "\x1b" not in said and r"worker \x1b: a\nb" in said


def with_shape(*shape: int) -> dict[str, Any]:
    return {"segments": [{"name": "w", "shape": list(shape), "dtype": "float32"}]}


def test_only_worker_0_describes_the_run(service: Service, tmp_path: Path) -> None:
    """A joiner with another model that comes first is refused when worker 0 is there, and not the other way round."""
    service.run_dir.mkdir()
    other, gone = Connection(service), Connection(service)
    other.introduce(1)
    assert not hello(other, with_shape(7))
    gone.introduce(1, instance="x")
    gone.close()
    again = Connection(service)
    again.introduce(1)
    assert not hello(again, with_shape(7))
    first = begun(service)
    assert first.last["kind"] == "welcome" and "its w is 7 float32, theirs is " in again.last["error"]
    assert hello(again, layout()) and again.last["kind"] == "welcome"


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_worker_of_another_number_of_ranks_is_refused_where_no_process_has_the_update_to_weigh(
    service: Service, share: float
) -> None:
    service.run_dir.mkdir()
    connection, run = begun(service), service.described
    run.spec = replace(run.spec, server=replace(run.spec.server, shard_hosts="a:1"))
    connection.send(Push(0, 0, 1.0, Report(share=share)))
    assert "workers of unequal numbers of ranks do not go with shards on other machines" in connection.last["error"]


@pytest.mark.parametrize("shape", [(-1,), (1 << 40, 1 << 40), (0,), (-2, -3)])
def test_tensors_that_cannot_be_are_refused(service: Service, shape: tuple[int, ...]) -> None:
    first = Connection(service)
    first.introduce(0)
    assert hello(first, with_shape(*shape)) and first.last["error"].startswith("malformed message: layout: segments")
    assert service.run is None


POSITIONS = ["9" * 700, str(1 << 63), "[" * 100 + "]" * 100, '"' + "x" * 40_000 + '"']


@pytest.mark.parametrize("position", POSITIONS, ids=["digits", "bits", "depth", "size"])
def test_a_position_that_could_not_be_read_back_is_refused(service: Service, position: str) -> None:
    service.run_dir.mkdir()
    first = begun(service)
    in_process.slot(service, 0).fill_(1.0)
    body = encode(Push(0, 0, 1.0, Report(position={"at": "HERE"}))).replace(b'"HERE"', position.encode())
    service.receive(first.peer, body)
    assert "malformed message" in first.last["error"] and "position" in first.last["error"]
    assert first.send(Push(0, 0, 1.0, Report(position={"at": 1}))) and first.last["status"] == "applied"
    in_process.take_snapshot(service)
    assert service.snapshots.latest(lambda state: None) is not None


@pytest.mark.parametrize("count", ["local_steps", "shard", "offset", "bytes_sent", "bytes_received"])
def test_a_count_that_no_reader_could_add_up_is_refused(service: Service, count: str) -> None:
    service.run_dir.mkdir()
    first = begun(service)
    in_process.slot(service, 0).fill_(1.0)
    for wrong in (int("9" * 4000), (1 << 53) + 1, -1):
        body = encode(Push(0, 0, 1.0, Report())).replace(f'"{count}":null'.encode(), f'"{count}":{wrong}'.encode())
        service.receive(first.peer, body)
        assert "malformed message" in first.last["error"] and count in first.last["error"]
    assert first.send(Push(0, 0, 1.0, Report(**{count: 1 << 53}))) and first.last["status"] == "applied"


def test_an_update_that_comes_again_and_again_leaves_no_position_in_the_log(service: Service) -> None:
    service.run_dir.mkdir()
    first = begun(service)
    in_process.slot(service, 0).fill_(1.0)
    for _ in range(3):
        first.send(Push(0, 0, 1.0, Report(position={"at": "x" * 30_000})))
    assert ["position" in event for event in events(service.run_dir)] == [True, False, False]
    assert (service.run_dir / "events.jsonl").stat().st_size < 32_000


def test_a_report_that_no_fp32_can_hold_leaves_a_log_that_can_be_drawn(service: Service, tmp_path: Path) -> None:
    service.run_dir.mkdir()
    first = begun(service, updates_per_step=1)
    for number, value in enumerate((1.0, 1e308, -1e308, 3e38, 2.0)):
        in_process.slot(service, 0).fill_(1.0)
        size = abs(value)
        seconds = {"computing_seconds": size, "waiting_seconds": size, "push_seconds": size}
        report = Report(
            loss=value, progress=value, epochs=0.1, tokens=min(size, 2.0**53), residual_norm=size, **seconds
        )
        assert first.send(Push(number, number, 1.0, report)) and first.last["status"] == "applied"
    logged = events(service.run_dir)
    assert [event["loss"] for event in logged] == [1.0, None, None, 3e38, 2.0]
    assert page.write(load([service.run_dir]), "title", tmp_path / "report").exists()


def test_numbers_of_updates_grow_by_one(service: Service) -> None:
    service.run_dir.mkdir()
    first = begun(service)
    in_process.slot(service, 0).fill_(1.0)
    for number in ((1 << 63) - 1, 1):
        assert first.send(Push(number, 0, 1.0, Report()))
        assert f"sequence number {number}: the next of worker 0 is 0" in first.last["error"]
    assert first.send(Push(0, 0, 1.0, Report())) and first.last["status"] == "applied"


@pytest.mark.parametrize("seconds", [1e-320, 5e-324, 1e-9, 1e-5])
def test_a_claim_to_be_fast_takes_no_more_than_a_part_of_the_others_steps(seconds: float) -> None:
    plan = LocalStepPlan(workers=3, local_steps=64, total_steps=1000, dynamic_local_steps=True, shards=[], seed=1)
    for _ in range(3):
        for worker, claimed in enumerate((seconds, 0.1, 0.1)):
            plan.assign(worker)
            plan.record(worker, Report(local_steps=10, step_seconds=claimed))
    assert all(math.isfinite(speed) for speed in plan.speeds.values())
    assert [plan.assign(worker).local_steps for worker in (1, 2)] in ([4, 4], [64, 64])


def test_of_two_workers_the_claim_of_one_leaves_the_other_a_step() -> None:
    """As docs/faults.md says: the median of two speeds is no measure."""
    plan = LocalStepPlan(workers=2, local_steps=64, total_steps=1000, dynamic_local_steps=True, shards=[], seed=1)
    for worker, claimed in enumerate((1e-5, 0.1)):
        plan.assign(worker)
        plan.record(worker, Report(local_steps=10, step_seconds=claimed))
    assert plan.assign(1).local_steps == 1


@pytest.mark.parametrize("claim", [{"local_steps": 10**6}, {"local_steps": 1, "epochs": 1e9}])
def test_a_report_that_cannot_be_is_refused_and_does_not_end_the_run(claim: dict[str, Any]) -> None:
    plan = LocalStepPlan(
        workers=2, local_steps=20, total_steps=1000, dynamic_local_steps=False, shards=[], seed=1, max_epoch=10
    )
    with pytest.raises(RefusedError):
        plan.check(Report(**{"step_seconds": 0.1} | claim))
    assert not plan.finished


def test_a_message_of_a_worker_is_small_once_its_model_is_known(service: Service) -> None:
    service.run_dir.mkdir()
    assert begun(service).channel.largest <= 1 << 20


def test_a_worker_sends_one_large_message_on_a_connection(service: Service) -> None:
    """The one in which it describes its model; whatever else it sends does not take the others' time again."""
    service.run_dir.mkdir()
    begun(service)
    other = Connection(service)
    other.introduce(1)
    before = other.channel.largest
    assert other.send({"kind": "alive", "x": "x" * (1 << 19)}) and "malformed message" in other.last["error"]
    assert before > 1 << 20 and other.channel.largest <= 1 << 18
    assert hello(other, layout()) and other.last["kind"] == "welcome"


@pytest.mark.parametrize("fails", ["record", "assign"])
def test_an_update_over_which_the_plan_fails_spares_the_others_of_its_round(
    service: Service, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """It is applied; only where there is no work for its worker is its answer that error."""
    service.run_dir.mkdir()
    first = begun(service, barrier=2)
    second = Connection(service)
    second.introduce(1)
    assert service.run is not None and hello(second, layout(), barrier=2)
    plan = service.run.coordinator.plan
    usual = getattr(plan, fails)

    def fail(worker: int, *report: Report) -> Any:
        if worker == 0:
            raise TypeError("a mistake")
        return usual(worker, *report)

    monkeypatch.setattr(plan, fails, fail)
    for worker, connection in enumerate((first, second)):
        in_process.slot(service, worker).fill_(1.0)
        connection.send(Push(0, 0, 1.0, Report()))
    assert second.last["status"] == "applied" and service.refusals.counts["internal error"] == 1
    if fails == "record":
        assert first.last["status"] == "applied"
        return
    assert "a mistake" in first.last["error"]
    monkeypatch.setattr(plan, "assign", usual)
    assert first.send(Push(0, 0, 1.0, Report())) and first.last["status"] == "duplicate"


def test_an_answer_that_fails_spares_the_others_of_its_round(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for the parameters of worker 0, and worker 1 has sent the update that completes the round."""
    service.run_dir.mkdir()
    first, second = (Connection(service) for _ in range(2))
    for worker, connection in enumerate((first, second)):
        connection.introduce(worker)
        hello(connection, layout(), remote=True, barrier=2, publishes=False)
        connection.channel.receive(bytes(4 * LAYOUT.size))
        if worker == 0:
            connection.send(Initialise(False))
    assert service.run is not None
    give = service.run.slots.give

    def fail(server: Any, worker: int, pull: Pull) -> Any:
        if worker == 0:
            raise MemoryError("no memory for this one")
        return give(server, worker, pull)

    monkeypatch.setattr(service.run.slots, "give", fail)
    for connection in (first, second):
        connection.send(Push(0, 0, 1.0, Report(), pulls=True))
    assert "no memory for this one" in first.last["error"] and second.last["kind"] == "pull_reply"
    assert first.send(Push(0, 0, 1.0, Report())) and first.last["status"] == "duplicate", "it is applied, and here"


def test_a_state_is_in_files_that_the_server_names_and_nobody_else_reads(
    start_thread_server: StartThreadServer, tmp_path: Path
) -> None:
    worker = join(start_thread_server(1), 0, workers=1, record=True)
    push(worker, 0, 0.5)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".state-0.pt").symlink_to(victim)
    worker.save_state(str(tmp_path / "state.pt"))
    assert victim.read_text() == "mine" and not (tmp_path / ".state-0.pt").exists()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("state.pt", "start.pt")] == [0o600] * 2


def test_only_worker_0_takes_the_runs_state(service: Service) -> None:
    service.run_dir.mkdir()
    begun(service)
    second = Connection(service)
    second.introduce(1)
    hello(second, layout())
    assert second.send({"kind": "save_state"}) and second.last["error"] == "worker 0 saves the run's state"
    assert not list(service.run_dir.glob(".state*"))


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        (Initialise(False), "worker 0 brings the parameters"),
        (ScheduleEvent("a", "end_epoch", 1, 1.0), "worker 0 tells of its epochs, which the learning rate follows"),
    ],
    ids=["the beginning", "an epoch"],
)
def test_only_worker_0_begins_the_run_and_ends_epochs(service: Service, asks: Request, said: str) -> None:
    service.run_dir.mkdir()
    begun(service)
    second = Connection(service)
    second.introduce(1)
    hello(second, layout())
    assert second.send(asks) and second.last.get("error") == said


def test_a_dead_line_to_a_worker_is_found_after_the_time_that_its_run_gives_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed = list[float]()
    monkeypatch.setattr(FakeChannel, "notice_death", lambda channel, seconds: noticed.append(seconds))
    service.run_dir.mkdir()
    begun(service, worker_timeout=7.0)
    assert noticed == [7.0]


@pytest.mark.parametrize("there", ["pipe", "link", "directory", "nothing"])
def test_what_is_no_file_of_a_state_is_refused_at_once(service: Service, tmp_path: Path, there: str) -> None:
    service.run_dir.mkdir()
    path = restored_path(service.run_dir)
    if there == "pipe":
        os.mkfifo(path)
    elif there == "link":
        path.symlink_to("/etc/hostname")
    elif there == "directory":
        path.mkdir()
    first = Connection(service)
    first.introduce(0)
    hello(first, layout())
    assert first.send(Initialise(True)) and "the server's state cannot be read" in first.last["error"]
    assert first.send(Initialise(False)) and first.last["kind"] == "welcome"


def test_first_parameters_that_have_not_come_are_not_taken_for_zeros(service: Service) -> None:
    """From another machine they come behind the message."""
    service.run_dir.mkdir()
    first = Connection(service)
    first.introduce(0)
    hello(first, layout(), remote=True)
    assert first.send(Initialise(False)) and first.last.get("error") == "the parameters have 12 bytes: 0 were sent"
    first.channel.receive(bytes(4 * LAYOUT.size))
    assert first.send(Initialise(False)) and first.last["kind"] == "welcome"
