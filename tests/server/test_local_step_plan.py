"""Local steps by speed, shards by need, and the plan that deals them out."""

import io
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_async.algorithms import local_steps, shard_probabilities
from fairseq_async.errors import RefusedError
from fairseq_async.method.spec import hybrid_spec, local_sgd_spec
from fairseq_async.options.config import DelayedNesterovOptions, DiLoCoOptions, HybridOptions
from fairseq_async.protocol import Report
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, ParameterGroup
from fairseq_async.server.plan import EpochPlan, Plan
from fairseq_async.server.programs import gradient_main
from fairseq_async.server.programs import local_sgd_main as outer
from scripts.faults.sgd_server import Constant
from tests.helpers.thread_workers import LAYOUT

PAPER = {0: 1 / 0.58, 1: 1 / 0.75, 2: 1 / 1.51, 3: 1 / 3.33}  # the very heterogeneous workers of the paper


def test_the_papers_four_workers() -> None:
    assert local_steps(PAPER, 50) == {0: 50, 1: 38, 2: 19, 3: 8}


def test_a_quotient_that_is_a_whole_number_is_not_rounded_down_by_floating_point() -> None:
    for seconds in (0.58, 0.1, 1 / 3, 7.7):
        assert local_steps({0: 1 / seconds, 1: 1 / (5 * seconds)}, 50) == {0: 50, 1: 10}


@given(st.dictionaries(st.integers(0, 9), st.integers(1, 10**6), min_size=1), st.integers(1, 500))
def test_it_is_the_floor_of_the_exact_quotient(speeds: dict[int, int], maximum: int) -> None:
    fastest = max(speeds.values())
    exact = {w: max(1, math.floor(Fraction(v, fastest) * maximum)) for w, v in speeds.items()}
    assert local_steps({w: float(v) for w, v in speeds.items()}, maximum) == exact


@pytest.mark.parametrize(("speeds", "maximum"), [({0: 0.0}, 5), ({0: math.nan}, 5), ({0: math.inf}, 5), ({0: 1.0}, 0)])
def test_speeds_and_steps_must_be_above_zero(speeds: dict[int, float], maximum: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        local_steps(speeds, maximum)


def test_shards_behind_their_share_are_chosen() -> None:
    assert shard_probabilities([10, 10], [5, 5]).tolist() == [0.5, 0.5]
    assert shard_probabilities([10, 30], [0, 0]).tolist() == [0.25, 0.75]
    assert shard_probabilities([10, 10], [9, 1]).tolist() == shard_probabilities([0, 10], [0, 0]).tolist() == [0.0, 1.0]
    behind = shard_probabilities([10, 10, 20], [6, 2, 2])
    assert behind.tolist() == pytest.approx([0.0, 0.05 / 0.35, 0.3 / 0.35])


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1000)), min_size=1))
def test_probabilities_are_the_formula_and_sum_to_one(shards: list[tuple[int, int]]) -> None:
    sizes, used = [s for s, _ in shards], [u for _, u in shards]
    found = shard_probabilities(sizes, used)
    assert found.sum().item() == pytest.approx(1.0)
    shares = [s / sum(sizes) for s in sizes]
    raw = [max(share - (u / sum(used) if sum(used) else 0.0), 0.0) for share, u in zip(shares, used, strict=True)]
    expected = [r / sum(raw) for r in raw] if sum(raw) > 1e-12 else shares
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("sizes", "used"), [([1], [1, 2]), ([], []), ([0], [0]), ([2, -1], [0, 0]), ([1, 1], [2, -1])])
def test_shards_that_make_no_sense_are_refused(sizes: list[int], used: list[int]) -> None:
    with pytest.raises(ValueError):
        shard_probabilities(sizes, used)


def report(steps: int, seconds: float = 1.0, shard: int | None = None) -> Report:
    return Report(local_steps=steps, step_seconds=seconds, shard=shard)


def test_slower_workers_get_fewer_steps_once_they_are_measured() -> None:
    plan = LocalStepPlan(2, 20, total_steps=0, dynamic_local_steps=True, shards=[], seed=1)
    assert [plan.assign(w).local_steps for w in (0, 1)] == [20, 20]
    plan.record(0, report(20, 0.1))
    plan.record(1, report(20, 0.4))
    assert [plan.assign(w).local_steps for w in (0, 1)] == [20, 5]


