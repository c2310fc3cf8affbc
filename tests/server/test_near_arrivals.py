"""How long a step waits for gradients that are about to come, with a list of times in place of a clock."""

import pytest
import torch

from fairseq_async.algorithms import HybridAccumulation
from fairseq_async.protocol.receipt import Status
from fairseq_async.server.build import build_coordinator
from fairseq_async.server.membership import Membership
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.rounds.near_arrivals import NearArrivals
from scripts.faults.sgd_server import Constant, sgd_spec
from tests.helpers.driven import Driven


def measured(waiting: NearArrivals, **seconds: float) -> NearArrivals:
    """Workers a, b, … are 0, 1, …; each has taken so long for its last step, and begins another at 100."""
    for worker, took in enumerate(seconds.values()):
        waiting.begin_work(worker, 0.0)
        waiting.continues(worker, (), took)
    waiting.close()
    for worker in range(len(seconds)):
        waiting.begin_work(worker, 100.0)
    return waiting


def test_who_is_due_within_half_a_step_is_waited_for_and_who_is_due_later_is_not() -> None:
    waiting = measured(NearArrivals(0.5), a=1.0, b=1.5, c=1.6)
    waiting.continues(0, (), 101.0)
    assert waiting.continues(None, [1, 2], 101.0)
    assert waiting.deadline == 102.0  # b is due at 101.5, and half a second late at most
    waiting.continues(1, (), 101.5)
    assert not waiting.continues(None, [2], 101.5)


@pytest.mark.parametrize(
    ("uneven", "grace"),
    [
        ((0.7, 0.9, 1.0, 1.1, 1.3), 0.5 + 1.4826 * 0.1),
        ((0.2, 0.5, 1.0, 1.5, 1.8), 1.0),
        ((1.0, 1.0, 1.0, 1.0, 9.0), 0.5),
    ],
    ids=["the median deviation is 0.1", "half a step more at most", "one odd step is no spread"],
)
@pytest.mark.parametrize("beyond", [-0.01, 0.01])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_whose_steps_are_uneven_waits_as_much_longer(
    uneven: tuple[float, ...], grace: float, beyond: float, micro_batches: int
) -> None:
    """However many micro-batches its steps have."""
    waiting, now = NearArrivals(0.5), 0.0
    for took in uneven:
        waiting.begin_work(0, now, micro_batches)
        waiting.continues(0, (), now + took)
        now += took
        waiting.close()
    waiting.begin_work(1, 90.0, micro_batches)
    waiting.continues(1, (), 91.0)
    waiting.close()
    waiting.begin_work(0, 100.0, micro_batches)
    waiting.begin_work(1, 100.0 + beyond + grace, micro_batches)
    waiting.continues(0, (), 101.0)
    assert waiting.continues(None, [1], 101.0) is (beyond < 0)


def test_a_slow_worker_waits_by_its_own_measure() -> None:
    """Half a step of four seconds is long: a fast worker, just begun, is near."""
    waiting = measured(NearArrivals(0.5), fast=1.0, slow=4.0)
    waiting.continues(0, (), 101.0)
    waiting.close()
    waiting.begin_work(0, 103.9)
    waiting.continues(1, (), 104.0)
    assert waiting.continues(None, [0], 104.0) and waiting.deadline == pytest.approx(104.9 + 2.0)
    waiting.continues(0, (), 104.9)
    waiting.close()
    waiting.begin_work(1, 104.9)
    waiting.continues(0, (), 105.9)
    assert not waiting.continues(None, [1], 105.9)


def test_a_worker_that_does_not_come_is_waited_for_once() -> None:
    waiting = measured(NearArrivals(0.5), a=1.0, hung=1.0)
    waiting.continues(0, (), 101.0)
    assert waiting.continues(None, [1], 101.0) and waiting.deadline == 101.5
    waiting.close()
    waiting.begin_work(0, 101.5)
    waiting.continues(0, (), 102.5)
    assert not waiting.continues(None, [1], 102.5)


