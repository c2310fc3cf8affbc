"""The coordinator alone, with a list of times in place of a clock."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any

import pytest
import torch

from fairseq_async.algorithms import HybridAccumulation, NesterovMomentum, Region, Rule, Update
from fairseq_async.errors import RefusedError
from fairseq_async.protocol import Report, ScheduleEvent, Status
from fairseq_async.records.event_log import ControlEvent
from fairseq_async.server.build import build_coordinator
from fairseq_async.server.coordinator import Coordinator
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.membership import Membership
from fairseq_async.server.outcome import Outcome
from fairseq_async.server.plan import EpochPlan, Plan
from scripts.faults.sgd_server import Constant, sgd_spec
from tests.helpers.driven import Driven


def synchronous() -> Driven:
    """Three workers behind a barrier, plain SGD with a rate of 1 on the mean of their gradients."""
    parameters = torch.zeros(1)
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), 3)
    return driven(rule, EpochPlan(Constant(), max_epoch=0), parameters, barrier=3)


def driven(rule: Rule, plan: Plan, parameters: torch.Tensor, workers: int = 3, **changes: Any) -> Driven:
    spec = sgd_spec(workers=workers, **changes)
    coordinator = build_coordinator(spec, rule, plan, parameters, Membership(workers, now=0.0, timeout=60.0))
    return Driven(coordinator, workers)


def local(grace: float | None = None, total_steps: int = 0) -> Driven:
    """Two workers that take 10 local steps a round, and whose updates are added up."""
    parameters = torch.zeros(1)
    plan = LocalStepPlan(2, local_steps=10, total_steps=total_steps, dynamic_local_steps=False, shards=[], seed=1)
    rule = NesterovMomentum(lr=2.0, momentum=0.0, workers=2)
    barrier = 0 if grace is None else 2
    return driven(rule, plan, parameters, workers=2, barrier=barrier, grace_period=grace, waits_for_dead=False)


def summed() -> tuple[Rule, Plan, torch.Tensor]:
    """Plain SGD with a rate of 1, a step for each gradient."""
    parameters = torch.zeros(1)
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), 1)
    return rule, EpochPlan(Constant(), max_epoch=0), parameters


def answered(outcome: Outcome) -> list[int]:
    return [instruction.worker for instruction in outcome.instructions]


def test_a_barrier_waits_for_all_and_answers_them_in_their_order() -> None:
    run = synchronous()
    assert run.push(2, 3.0, now=1.0) == run.push(0, 1.0, now=2.0) == run.tick(3.0) == Outcome()
    outcome = run.push(1, 2.0, now=4.0)
    assert [settled.receipt.worker for settled in outcome.settled] == answered(outcome) == [0, 1, 2]
    assert run.version == 1 and run.parameter == -2.0
    assert outcome.settled[0].control_events == (ControlEvent("limit_round", updates=3),)
    run.push(0, 1.0, now=5.0), run.push(1, 1.0, now=6.0)
    run.coordinator.recount(6.5, changed=True)
    again = run.push(2, 1.0, now=7.0)
    assert run.version == 2 and not any(each.control_events for each in again.settled), "the limit is the same"


def test_a_barrier_goes_on_without_a_worker_that_left() -> None:
    run = synchronous()
    run.push(0, 1.0, now=1.0), run.push(1, 2.0, now=1.0)
    outcome = run.leave(2, for_good=True, now=2.0)
    assert answered(outcome) == [0, 1] and run.version == 1 and run.parameter == -1.5
    run.push(0, 1.0, now=3.0)
    assert answered(run.push(1, 1.0, now=4.0)) == [0, 1]
    run.coordinator.membership.connect(2, "y", now=4.5)  # the round waits for as many as before
    run.coordinator.recount(4.5, changed=True)
    run.push(0, 1.0, now=5.0)
    assert run.push(1, 1.0, now=6.0) == Outcome() and answered(run.push(2, 1.0, now=7.0)) == [0, 1, 2]


def test_a_round_has_no_more_updates_than_the_method_says_however_many_are_at_work() -> None:
    parameters = torch.zeros(1)
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), 2)
    run = driven(rule, EpochPlan(Constant(), max_epoch=0), parameters, barrier=2)
    assert run.push(2, 3.0, now=1.0) == Outcome() and answered(run.push(0, 1.0, now=2.0)) == [0, 2]
    assert run.version == 1 and run.parameter == -2.0


@pytest.mark.parametrize("dies", [True, False], ids=["dead", "silent"])
def test_a_barrier_waits_for_the_dead_and_the_silent_as_long_as_is_allowed(dies: bool) -> None:
    run = synchronous()
    if dies:
        assert run.leave(2, for_good=False, now=0.0) == Outcome()
    run.push(0, 1.0, now=1.0), run.push(1, 2.0, now=1.0)
    assert run.tick(60.0) == Outcome()
    assert answered(run.tick(60.5)) == [0, 1] and run.version == 1


def test_the_update_of_a_worker_that_leaves_while_it_waits_is_not_in_the_round() -> None:
    run = synchronous()
    run.push(0, 7.0, now=1.0)
    run.leave(0, for_good=True, now=2.0)
    assert run.coordinator.held_since == run.coordinator._pending == {}
    run.push(1, 1.0, now=3.0)
    assert answered(run.push(2, 2.0, now=4.0)) == [1, 2] and run.parameter == -1.5


def test_a_grace_period_ends_at_its_deadline() -> None:
    run = local(grace=2.0)
    assert run.steps(0, 10, now=10.0) == Outcome() and run.coordinator.deadline == 12.0
    assert run.tick(11.9) == Outcome()
    outcome = run.tick(12.0)
    assert answered(outcome) == [0] and run.version == 1
    assert run.coordinator.deadline is None and run.tick(13.0) == Outcome()


def test_a_grace_period_ends_with_the_run() -> None:
    """Else the server would look at its clock all the time from the deadline on."""
    run = local(grace=2.0)
    run.steps(0, 10, now=10.0)
    run.coordinator.end(now=11.0)
    assert run.coordinator.deadline is None


def test_a_grace_period_ends_when_all_are_there() -> None:
    run = local(grace=2.0)
    run.steps(0, 10, now=10.0)
    assert answered(run.steps(1, 10, now=11.0)) == [0, 1] and run.coordinator.deadline is None


def test_a_grace_period_ends_early_when_nobody_can_come_in_it() -> None:
    """Worker 0 begins again at 12 and needs 10 seconds: it is there at 22, and a period from 15 on ends at 17."""
    run = local(grace=2.0)
    run.steps(0, 10, now=10.0), run.tick(12.0)
    assert answered(run.steps(1, 10, now=15.0)) == [1] and run.coordinator.deadline is None
    assert run.steps(0, 10, now=23.5) == Outcome(), "worker 1 is there at 25, and the period ends at 25.5"
    assert answered(run.steps(1, 10, now=25.0)) == [0, 1] and run.version == 4


def test_an_idle_worker_is_woken_when_work_is_free_again() -> None:
    """20 steps in all: 10 are done and 10 are the other worker's, until it dies."""
    run = local(total_steps=10)
    (instruction,) = run.steps(0, 10, now=10.0).instructions
    assert instruction.assignment.idle and not instruction.finished
    assert run.coordinator.wait(0, now=10.0) == run.tick(11.0) == Outcome()
    (woken,) = run.leave(1, for_good=False, now=12.0).instructions
    assert (woken.worker, woken.receipt, woken.finished) == (0, None, False)
    assert woken.assignment.local_steps == 10 and not woken.assignment.idle
    assert run.coordinator.membership.idle == set()