def test_the_speed_of_a_worker_that_has_left_counts_until_then_and_when_it_is_back() -> None:
    plan = LocalStepPlan(2, 50, total_steps=0, dynamic_local_steps=True, shards=[], seed=1)
    for worker, speed in enumerate((1.0, 1.0, 10.0)):
        plan.assign(worker)
        plan.record(worker, report(50, 1 / speed))
    assert [plan.assign(worker).local_steps for worker in range(3)] == [5, 5, 50]
    plan.release(2)
    assert [plan.assign(worker).local_steps for worker in range(2)] == [50, 50]
    assert plan.assign(0).progress_per_step == 1.0
    assert [plan.assign(worker).local_steps for worker in (2, 0)] == [50, 5]


def test_a_run_has_its_steps_and_no_more_and_the_last_ones_are_waited_for() -> None:
    plan = LocalStepPlan(2, 8, total_steps=10, dynamic_local_steps=False, shards=[], seed=1)
    assert [plan.assign(w).local_steps for w in (0, 1)] == [8, 8]
    plan.record(0, report(8))
    assert plan.assign(0).local_steps == 4  # 20 in all, 8 done, 8 under way
    plan.record(0, report(4))
    idle = plan.assign(0)
    assert idle.idle and not plan.finished
    plan.release(1)  # it died: its steps are open again
    assert plan.assign(0).local_steps == 8
    plan.record(0, report(8))
    assert plan.finished


def test_a_round_that_is_begun_again_after_a_restart_counts_as_long_as_it_is_now() -> None:
    """Others have taken most of the steps that were left: what is promised would be more than the worker takes."""
    plan, again = (LocalStepPlan(2, 8, total_steps=10, dynamic_local_steps=False, shards=[9, 9], seed=1) for _ in "ab")
    plan.assign(0), plan.assign(1)
    again.load_state_dict(plan.state_dict())
    again.record(0, report(14))
    assert again.assign(1).local_steps == 6 and again.assigned[1].steps == 6


def test_shards_are_used_by_their_size_and_drawn_without_overlap() -> None:
    plan = LocalStepPlan(2, 5, total_steps=0, dynamic_local_steps=False, shards=[100, 300], seed=1)
    drawn: set[tuple[int, int]] = set()
    for _ in range(200):
        for worker in (0, 1):
            given_ = plan.assign(worker)
            batches = {(given_.shard, given_.offset + i) for i in range(5)}
            assert not batches & drawn
            drawn |= batches
        for worker in (0, 1):
            plan.record(worker, report(5))
    assert plan.used[1] / sum(plan.used) == pytest.approx(0.75, abs=0.01)


def test_workers_that_are_at_work_at_one_time_draw_from_shards_by_what_all_of_them_draw() -> None:
    plan = LocalStepPlan(2, 5, total_steps=0, dynamic_local_steps=False, shards=[9, 9], seed=1)
    for _ in range(20):
        assert {plan.assign(worker).shard for worker in (0, 1)} == {0, 1}
        for worker in (0, 1):
            plan.record(worker, report(5))


def test_the_first_shards_do_not_depend_on_who_comes_first() -> None:
    orders = [[0, 1, 2], [2, 0, 1]]
    plans = [LocalStepPlan(3, 5, total_steps=0, dynamic_local_steps=False, shards=[9, 9, 9], seed=1) for _ in orders]
    given_ = [{w: plan.assign(w).shard for w in order} for plan, order in zip(plans, orders, strict=True)]
    assert given_[0] == given_[1] == {0: 0, 1: 1, 2: 2}


def test_the_schedule_of_a_shard_is_where_the_run_is() -> None:
    """Two equal shards and two workers: a shard's steps are a worker's mean steps, whoever took them."""
    plan = LocalStepPlan(2, 10, total_steps=100, dynamic_local_steps=False, shards=[64, 64], seed=1)
    for _ in range(5):
        for worker in (0, 1):
            plan.assign(worker)
        for worker in (0, 1):
            plan.record(worker, report(10))
    assert plan.assign(0).progress == pytest.approx(50, abs=10) and plan.assign(0).progress_per_step == 1.0


