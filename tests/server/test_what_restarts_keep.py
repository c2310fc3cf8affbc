"""A server that goes on from a checkpoint, or from its own snapshot, has all of what the one before had."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options.config import DelayedNesterovOptions, OuterSGDOptions
from fairseq_async.protocol import Layout, Pull, PullReply, Push, PushReply, Report, ScheduleEvent, Status, Welcome
from fairseq_async.server.resume import newest_state
from fairseq_async.server.run import inner_optimizer
from scripts.faults.digest import digest
from tests.helpers.halving import LAYOUT, halving_spec
from tests.helpers.in_process import slot, take_snapshot
from tests.helpers.mortal import InlineSnapshots
from tests.helpers.restarts import Restarts, Worker, both, save

SPEC = halving_spec(max_update_norm_ratio=10.0, max_epoch=4, snapshot_seconds=1e6)
LOCAL = DelayedNesterovOptions(local_steps=12, dynamic_local_steps=True, total_steps=1000, seed=3)
EPOCH_ENDS = ScheduleEvent("a-1", "end_epoch", 1, 2.0)


@pytest.fixture(params=["checkpoint", "snapshot"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def restarts(tmp_path: Path) -> Iterator[Restarts]:
    restarts = Restarts(tmp_path, SPEC)
    yield restarts
    restarts.close()


def restarted(restarts: Restarts, workers: list[Worker], how: str) -> tuple[list[Worker], Welcome]:
    """The workers of the next server, and what the second of them was told when it came."""
    path = restarts.run_dir / "state.pt"
    before = save(workers[0], path)
    if how == "snapshot":
        assert restarts.service is not None
        take_snapshot(restarts.service)
    service = restarts.begin()
    if how == "snapshot":
        assert service.recover().startswith("version-")
    again, welcome = both(service, restarts.spec, path)
    after = save(again[0], path)
    assert digest(after) == digest(before), {key: (before[key], after[key]) for key in before}
    return again, welcome


def prepared(restarts: Restarts) -> list[Worker]:
    """Both have sent updates, two of which were refused; one waits for its step; an epoch has ended."""
    (first, second), _ = both(restarts.begin(), restarts.spec)
    for number in range(11):  # so many norms of a worker its limit needs
        first.push(0.5)
        second.push(1.0, epochs=0.25 if number < 7 else 0.0)
    first.follow(EPOCH_ENDS)
    assert [second.push(value).status for value in (math.nan, 100.0)] == [Status.REFUSED, Status.OUTLIER]
    assert first.push(0.25).assignment.learning_rate == 0.5
    return [first, second]


def test_all_that_the_server_knows_of_its_workers_is_there_again(restarts: Restarts, how: str) -> None:
    (first, second), welcome = restarted(restarts, prepared(restarts), how)
    assert first.sequence == 12
    assert (welcome.sequence, welcome.refused, welcome.version) == (13, 2, 11)
    assert welcome.assignment.learning_rate == 0.5 and welcome.position == {"epoch": 1, "seen": 12}


def test_the_limit_of_norms_holds_from_the_first_update_on(restarts: Restarts, how: str) -> None:
    (first, second), _ = restarted(restarts, prepared(restarts), how)
    answer = second.push(100.0)
    assert (answer.status, answer.refused) == (Status.OUTLIER, 3)


def test_a_restart_changes_no_bit_of_what_comes_after_it(restarts: Restarts, how: str, tmp_path: Path) -> None:
    """Momentum, the gradient that waits for its step, the learning rate and the passes over the data."""
    quiet = Restarts(tmp_path / "quiet", SPEC)
    (tmp_path / "quiet").mkdir()
    states = []
    try:
        undisturbed = prepared(quiet)
        again, _ = restarted(restarts, prepared(restarts), how)
        for first, second in (undisturbed, again):
            answers = [second.push(2.0), first.push(-1.0), second.push(math.inf), second.push(1.0, epochs=2.25)]
            assert [answer.status.value for answer in answers] == ["applied", "applied", "refused", "applied"]
            assert [answer.version for answer in answers] == [12, 12, 12, 13]
            assert [answer.finished for answer in answers] == [False, False, False, True]
            states.append(save(first, tmp_path / "last.pt"))
    finally:
        quiet.close()
    assert digest(states[0]) == digest(states[1])


def test_a_schedule_event_that_was_counted_before_a_server_died_is_not_counted_again(restarts: Restarts) -> None:
    """Its answer was lost with the server: the worker asks the next one. In a new job numbers begin anew."""
    (first, _), _ = restarted(restarts, prepared(restarts), "snapshot")
    assert first.follow(EPOCH_ENDS) == 0.5
    assert first.follow(replace(EPOCH_ENDS, number="a-2")) == 0.25


@pytest.mark.parametrize(("value", "status"), [(math.nan, "refused"), (100.0, "outlier"), (0.5, "applied")])
def test_a_worker_goes_on_in_its_data_behind_its_last_update_whatever_became_of_that(
    restarts: Restarts, how: str, value: float, status: str
) -> None:
    (first, second) = prepared(restarts)
    assert second.push(value).status.value == status
    _, welcome = restarted(restarts, [first, second], how)
    assert (welcome.sequence, welcome.position) == (14, {"epoch": 1, "seen": 13})


def test_a_run_that_was_finished_is_finished_after_a_restart(restarts: Restarts, how: str) -> None:
    (first, second) = prepared(restarts)
    assert second.push(1.0, epochs=2.25).finished
    (first, second), welcome = restarted(restarts, [first, second], how)
    assert welcome.finished and first.push(1.0).status is Status.FINISHED


def test_local_sgd_goes_on_with_its_speeds_steps_and_shards(tmp_path: Path, how: str) -> None:
    """Worker 1 is three times as slow, and takes 4 of 12 steps."""
    spec = local_sgd_spec(LOCAL, 2, [100, 300], None, {}, max_epoch=3)
    runs = [Restarts(tmp_path / name, spec) for name in ("straight", "restarted")]
    states, assigned = [], []
    try:
        for restarts in runs:
            restarts.run_dir.mkdir()
            workers, _ = both(restarts.begin(), spec)
            for _ in range(3):
                workers[0].push(0.5, local_steps=12, step_seconds=0.1, epochs=0.25)
                workers[1].push(1.0, local_steps=4, step_seconds=0.3, epochs=0.125)
            if restarts is runs[1]:
                workers, welcome = restarted(restarts, workers, how)
                assert welcome.assignment.local_steps == 4 and welcome.assignment.total_progress == 24.0
            answers = [workers[1].push(1.0, local_steps=4, step_seconds=0.3, epochs=0.125) for _ in range(3)]
            answers += [workers[0].push(0.5, local_steps=12, step_seconds=0.1, epochs=0.5) for _ in range(3)]
            assert [answer.finished for answer in answers] == [False] * 5 + [True]
            assigned.append(answers)
            states.append(save(workers[0], tmp_path / "last.pt"))
    finally:
        for restarts in runs:
            restarts.close()
    assert digest(assigned[0]) == digest(assigned[1]) and digest(states[0]) == digest(states[1])


def test_delay_compensation_goes_on_comparing_with_what_the_workers_started_from(tmp_path: Path, how: str) -> None:
    """The second has started from 0, and the server is at 1.5 when it is replaced: δ + δ²·(1.5 − 0)/2, with δ = 1."""
    options = OuterSGDOptions(outer_lr=2.0, delay_compensation=0.5, local_steps=3)
    restarts = Restarts(tmp_path, local_sgd_spec(options, 2, [], None, {}))
    try:
        workers, _ = both(restarts.begin(), restarts.spec)
        for worker in workers:
            worker.ask(Pull(starts=True), PullReply)
        workers[0].push(-1.5)
        (_, second), _ = restarted(restarts, workers, how)
        second.push(1.0)
        assert restarts.service is not None and restarts.service.run is not None
        assert restarts.service.run.coordinator.server.parameters.tolist() == [1.5 - (1 + 0.5 * 1.5)] * 3
    finally:
        restarts.close()


def state(version: int) -> dict[str, Any]:
    method = {"spec": SPEC.to_json(), "method": SPEC.name, "inner_optimizer": inner_optimizer(SPEC)}
    return method | {"layout": LAYOUT.to_json(), "server": {"version": version, "rule": {}}, "positions": {}}


@pytest.mark.parametrize(("version", "source"), [(4, "snapshot"), (5, "a checkpoint"), (6, "a checkpoint")])
def test_a_snapshot_counts_where_it_is_newer_than_the_checkpoint_and_not_where_it_is_as_old(
    tmp_path: Path, version: int, source: str
) -> None:
    """Of one version, the checkpoint is what the user has given: its optimizer's options may be others."""

    snapshots, told = InlineSnapshots(tmp_path), list[str]()
    snapshots.take(state(5), 5)
    run, restored = SimpleNamespace(spec=SPEC, layout=LAYOUT), state(version)
    name, found = newest_state(run, restored, snapshots, True, told.append)  # type: ignore[arg-type]
    assert found is not None and found["server"]["version"] == max(version, 5)
    assert name.startswith(source) and (found is restored) == (version >= 5) != bool(told)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"method": "local_sgd"}, "it is of local_sgd"),
        ({"inner_optimizer": "nag"}, "it is of inner optimizer nag, this run has None"),
        ({"layout": Layout.of([("w", torch.zeros(4))]).to_json()}, "it is of another model: its w is 4 float32"),
    ],
    ids=["method", "optimizer", "model"],
)
def test_a_snapshot_of_which_a_run_cannot_go_on_is_set_aside(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    snapshots, told = InlineSnapshots(tmp_path), list[str]()
    snapshots.take(state(5) | other, 5)
    run: Any = SimpleNamespace(spec=SPEC, layout=LAYOUT)
    assert newest_state(run, None, snapshots, True, told.append) == ("the beginning", None)
    assert len(told) == 1 and said in told[0] and list(snapshots.directory.glob("*.other"))


def test_workers_of_a_server_that_comes_back_read_the_checkpoint_that_the_run_has_begun_from(
    restarts: Restarts,
) -> None:
    workers = prepared(restarts)
    assert restarts.service is not None
    restarts.service.described.from_checkpoint = True
    _, welcome = restarted(restarts, workers, "snapshot")
    assert welcome.from_checkpoint


def test_what_was_lost_of_starts_in_int8_goes_with_the_next_one(tmp_path: Path, how: str) -> None:
    restarts = Restarts(tmp_path, local_sgd_spec(OuterSGDOptions(compress="pull=int8", local_steps=3), 2, [], None, {}))
    try:
        workers, _ = both(restarts.begin(), restarts.spec)
        for number in range(3):
            slot(restarts.service, 0).copy_(torch.tensor([1.0, 0.3, 0.07]))
            workers[0].ask(Push(number, 0, 1.0, Report(local_steps=3, step_seconds=0.5)), PushReply)
        restarted(restarts, workers, how)
    finally:
        restarts.close()


def test_changes_of_parameters_come_after_an_update_and_all_of_them_where_they_are_taken_again(tmp_path: Path) -> None:
    """Only updates are in the log: a replay does not know of what was taken between two."""
    spec = local_sgd_spec(OuterSGDOptions(compress="pull=e3m0", local_steps=3), 2, [], None, {})
    restarts = Restarts(tmp_path, spec)
    try:
        (first, second), _ = both(restarts.begin(), spec)
        adds = []
        for _ in range(3):
            adds += [first.ask(Pull(starts=True), PullReply).adds for _ in range(3)]
            second.ask(Pull(starts=True), PullReply)
            first.push(1.0), second.push(0.5)
        assert adds == [False] * 3 + [True, False, False] * 2
    finally:
        restarts.close()
