"""After forget(w) an object is what it would be without worker w, after an excuse what it would be seconds later."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import DirectionAveraging, FragmentedRule, fragments_of
from fairseq_async.options import compression
from fairseq_async.server.compressed_changes import CompressedChanges
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.membership import Membership
from fairseq_async.server.rounds.grace import GracePeriod
from fairseq_async.server.rounds.look_ahead import LookAhead
from fairseq_async.server.rounds.near_arrivals import NearArrivals
from fairseq_async.server.rounds.quorum import Quorum

WORKERS = (0, 1, 2)
CHANGES = compression.parse("pull=e3m0").pull


def state(value: Any) -> Any:
    """Everything that an object holds, in a form that can be compared."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: state(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(state, value))
    if hasattr(value, "__dict__") and not callable(value):
        return type(value).__name__, {key: state(each) for key, each in vars(value).items()}
    return value


def look_ahead(seen: Collection[int]) -> LookAhead:
    it, parameters = LookAhead(None), torch.zeros(3)
    for version in range(8):
        parameters += torch.tensor([1.0, 2.0, 0.5 * version])
        it.follow(version, parameters)
        for worker in WORKERS:
            if worker in seen and version >= 2 + worker:
                it.note(worker, version - 1 - worker, 1 + worker)
    return it


PLAN = LocalStepPlan(workers=3, maximum=10, total_steps=0, dynamic=False, shards=[], seed=1)


def near_arrivals(seen: Collection[int]) -> NearArrivals:
    it = NearArrivals(0.5)
    for number in range(3):
        now = 10.0 * number
        for worker in seen:
            it.begin_work(worker, now)
        for worker in seen:
            it.continues(worker, (), now + 1.0 + worker + 0.1 * number)
        it.close()
    for worker in seen:  # one waits, the others work
        it.begin_work(worker, 50.0)
    if 2 in seen:
        it.continues(2, (), 51.0)
    return it


def grace(seen: Collection[int], make: Callable[[], GracePeriod]) -> GracePeriod:
    it = make()
    for worker in seen:
        it.begin_work(worker, 1.0 + worker)
    return it


def quorum(seen: Collection[int]) -> GracePeriod:
    it = grace(seen, lambda: Quorum(5, 1.0, PLAN))
    assert isinstance(it, Quorum)
    for worker in seen:
        it.continues(worker, WORKERS, 5.0)
    return it


def changes(seen: Collection[int]) -> CompressedChanges:
    assert CHANGES is not None
    it = CompressedChanges(CHANGES, fragments_of([2, 3], 2))
    for worker in seen:
        it.took(worker, torch.full((5,), 1.0 + worker), None)
        it.took(worker, torch.full((2,), 4.0 + worker), 2)
    return it


@pytest.mark.parametrize("gone", WORKERS)
@pytest.mark.parametrize(
    "make",
    [look_ahead, near_arrivals, lambda seen: grace(seen, lambda: GracePeriod(2.0, PLAN)), quorum, changes],
    ids=["look-ahead", "near arrivals", "grace", "quorum", "compressed changes"],
)
def test_an_object_that_has_forgotten_a_worker_is_one_that_never_saw_it(make: Callable[..., Any], gone: int) -> None:
    it, never = make(WORKERS), make([worker for worker in WORKERS if worker != gone])
    assert state(it) != state(never)
    it.forget(gone)
    assert state(it) == state(never)


def members(later: float) -> Membership:
    it = Membership(3, now=later)
    for worker in WORKERS:
        it.connect(worker, f"process {worker}", later + 1.0 + worker)
    it.wait(0, "hello")
    it.answered(0, later + 5.0)
    it.ask(1, later + 7.0, update=True)
    it.note_message(1, later + 9.0)
    it.leave(2, for_good=False, now=later + 10.0)
    return it


def test_after_an_excuse_all_times_are_later_and_nothing_else_has_changed() -> None:
    it = members(0.0)
    it.excuse(100.0)
    assert state(it) == state(members(100.0))


def test_the_first_updates_time_is_counted_from_the_answer_to_hello() -> None:
    """Worker 0 came at 1 and had to wait for the run's beginning, at 5."""
    it = members(0.0)
    assert it._conduct[0].since == 5.0 and it.members[0].turn == 5.0 and it._conduct[1].since == 2.0


def test_the_shortest_grace_of_those_that_wait_counts() -> None:
    """Worker 0 takes one second and waits half of one, worker 1 two seconds and one; worker 2 is due at 101.4."""
    it = NearArrivals(0.5)
    for worker, seconds in enumerate((1.0, 2.0, 1.4)):
        for begin in (0.0, 10.0):
            it.begin_work(worker, begin)
            it.continues(worker, (), begin + seconds)
    it.close()
    it.begin_work(0, 100.0)
    it.begin_work(1, 99.0)
    it.begin_work(2, 100.0)
    it.continues(0, (), 101.0)
    it.continues(1, (), 101.0)
    assert it.continues(None, [2], 101.2) and it.deadline == pytest.approx(101.9)


def test_a_smaller_round_is_one_of_every_fragment() -> None:
    parts = fragments_of([2, 3], 2)
    rule = FragmentedRule(parts, [DirectionAveraging(1.0, 0.0, 3, [part.size]) for part in parts])
    rule.limit_round(1)
    assert [each.moves_parameters() for each in rule.rules] == [True, True]


def test_a_worker_may_take_several_times_the_longer_of_its_longest_and_its_present_work() -> None:
    """Worker 1 asked at 7, five seconds after it had come; the timeout is 60."""
    it = members(0.0)
    assert [it.hangs(1, 7.0 + after) for after in (59.0, 61.0)] == [False, True]
    assert [it.hangs(1, 7.0 + after, work=100.0) for after in (399.0, 401.0)] == [False, True]
    it.ask(1, 57.0)
    assert [it.hangs(1, 57.0 + after, work=1.0) for after in (199.0, 201.0)] == [False, True]


def test_a_worker_that_comes_back_has_not_left() -> None:
    it = members(0.0)
    it.leave(1, for_good=True, now=20.0)
    assert it.is_away(2) and it.left_for_good == [1]
    it.connect(1, "another process", 21.0)
    it.connect(2, "process 2", 22.0)
    assert not it.is_away(2) and it.left_for_good == []


@pytest.mark.parametrize("comes_anew", [False, True])
def test_a_second_process_of_a_worker_has_sent_no_update_though_the_first_one_had(comes_anew: bool) -> None:
    """The first one was known to the server before this one, whose restart it outlived."""
    it = Membership(2, now=0.0, timeout=1.0, arrival_timeout=2.0)
    it.expect_back([1])
    it.connect(1, "the first", 0.5)
    if comes_anew:
        it.connect(1, "the second", 0.6)
    it.note_message(1, 4.0)
    assert (1 in it.awaited(4.0)) is not comes_anew


def test_the_time_in_which_a_worker_makes_its_model_is_not_its_longest() -> None:
    it = Membership(2, now=0.0, timeout=1.0)
    it.connect(1, "x", 0.0, ready=False)
    it.ask(1, 500.0)
    it.make_ready(1)
    it.ask(1, 501.0, update=True)
    it.connect(2, "has sent no update", 0.0)
    it.ask(2, 900.0)
    assert it._longest == 1.0