def test_without_shards_the_schedule_follows_the_mean_of_the_workers() -> None:
    plan = LocalStepPlan(2, 10, total_steps=0, dynamic_local_steps=False, shards=[], seed=1)
    plan.assign(0)
    plan.record(0, report(10, 0.1))
    plan.assign(1)
    plan.record(1, report(4, 0.4))
    fast, slow = plan.assign(0), plan.assign(1)
    assert fast.progress == slow.progress == 7.0
    assert fast.progress_per_step == pytest.approx((10 + 2.5) / 2 / 10) and slow.progress_per_step == pytest.approx(
        (10 + 2.5) / 2 / 2.5
    )


def test_the_plan_goes_on_where_it_was() -> None:
    first = LocalStepPlan(
        workers=2, local_steps=5, total_steps=0, dynamic_local_steps=True, shards=[10, 10, 10], seed=1
    )
    for _ in range(3):
        first.assign(0)
        first.record(0, report(5, 0.5))
    second = LocalStepPlan(
        workers=2, local_steps=5, total_steps=0, dynamic_local_steps=True, shards=[10, 10, 10], seed=1
    )
    second.load_state_dict(first.state_dict())
    assert first.assign(0) == second.assign(0)


@given(st.permutations([0, 1, 2]), st.integers(0, 20))
def test_after_a_restart_each_worker_begins_where_it_was_whoever_comes_first(order: list[int], seed: int) -> None:
    plans = [LocalStepPlan(3, 5, total_steps=0, dynamic_local_steps=False, shards=[9, 9, 9], seed=seed) for _ in "12"]
    for _ in range(3):
        given_ = {worker: plans[0].assign(worker) for worker in (0, 1, 2)}
        for worker in given_:
            plans[0].record(worker, report(5))
    given_ = {worker: plans[0].assign(worker) for worker in (0, 1, 2)}
    plans[1].load_state_dict(plans[0].state_dict())
    assert {worker: plans[1].assign(worker) for worker in order} == given_
    for plan in plans:
        for worker in (0, 1, 2):
            plan.record(worker, report(5))
    assert plans[0].assign(1) == plans[1].assign(1)


def test_one_that_does_not_come_again_after_a_restart_keeps_no_steps_from_the_others() -> None:
    first = LocalStepPlan(2, 5, total_steps=5, dynamic_local_steps=False, shards=[9, 9], seed=1)
    offsets = [first.assign(worker).offset for worker in (0, 1)]
    second = LocalStepPlan(2, 5, total_steps=5, dynamic_local_steps=False, shards=[9, 9], seed=1)
    second.load_state_dict(first.state_dict())
    assert second.assign(1).offset == offsets[1]
    second.record(1, report(5))
    assert second.assign(1).local_steps == 5
    second.record(1, report(5))
    assert second.finished


@given(st.lists(st.integers(1, 99), max_size=5), st.integers(1, 5), st.integers(2, 3))
def test_a_plan_goes_on_with_shards_and_workers_of_its_own(sizes: list[int], steps: int, workers: int) -> None:
    """All that was used stays used, by share, and so does the progress; the speed of a worker that is no more does not
    count."""
    first = LocalStepPlan(
        workers=3, local_steps=5, total_steps=0, dynamic_local_steps=True, shards=[10, 20, 30], seed=1
    )
    for worker in (0, 1, 2, 0):
        first.assign(worker)
        first.record(worker, report(steps, 0.1 * (3 - worker)))
    second = LocalStepPlan(workers, 5, total_steps=0, dynamic_local_steps=True, shards=sizes, seed=1)
    second.load_state_dict(first.state_dict())
    if sizes and len(sizes) != 3:
        assert sum(second.used) == 4 * steps
        assert all(abs(u - 4 * steps * s / sum(sizes)) < 1 for u, s in zip(second.used, sizes, strict=True))
    assert second.steps == 4 * steps and second.speeds.keys() == set(range(workers))
    given_ = second.assign(workers - 1)  # the fastest
    assert given_.total_progress == pytest.approx(4 * steps / 3)
    if len(sizes) != 3:  # of another number of shards, each was used by its share, rounded to whole steps
        rounding = sum(sizes) / sizes[given_.shard] / workers if given_.shard is not None else 0.0
        assert abs(given_.progress - given_.total_progress) <= 2 * rounding + 1e-9
    assert given_.local_steps == 5 and given_.shard in (range(len(sizes)) if sizes else [None])