@pytest.mark.parametrize(("for_good", "ends"), [(True, 20.0), (False, 81.0)])
def test_a_worker_after_its_last_step_waits_until_no_other_is_at_work(for_good: bool, ends: float) -> None:
    """One that has died may be started again within its timeout of a minute."""
    run = local()
    run.steps(0, 10, now=10.0)
    assert run.coordinator.wait(0, now=10.0, for_end=True) == Outcome()
    run.steps(1, 10, now=19.0)
    outcome = run.leave(1, for_good, now=20.0) + run.tick(79.0)
    assert answered(outcome) == [0] * for_good
    outcome += run.tick(ends)
    assert [(told.worker, told.finished) for told in outcome.instructions] == [(0, True)] and run.coordinator.finished


def test_an_idle_worker_gets_the_work_of_one_that_hangs() -> None:
    """Else it would wait for that one for as long as its connection lasts."""
    run = local(total_steps=10)
    run.steps(0, 10, now=10.0)
    run.coordinator.wait(0, now=10.0)
    run.coordinator.membership.note_message(1, 30.0)
    assert run.tick(89.0) == Outcome()
    (woken,) = run.tick(91.0).instructions
    assert (woken.worker, woken.assignment.local_steps, woken.finished) == (0, 10, False)
    assert run.tick(92.0) == Outcome()
    run.coordinator.membership.note_message(1, 93.0)
    late = run.steps(1, 10, now=93.0)
    assert late.settled[0].receipt.status is Status.APPLIED, "what it has done all the same is not lost"