def test_a_grace_in_seconds_is_the_same_for_all() -> None:
    waiting = measured(NearArrivals(0.5, grace_period=3.0), a=1.0, b=3.9, c=4.1)
    waiting.continues(0, (), 101.0)
    assert waiting.continues(None, [1, 2], 101.0) and waiting.deadline == pytest.approx(106.9)
    waiting.remove_worker(1)
    assert not waiting.continues(None, [2], 101.0)


def test_an_odd_step_does_not_move_what_is_expected_and_a_change_of_speed_does() -> None:
    waiting = NearArrivals(0.5)
    for took in (1.0, 1.0, 1.0, 1.0, 9.0):
        waiting.begin_work(0, 0.0)
        waiting.continues(0, (), took)
    assert waiting._step_times[0].seconds == 1.0
    for took in (9.0, 9.0):
        waiting.begin_work(0, 0.0)
        waiting.continues(0, (), took)
    assert waiting._step_times[0].seconds == 9.0


def test_in_the_first_step_all_are_taken_to_be_as_fast_as_the_first() -> None:
    waiting = NearArrivals(0.5)
    for worker in range(3):
        waiting.begin_work(worker, 0.2 * worker)
    waiting.continues(0, (), 1.0)
    assert waiting.continues(None, [1, 2, 3], 1.0), "3 has not come yet, and is not waited for"
    assert waiting.deadline == pytest.approx(1.4 + 0.5)
    waiting.continues(1, (), 1.2)
    waiting.continues(2, (), 1.4)
    assert not waiting.continues(None, [3], 1.4)


def test_after_the_first_step_nobody_waits_for_a_worker_before_its_first_gradient() -> None:
    """Who joins over and over, or asks for work over and over, would hold up each step."""
    waiting = measured(NearArrivals(0.5), a=1.0, b=1.0)
    waiting.begin_work(2, 100.4)  # as fast as the others it would come in time
    waiting.continues(0, (), 101.0)
    assert not waiting.continues(None, [2], 101.0)
    waiting.begin_work(1, 101.2)  # it asks again: it is still due at 101
    assert waiting.continues(None, [1], 101.3) and waiting.deadline == 101.5


def steps(workers: int = 3) -> Driven:
    """Plain SGD on the mean of the gradients in a step, with a rate of 1 for those of all workers."""
    parameters = torch.zeros(1)
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), workers, partial_steps=True)
    spec = sgd_spec(workers=workers, barrier=workers, closes_early=True, waits_for_dead=False, look_ahead=None)
    plan = EpochPlan(Constant(), max_epoch=0)
    return Driven(build_coordinator(spec, rule, plan, parameters, Membership(workers, 0.0, timeout=60.0)), workers)


def test_a_step_is_the_mean_of_those_who_came_together() -> None:
    run = steps()
    for worker in (0, 1):
        assert not run.push(worker, worker + 1.0, now=1.0).instructions
    outcome = run.tick(1.5)  # the third was expected, too
    assert [(i.worker, i.receipt.status) for i in outcome.instructions if i.receipt] == [
        (0, Status.APPLIED),
        (1, Status.APPLIED),
    ]
    assert run.version == 1 and run.parameter == pytest.approx(-1.5 * 2 / 3)
    assert [event.updates for event in outcome.settled[0].control_events] == [2]
    assert [settled.held_seconds for settled in outcome.settled] == [0.5, 0.5]
    assert run.push(2, 5.0, now=1.9, base=0).settled == []  # it joins the next step
    run.push(0, 1.0, now=2.5)
    receipts = [settled.receipt for settled in run.push(1, 3.0, now=2.5).settled]
    assert [(receipt.worker, receipt.staleness) for receipt in receipts] == [(0, 0), (1, 0), (2, 1)]
    assert run.version == 2 and run.parameter == pytest.approx(-1.0 - 3.0)