@pytest.mark.parametrize("shards", [[], [16, 16]])
def test_a_run_that_goes_on_with_other_workers_has_the_progress_that_it_had(shards: list[int]) -> None:
    """And as many steps left; also after a restart, and with yet another number."""
    state: dict[str, Any] = {}
    for workers, steps, progress, left in ((2, 10, 0.0, 24), (1, 4, 5.0, 7), (1, 0, 9.0, 3), (3, 5, 9.0, 9)):
        plan = LocalStepPlan(workers, 99, total_steps=12, dynamic_local_steps=False, shards=shards, seed=1)
        if state:
            plan.load_state_dict(state)
        begun = plan.assign(0)
        assert begun.total_progress == begun.progress == progress and begun.local_steps == left
        for shard in (0, 1):
            plan.record(0, report(steps // 2 + steps % 2 * shard, shard=shard if shards else None))
        state = plan.state_dict()
        torch.save(state, path := io.BytesIO())
        path.seek(0)
        state = torch.load(path, weights_only=True)
    plan.record(0, report(4))
    assert plan.finished


def test_what_workers_were_at_that_are_no_more_does_not_count_as_drawn() -> None:
    first = LocalStepPlan(3, 5, total_steps=0, dynamic_local_steps=False, shards=[9, 9, 9], seed=1)
    for worker in range(3):
        first.assign(worker)
    second = LocalStepPlan(2, 5, total_steps=0, dynamic_local_steps=False, shards=[9, 9, 9], seed=1)
    second.load_state_dict(first.state_dict())
    assert second.assigned.keys() == second.awaited == {0, 1}


def test_a_worker_that_has_connected_again_is_counted_where_it_was() -> None:
    """Its assignment was made anew, and it has not heard of that."""
    plan = LocalStepPlan(2, 8, total_steps=0, dynamic_local_steps=False, shards=[100, 100], seed=1)
    first = plan.assign(0).shard
    plan.release(0)
    plan.assign(0)
    plan.record(0, report(8, shard=first))
    assert plan.used[first] == 8 and sum(plan.used) == 8
    with pytest.raises(RefusedError, match="shard 2"):
        plan.check(report(8, shard=2))


def test_who_is_gone_is_gone_after_a_restart_of_the_server_too() -> None:
    """The speed of a worker that has left would make the others' rounds shorter for the rest of the run."""
    first, second = (LocalStepPlan(2, 50, total_steps=0, dynamic_local_steps=True, shards=[], seed=1) for _ in range(2))
    for worker, speed in enumerate((10.0, 1.0)):
        first.assign(worker)
        first.record(worker, report(50, 1 / speed))
    first.release(0)
    second.load_state_dict(first.state_dict())
    assert second.assign(1) == first.assign(1) and first.assign(1).local_steps == 50
    assert [second.assign(worker).local_steps for worker in (0, 1)] == [50, 5], "until it comes back"


def plan(**changes: Any) -> LocalStepPlan:
    """Of two workers, 12 steps of the faster a round."""
    options = DelayedNesterovOptions(local_steps=12, dynamic_local_steps=True, **changes)
    return outer.build(local_sgd_spec(options, 2, [100, 100], None, {}), LAYOUT, torch.zeros(3))[1]


def test_the_speed_of_a_worker_that_is_gone_counts_no_more_until_it_is_back() -> None:
    rounds = plan()
    rounds.record(0, report(1, 0.1))
    rounds.record(1, report(1, 0.3))
    assert rounds.assign(1).local_steps == 4
    rounds.release(0)
    assert rounds.assign(1).local_steps == 12
    assert rounds.assign(0).local_steps == 12 and rounds.assign(1).local_steps == 4


@pytest.mark.parametrize(
    ("options", "per_step"),
    [(DiLoCoOptions(local_steps=12), [1.0, 1.0]), (DelayedNesterovOptions(local_steps=12), [0.75, 1.5])],
    ids=["rounds", "no rounds"],
)
def test_in_rounds_of_all_workers_a_step_of_each_is_one_of_the_schedule(options: Any, per_step: list[float]) -> None:
    """However fast it is: all take as many. Here one is twice as fast as the other."""
    rounds = outer.build(local_sgd_spec(options, 2, [], None, {}), LAYOUT, torch.zeros(3))[1]
    for worker, seconds in enumerate((0.1, 0.2)):
        rounds.record(worker, report(12, seconds))
    assert [rounds.assign(worker).progress_per_step for worker in (0, 1)] == pytest.approx(per_step)


def test_a_speed_is_the_mean_of_the_last_round_and_of_what_it_was() -> None:
    """10 a second, then 10/3: 20/3, which is 2/3 of the other's 10."""
    rounds = plan()
    for seconds in (0.1, 0.3):
        rounds.record(0, report(1, 0.1))
        rounds.record(1, report(1, seconds))
    assert rounds.assign(1).local_steps == 8


def test_the_choice_of_shards_follows_the_seed() -> None:
    def drawn(seed: int) -> list[int | None]:
        rounds, shards = plan(seed=seed), list[int | None]()
        for _ in range(40):
            shards.append(rounds.assign(0).shard)
            rounds.record(0, report(1, 0.1))
            shards.append(rounds.assign(1).shard)
            rounds.record(1, report(1, 0.1))
        return shards

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalStepPlan(2, 12, 0, dynamic_local_steps=False, shards=[], seed=1, max_epoch=2),
        lambda: EpochPlan(Constant(), max_epoch=2),
    ],
    ids=["local steps", "gradients"],
)
def test_a_run_of_passes_ends_with_the_last_part_of_the_last_one_although_parts_are_rounded(
    make: Callable[[], Plan],
) -> None:
    """Nine tenths and a tenth are less than one, and so are other sums of parts."""
    sums = list[float]()
    for parts in range(2, 50):
        rounds = make()
        for part in range(2 * parts):
            assert not rounds.finished
            rounds.record(part % 2, Report(local_steps=12, step_seconds=1.0, epochs=1 / parts))
        assert rounds.finished
        sums.append(rounds.state_dict()["epochs"])
    assert min(sums) < 2.0