def two_rounds(seconds: float) -> Driven:
    """Worker 0 waits for work from then on: all steps that are left are worker 1's, whose first 10 took so long."""
    run = local(total_steps=20)
    asked(run, 1, seconds)
    run.steps(1, 10, now=seconds)
    for _ in range(2):
        asked(run, 0, seconds)
        run.steps(0, 10, now=seconds)
    run.coordinator.wait(0, now=seconds)
    return run


def asked(run: Driven, worker: int, now: float) -> None:
    run.coordinator.membership.ask(worker, now, update=True)


def alive(run: Driven, now: float) -> Outcome:
    run.coordinator.membership.note_message(1, now)
    return run.tick(now)


@pytest.mark.parametrize(("took", "patience"), [(10.0, 60.0), (100.0, 400.0)])
def test_an_idle_worker_gets_the_work_of_one_that_hangs_and_shows_life(took: float, patience: float) -> None:
    """After the timeout, and four times as long as its work has ever taken; what it sends all the same counts."""
    run = two_rounds(took)
    for now in range(int(took), int(took + patience), 10):
        assert alive(run, float(now)) == Outcome()
    (woken,) = alive(run, took + patience + 1.0).instructions
    assert (woken.worker, woken.assignment.local_steps, woken.finished) == (0, 10, False)
    assert alive(run, took + patience + 2.0) == Outcome()
    asked(run, 1, took + patience + 3.0)
    late = run.steps(1, 10, now=took + patience + 3.0)
    assert late.settled[0].receipt.status is Status.APPLIED and run.coordinator.finished


def test_a_worker_may_take_four_times_as_long_as_its_present_work_is_expected_to_take() -> None:
    """Worker 1 has taken 20 seconds for its only step, and has nine before it now."""
    run = local(total_steps=10)
    asked(run, 1, 20.0)
    run.push(1, 1.0, 20.0, Report(local_steps=1, step_seconds=20.0))
    run.steps(0, 10, now=20.0)
    run.coordinator.wait(0, now=20.0)
    assert alive(run, 739.0) == Outcome() and answered(alive(run, 741.0)) == [0]


def test_who_has_work_of_its_own_takes_none_of_a_worker_that_shows_life() -> None:
    run = local(total_steps=20)
    asked(run, 1, 10.0)
    run.steps(1, 10, now=10.0)
    for now in range(10, 600, 10):
        run.coordinator.membership.note_message(0, float(now))
        assert alive(run, float(now)) == Outcome()
    assert 1 in run.coordinator.plan.assigned  # type: ignore[attr-defined]


def test_a_worker_that_has_sent_no_update_may_take_ten_minutes_for_its_first_one() -> None:
    """It may compile something."""
    run = local(total_steps=10)
    asked(run, 0, 10.0)
    run.steps(0, 10, now=10.0)
    run.coordinator.wait(0, now=10.0)
    assert all(alive(run, float(now)) == Outcome() for now in range(20, 600, 20))
    assert answered(alive(run, 601.0)) == [0]