def test_a_worker_that_leaves_is_waited_for_no_more() -> None:
    run = steps()
    run.push(0, 1.0, now=1.0)
    assert run.push(1, 3.0, now=1.0).settled == []
    assert len(run.leave(2, for_good=False, now=1.1).settled) == 2
    assert run.parameter == pytest.approx(-2.0 * 2 / 3)


def test_who_joins_beyond_those_announced_is_in_the_step() -> None:
    run = steps(workers=1)
    run.sequences += [0]
    run.coordinator.membership.connect(1, "x", 0.0)
    run.coordinator.instruct(1, None, 0.0)
    assert run.push(0, 1.0, now=1.0).settled == []
    assert len(run.push(1, 3.0, now=1.2).settled) == 2 and run.version == 1 and run.parameter == -2.0


def test_a_late_worker_is_told_to_start_ahead_by_as_many_versions_as_it_is_late() -> None:
    run = steps(workers=2)
    for now in (1.0, 2.0, 3.0):
        run.push(0, 1.0, now)
        run.tick(now + 0.5)
    run.push(1, 1.0, now=3.6, base=0)
    both = run.push(0, 1.0, now=4.5)
    assert [settled.receipt.staleness for settled in both.settled] == [0, 3]
    assert [i.assignment.look_ahead for i in both.instructions] == [0.0, 3.0]


def test_the_grace_of_several_micro_batches_is_a_share_of_them_all() -> None:
    waiting = NearArrivals(0.5)
    for worker, (count, took) in enumerate(((2, 2.0), (1, 2.9))):
        waiting.begin_work(worker, 0.0, count)
        waiting.continues(worker, (), took)
    waiting.close()
    waiting.begin_work(0, 100.0, 2)
    waiting.begin_work(1, 100.0)
    waiting.continues(0, (), 102.0)
    assert waiting.continues(None, [1], 102.0) and waiting.deadline == pytest.approx(102.9 + 1.0)


def shared(waiting: NearArrivals, *shares: tuple[int, float]) -> NearArrivals:
    """Each worker has measured its seconds a micro-batch, and begins its share of a step at 100."""
    for worker, (_, seconds) in enumerate(shares):
        waiting.begin_work(worker, 0.0)
        waiting.continues(worker, (), seconds)
    waiting.close()
    for worker, (number, _) in enumerate(shares):
        waiting.begin_work(worker, 100.0, number)
    return waiting


BALANCED = (6, 1.03), (3, 2.05), (1, 4.1)
"""6.2, 6.15 and 4.1 seconds: the last one is done 2.1 before the first, which is more than half of its step."""


def test_who_is_done_first_with_its_share_waits_for_the_others_of_the_step() -> None:
    waiting = shared(NearArrivals(0.5), *BALANCED)
    waiting.continues(2, (), 104.1)
    assert waiting.continues(None, [0, 1], 104.1) and waiting.deadline == pytest.approx(106.18 + 2.05)
    waiting.continues(0, (), 106.18)
    assert waiting.continues(None, [1], 106.16)
    waiting.continues(1, (), 106.2)
    assert not waiting.continues(None, [], 106.2)


def test_who_does_not_come_with_its_share_costs_the_others_a_grace_once() -> None:
    waiting = shared(NearArrivals(0.5), *BALANCED)
    waiting.continues(2, (), 104.1)
    waiting.continues(1, (), 106.15)
    assert waiting.continues(None, [0], 106.15) and waiting.deadline == pytest.approx(106.18 + 2.05)
    assert not waiting.continues(None, [0], 108.24)
    waiting.close()
    waiting.begin_work(1, 108.24, 6)
    waiting.begin_work(2, 108.24, 3)
    waiting.continues(2, (), 120.5)
    assert waiting.continues(None, [0, 1], 120.5)
    waiting.remove_worker(1)
    assert not waiting.continues(None, [0], 120.5), "who hangs began its share before this step"