def test_a_round_is_expected_to_take_its_steps_at_the_workers_speed() -> None:
    """Nothing is known of work that is still to begin, or that nobody has measured."""
    rounds = plan()
    assert rounds.expected_seconds(0) is None
    rounds.assign(0)
    assert rounds.expected_seconds(0) is None
    rounds.record(0, report(12, 0.25))
    assert rounds.expected_seconds(0) == math.inf
    rounds.assign(0)
    assert rounds.expected_seconds(0) == 3.0


def test_a_report_has_its_steps_and_no_more_than_there_can_be() -> None:
    rounds = plan()
    rounds.check(Report(local_steps=16 * 12, step_seconds=0.0, epochs=100.0, shard=1))
    for wrong in (
        Report(step_seconds=1.0),
        Report(local_steps=1),
        Report(local_steps=16 * 12 + 1, step_seconds=1.0),
        Report(local_steps=1, step_seconds=1.0, epochs=101.0),
        Report(local_steps=1, step_seconds=1.0, shard=2),
    ):
        with pytest.raises(RefusedError):
            rounds.check(wrong)
    gradients = EpochPlan(Constant(), max_epoch=9)
    gradients.check(Report(epochs=100.0))
    with pytest.raises(RefusedError, match="epochs 101: a step is of 100 passes over the data at most"):
        gradients.check(Report(epochs=101.0))


def test_a_worker_that_has_come_back_after_a_restart_is_like_any_other() -> None:
    """Its work is promised again, and its next round is of a shard that is behind."""
    first = LocalStepPlan(2, 5, total_steps=5, dynamic_local_steps=False, shards=[9, 9], seed=1)
    first.assign(0)
    second = LocalStepPlan(2, 5, total_steps=5, dynamic_local_steps=False, shards=[9, 9], seed=1)
    second.load_state_dict(first.state_dict())
    assert second.assign(0) == first.assign(0)
    assert second.assign(1).local_steps == 5 and second.assign(2).idle
    second.record(0, report(5))
    assert second.assign(0).idle


@pytest.mark.parametrize("several", [False, True])
def test_a_run_of_either_method_ends_after_the_steps_and_passes_of_its_description(several: bool) -> None:
    inner = OptimizerSpec("SGD", [ParameterGroup([0], {"lr": 1.0})]).to_json()
    gradients = hybrid_spec(HybridOptions(), 2, None, {"parts": [inner]} if several else inner, 7, max_epoch=3)
    local = local_sgd_spec(DelayedNesterovOptions(total_steps=7), 2, [], None, {}, max_epoch=3)
    for build, spec in ((gradient_main.build, gradients), (outer.build, local)):
        _, made = build(spec, LAYOUT, torch.zeros(3))
        assert (made.max_epoch, made.total_steps) == (3, 7)