def test_worker_0_keeps_its_work_while_it_shows_life() -> None:
    """It validates and writes checkpoints, for however long that takes."""
    run = local(total_steps=10)
    asked(run, 1, 10.0)
    run.steps(1, 10, now=10.0)
    run.coordinator.wait(1, now=10.0)
    for now in range(20, 4000, 50):
        run.coordinator.membership.note_message(0, float(now))
        assert run.tick(float(now)) == Outcome()


def test_an_idle_worker_is_told_of_the_end_when_the_others_have_done_the_rest() -> None:
    run = local(total_steps=10)
    run.steps(0, 10, now=10.0)
    run.coordinator.wait(0, now=10.0)
    outcome = run.steps(1, 10, now=20.0)
    assert {instruction.worker: instruction.finished for instruction in outcome.instructions} == {0: True, 1: True}
    assert run.coordinator.finished


def test_a_round_does_not_wait_for_a_worker_that_has_nothing_to_do() -> None:
    run = local(grace=1000.0, total_steps=15)
    run.steps(0, 10, now=10.0)
    assert answered(run.steps(1, 10, now=10.0)) == [0, 1]  # 10 of 30 steps are left, which are worker 0's
    assert run.coordinator.wait(1, now=10.0) == Outcome()
    outcome = run.steps(0, 10, now=20.0)
    assert answered(outcome) == [0, 1] and run.coordinator.finished


def test_an_update_after_the_last_step_is_finished() -> None:
    parameters = torch.zeros(1)
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), 1)
    run = driven(rule, EpochPlan(Constant(), max_epoch=0), parameters, last_version=1)
    (last,) = run.push(0, 1.0, now=1.0).instructions
    assert last.receipt is not None and last.receipt.status is Status.APPLIED and last.finished
    (late,) = run.push(1, 5.0, now=2.0).instructions
    assert late.receipt is not None and late.receipt.status is Status.FINISHED and late.finished
    assert run.version == 1 and run.parameter == -1.0
    again = run.coordinator.rejected(0, now=3.0, sequence=0).receipt
    assert again is not None and again.status is Status.DUPLICATE, "its answer was lost"


def test_updates_that_wait_when_a_worker_ends_the_run_are_finished() -> None:
    run = synchronous()
    run.push(0, 1.0, now=1.0), run.push(1, 2.0, now=1.0)
    outcome = run.coordinator.end(now=2.0)
    assert not outcome.settled and answered(outcome) == [0, 1]
    for instruction in [*outcome.instructions, run.coordinator.rejected(2, now=3.0)]:
        assert instruction.receipt is not None and instruction.receipt.status is Status.FINISHED
        assert instruction.finished
    assert run.version == 0 and run.parameter == 0.0 and run.coordinator.held_since == {}


def test_an_update_that_waited_when_the_run_ended_is_in_no_later_step() -> None:
    """Its worker was told that it was not taken: the others' leaving must not complete its round."""
    run = synchronous()
    run.push(0, 1.0, now=1.0)
    run.coordinator.end(now=2.0)
    outcome = run.leave(1, for_good=True, now=3.0) + run.leave(2, for_good=True, now=3.0) + run.tick(100.0)
    assert not outcome.settled and not outcome.instructions, "it is told once"
    assert run.version == 0 and run.parameter == 0.0


def test_a_schedule_event_counts_once_and_goes_with_the_next_update_to_the_log() -> None:
    run = synchronous()
    event = ScheduleEvent("a-1", "end_epoch", 3, 0.5)
    assert [run.coordinator.follow(0, event) for _ in range(3)] == [1.0] * 3
    for worker in range(3):
        outcome = run.push(worker, 1.0, now=1.0)
    limit, end = ControlEvent("limit_round", updates=3), ControlEvent("end_epoch", epoch=3, loss=0.5)
    assert [settled.control_events for settled in outcome.settled] == [(limit, end), (), ()]