@pytest.mark.parametrize(("first", "later"), [(6, 2 * 1.4826 * 0.2), (1, 0.0)], ids=["shares", "equal numbers"])
def test_whose_times_are_uneven_is_due_two_deviations_later_where_it_shares_a_step(first: int, later: float) -> None:
    waiting = NearArrivals(0.5)
    for step, took in enumerate((5.9, 6.3, 6.1, 5.7, 6.5)):
        for worker, seconds in enumerate((1.03, 6.1, took)):
            waiting.begin_work(worker, 10.0 * step)
            waiting.continues(worker, (), 10.0 * step + seconds)
        waiting.close()
    for worker, count in enumerate((first, 1, 1)):
        waiting.begin_work(worker, 100.0, count)
    waiting.continues(1, (), 106.1)
    assert waiting.continues(None, [2], 106.1) and waiting.deadline == pytest.approx(106.1 + later + 3.05)


@pytest.mark.parametrize(("others", "waits"), [(2, True), (1, False)], ids=["86%", "79%"])
def test_a_step_is_waited_for_if_it_uses_four_fifths_of_its_workers_time(others: int, waits: bool) -> None:
    waiting = shared(NearArrivals(0.5), (1, 1.0), *[(2, 0.9)] * others)
    waiting.continues(0, (), 101.0)
    assert waiting.continues(None, range(1, 1 + others), 101.0) is waits


@pytest.mark.parametrize(
    "shares",
    [((3, 1.0), (1, 5.0)), ((1, 1.0), *[(1, 1.6)] * 9), ((6, 1.03), (3, 2.05), (1, 5.5), (1, 9.5))],
    ids=["one is too slow for its one micro-batch", "a fast one, with an equal share", "one of four is too slow"],
)
def test_a_step_that_would_waste_its_workers_time_is_not_waited_for(shares: tuple[tuple[int, float], ...]) -> None:
    waiting = shared(NearArrivals(0.5), *shares)
    waiting.continues(0, (), 100.0 + shares[0][0] * shares[0][1])
    last = len(shares) - 1
    assert not waiting.continues(None, [last], 100.0 + shares[0][0] * shares[0][1])


def test_while_speeds_are_measured_shares_wait_for_all_who_have_begun() -> None:
    """Worker 0 takes three seconds a micro-batch, worker 1 one. Both have four in each of the first steps."""
    waiting, now = NearArrivals(0.5, shares=True), 0.0
    for step in range(4):
        for worker in (0, 1):
            waiting.begin_work(worker, now, 4)
            waiting.close()  # nothing has been sent: this is no end of a step
        assert waiting.continues(1, [0], now + 4.0) is (step < 3)
        waiting.continues(0, [], now + 12.0)
        now += 12.0
        waiting.close()


def test_while_speeds_are_measured_nobody_waits_for_long_for_a_worker_that_does_not_come() -> None:
    waiting = NearArrivals(0.5, shares=True)
    for worker in (0, 1):
        waiting.begin_work(worker, 0.0, 4)
    assert waiting.continues(0, [1], 4.0) and waiting.deadline == 8 * 4.0 + 2.0
    waiting.continues(1, [], 8.0)
    waiting.close()
    for worker in (0, 1):
        waiting.begin_work(worker, 10.0, 4)
    assert waiting.continues(0, [1], 14.0) and waiting.deadline == 10.0 + 2 * 8.0 + 2.0
    assert not waiting.continues(None, [1], 28.1)
    waiting.close()
    waiting.begin_work(0, 28.1, 4)
    assert not waiting.continues(0, [1], 32.1), "its work is not of this step"


def test_another_server_goes_on_with_the_step_and_its_shares() -> None:
    waiting, again = shared(NearArrivals(0.5), *BALANCED), NearArrivals(0.5)
    again.load_state_dict(waiting.state_dict())
    again.continues(2, (), 104.1)
    assert again.continues(None, [0, 1], 104.1)