def test_so_many_epochs_between_two_updates_count_and_no_more() -> None:
    run = synchronous()
    events = [ScheduleEvent(str(number), "end_epoch", number, 0.5) for number in range(64)]  # and the round's size
    for event in events[:-1]:
        run.coordinator.follow(0, event)
    with pytest.raises(RefusedError, match="there were 64 epochs since the last update"):
        run.coordinator.follow(0, events[-1])
    assert run.coordinator.follow(0, events[-2]) == 1.0, "which was counted, and is answered again"
    for worker in range(3):
        run.push(worker, 1.0, now=1.0)
    run.coordinator.follow(0, events[-1])


def test_limits_of_rounds_between_two_updates_leave_the_last_one() -> None:
    """Workers may come and go as often as they like."""
    run = synchronous()
    for _ in range(50):
        run.coordinator.limit_round(2)
        run.coordinator.limit_round(3)
    assert [event.updates for event in run.coordinator._control_events] == [3]


def test_control_events_go_with_an_update_that_counts_and_not_with_one_that_comes_twice() -> None:
    """A replay reads only the lines of updates that were settled."""
    run = synchronous()
    for worker in range(3):
        run.push(worker, 1.0, now=1.0)
    run.leave(2, for_good=True, now=2.0)
    run.sequences[0] -= 1  # the answer was lost
    (again,) = run.push(0, 1.0, now=3.0).settled
    assert again.receipt.status is Status.DUPLICATE and again.control_events == ()
    run.push(0, 1.0, now=4.0)
    first, _ = run.push(1, 1.0, now=4.0).settled
    assert first.control_events == (ControlEvent("limit_round", updates=2),)


def test_a_merge_is_a_version_that_goes_with_the_next_update_to_the_log_also_of_a_server_that_goes_on() -> None:
    run, other = (driven(rule, plan, parameters, look_ahead=None) for rule, plan, parameters in (summed(), summed()))
    run.push(0, 1.0, now=1.0)
    run.coordinator.merge(Region(torch.zeros(1), merge=0.5), torch.tensor([9.0]))
    assert run.version == 2 and run.parameter == 4.0, "half of -1 and half of 9"
    other.coordinator.load_state_dict(run.coordinator.state_dict())
    assert 2 in other.coordinator.look_ahead._path
    for each in (run, other):
        each.sequences[0] = 1
        (settled,) = each.push(0, 1.0, now=2.0).settled
        assert settled.merged == (2,) and settled.receipt.version == 3
        assert each.push(1, 1.0, now=3.0).settled[0].merged == ()


def test_a_worker_that_has_left_is_forgotten_by_all_that_measure_it() -> None:
    run = driven(*summed(), look_ahead=None, micro_batches=2)
    for worker in range(3):
        run.push(worker, 1.0, now=1.0 + worker, base=0)
    coordinator = run.coordinator
    begun, staleness = coordinator.waiting._begun, coordinator.look_ahead._staleness  # type: ignore[attr-defined]
    measured = begun, staleness, coordinator.shares._took
    assert all({1, 2} <= set(each) for each in measured)
    run.leave(1, for_good=False, now=5.0)
    assert all(1 not in each and 2 in each for each in measured)


def test_what_no_worker_can_have_sent_is_refused_whether_it_is_in_the_update_or_in_its_report() -> None:
    run = local()
    sound, report = Update(0, 0, 0, 1.0, torch.ones(1)), Report(local_steps=10, step_seconds=1.0)
    run.coordinator.check(sound, report)
    with pytest.raises(RefusedError, match="base version 1: the server is at 0"):
        run.coordinator.check(replace(sound, base_version=1), report)
    with pytest.raises(RefusedError, match="local_steps 161: a round has 10; 160 are the most"):
        run.coordinator.check(sound, replace(report, local_steps=161))


@pytest.mark.parametrize("fails", ["record", "assign"])
def test_a_plan_that_fails_for_one_worker_is_told_and_the_others_are_answered(fails: str) -> None:
    run, error = synchronous(), RuntimeError("no work")
    original = getattr(run.coordinator.plan, fails)

    def fail(worker: int, *given: Any) -> Any:
        if worker == 1:
            raise error
        return original(worker, *given)

    setattr(run.coordinator.plan, fails, fail)
    run.push(0, 1.0, now=1.0), run.push(1, 1.0, now=1.0)
    outcome = run.push(2, 1.0, now=1.0)
    assert outcome.failures == [(1, error)] and run.version == 1
    assert answered(outcome) == ([0, 2] if fails == "assign" else [0, 1, 2])


def test_a_tick_finds_out_that_a_part_of_the_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise RefusedError("part 1 is gone")

    run = synchronous()
    monkeypatch.setattr(run.coordinator.server, "check_parts", gone)
    with pytest.raises(RefusedError, match="part 1 is gone"):
        run.tick(1.0)


def test_a_step_is_of_the_micro_batches_of_those_who_have_come_and_stays_so_large_when_one_goes() -> None:
    """Three are announced, and each brings four; a micro-batch takes worker 0 one second, and worker 1 three."""
    rule, plan, parameters = summed()
    spec = sgd_spec(workers=3, micro_batches=4)
    run = Driven(build_coordinator(spec, rule, plan, parameters, Membership(3, now=0.0, timeout=60.0)), 2)
    given = {}
    for now in range(4, 40, 4):
        for worker in (0, 1) if now % 12 == 0 else (0,):
            (told,) = run.push(worker, 0.0, now=float(now)).instructions
            given[worker] = told.assignment.micro_batches
    assert given == {0: 4, 1: 2}, "of the eight, but worker 0 had begun before worker 1 was measured"
    assert run.coordinator.shares._given == {0: 6, 1: 2}
    run.coordinator.membership.connect(2, "x", 36.0)
    run.leave(2, for_good=True, now=36.0)
    run.push(0, 0.0, now=40.0)
    assert run.coordinator.shares._given == {0: 9, 1: 3}
    run.coordinator.membership.connect(2, "y", 41.0, ready=False)
    run.push(0, 0.0, now=44.0)
    assert run.coordinator.shares._given == {0: 9, 1: 3}, "worker 2 still makes its model"
    run.coordinator.wait(1, now=45.0, for_end=True)
    run.push(0, 0.0, now=48.0)
    assert run.coordinator.shares._given == {0: 12}
    run.coordinator.membership.connect(2, "z", 49.0)
    run.push(0, 0.0, now=52.0)
    assert run.coordinator.shares._given == {0: 8}, "worker 2 begins with four"
    run.push(0, 0.0, now=110.0)
    assert run.coordinator.shares._given == {0: 12}, "it was not heard of for a minute"


def test_a_worker_that_was_not_announced_leaves_no_share_behind() -> None:
    rule, plan, parameters = summed()
    spec = sgd_spec(workers=2, micro_batches=4)
    run = Driven(build_coordinator(spec, rule, plan, parameters, Membership(2, now=0.0, timeout=60.0)), 2)
    run.coordinator.membership.connect(2, "joins", 0.0)
    run.leave(2, for_good=True, now=0.0)
    for now in (4.0, 8.0, 12.0):
        run.push(0, 0.0, now), run.push(1, 0.0, now)
    assert run.coordinator.shares._given == {0: 4, 1: 4}


def test_a_step_stays_divided_as_it_is_when_a_worker_goes_before_its_end() -> None:
    """A worker that asks again in the middle of a step, as after a lost connection, has the same micro-batches."""
    parameters = torch.zeros(1)
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), 3)
    run = driven(rule, EpochPlan(Constant(), max_epoch=0), parameters, barrier=3, micro_batches=4)
    for now in (12.0, 24.0, 36.0):
        run.push(0, 0.0, now - 8.0), run.push(1, 0.0, now - 8.0), run.push(2, 0.0, now)
    first = run.coordinator.instruct(0, None, 36.0).assignment
    assert 4 < first.micro_batches < 8, "of twelve: worker 2 is slow"
    run.leave(1, for_good=True, now=37.0)
    assert run.coordinator.instruct(0, None, 37.0).assignment == first
    run.push(0, 0.0, now=40.0)
    assert run.push(2, 0.0, now=48.0).instructions[0].assignment.micro_batches > first.micro_batches


def test_a_silent_worker_that_was_heard_again_is_no_silent_one() -> None:
    run = local()
    run.tick(61.0)
    assert run.coordinator._silent == {0, 1}
    run.coordinator.membership.note_message(1, 62.0)
    run.tick(63.0)
    assert run.coordinator._silent == {0}, "when it is silent once more, its work is given up once more"


def amid_a_step() -> tuple[Coordinator, Callable[[], Coordinator]]:
    """A coordinator that has measured all there is to measure, and a function that makes one that has not."""

    def make() -> Coordinator:
        parameters = torch.zeros(1)
        rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), 2)
        given: dict[str, Any] = {"look_ahead": None, "delay_compensation": 0.5, "micro_batches": 2}
        spec = sgd_spec(workers=2, max_update_norm_ratio=3.0, **given)
        plan = EpochPlan(Constant(), max_epoch=0)
        return build_coordinator(spec, rule, plan, parameters, Membership(2, now=0.0, timeout=60.0))

    run = Driven(make(), 2)
    for now in range(1, 19):
        run.coordinator.server.note_pull(now % 2, run.coordinator.server.parameters)
        run.push(now % 2, 100.0 if now == 16 else 1.0 + now % 3, now=float(now), base=max(0, run.version - 1))
    run.coordinator._merged = [3]
    run.coordinator.server.rule._missing, run.coordinator.server.rule._micro_batches = 5, 3  # type: ignore[attr-defined]
    return run.coordinator, make


def amid_a_round() -> tuple[Coordinator, Callable[[], Coordinator]]:
    def make() -> Coordinator:
        return local(total_steps=100).coordinator

    run = local(total_steps=100)
    for now in range(1, 5):
        run.steps(0, 10, now=float(now))
    run.leave(1, for_good=False, now=5.0)
    plan = run.coordinator.plan
    assert isinstance(plan, LocalStepPlan)
    plan.epochs, plan._beginning = 1.5, plan._beginning._replace(steps=20, progress=5.0)  # of fewer workers
    return run.coordinator, make


def plain(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return value.tolist()
        case dict():
            return {key: plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
    return value


_OF_A_NEW_DEALER = {"next": 4, "reserved": [0, 1], "dealt": {}}
_OF_A_NEW_LOOK_AHEAD = {"staleness": {}, "steps": {}, "path": {8: [-16.5]}, "parameters": 1}


@pytest.mark.parametrize(
    ("begun", "where", "key", "then"),
    [
        (amid_a_step, "", "look_ahead", _OF_A_NEW_LOOK_AHEAD),
        (amid_a_step, "", "shares", {"took": {}, "given": {}, "dealer": _OF_A_NEW_DEALER}),
        (amid_a_step, "shares", "dealer", _OF_A_NEW_DEALER),
        (amid_a_step, "shares dealer", "reserved", []),
        (amid_a_step, "", "merged", []),
        (amid_a_step, "server", "rejected", {}),
        (amid_a_step, "server", "before_last_step", [-16.5]),
        (amid_a_step, "server", "started_from", {}),
        (amid_a_step, "server norms", "own", {}),
        (amid_a_step, "server rule", "pieces", None),
        (amid_a_step, "server rule", "missing", []),
        (amid_a_step, "server rule", "micro_batches", 1),
        (amid_a_step, "look_ahead", "parameters", 1),
        (amid_a_round, "plan", "beginning", [0, 0.0, []]),
        (amid_a_round, "plan", "workers", 2),
        (amid_a_round, "plan", "gone", []),
    ],
)
def test_a_state_of_an_earlier_version_lacks_what_came_later_and_nothing_else(
    begun: Callable[[], tuple[Coordinator, Callable[[], Coordinator]]], where: str, key: str, then: Any
) -> None:
    before, make = begun()
    expected = plain(before.state_dict())
    again = make()
    again.load_state_dict(deepcopy(before.state_dict()))
    assert plain(again.state_dict()) == expected
    state, again = deepcopy(before.state_dict()), make()
    reduce(getitem, where.split(), state).pop(key)
    again.load_state_dict(state)
    reduce(getitem, where.split(), expected)[key] = then
    assert plain(again.state_dict()) == expected
