"""Shares by speed: who gets how many micro-batches of a step, by hand and on simulated machines."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairseq_async.errors import ConfigurationError, spell_options
from fairseq_async.method.option_flags import spelling
from fairseq_async.method.spec import hybrid_spec
from fairseq_async.options.config import HybridOptions
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule
from fairseq_async.server.rounds.dealer import Dealer
from fairseq_async.server.rounds.shares import Shares
from fairseq_async.simulation.schedule import LearningRate, make_optimizer, set_lr
from fairseq_async.simulation.trial import Trial
from fairseq_async.simulation.workers import LogicalWorker, SharedModel
from fairseq_async.worker.shards import BatchCounter, ShardOrder, place
from scripts.bench.hybrid_steps import OwnParts
from tests.helpers.simulations import Log, experiment, finish, run, trial

EQUAL: dict[str, Any] = {"method": "hybrid_async", "micro_batches": 4}
BARRIER = {"barrier": True}
AUTO = EQUAL | {"shares": "auto"}
SHARES = AUTO | BARRIER
NOISY = {"distribution": "lognormal", "mean": 1.0, "spread": 0.3}
ODD = NOISY | {"spread": 0.8}  # also for steps that wait two standard deviations longer


class Clocked:
    """Workers that take so many seconds a micro-batch, in steps of all of them."""

    def __init__(self, *seconds: float, micro_batches: int = 4) -> None:
        self.shares, self.seconds, self.now = Shares(micro_batches), dict(enumerate(seconds)), 0.0

    def step(self, workers: list[int] | None = None, total: int | None = None) -> list[int]:
        """What each worker was given in one step; its time passes."""
        here = list(self.seconds) if workers is None else workers
        given = {worker: self.shares.begin(worker, self.now) for worker in here}
        due = {worker: self.now + number * self.seconds[worker] for worker, number in given.items()}
        for worker in sorted(due, key=lambda worker: due[worker]):
            self.shares.arrive(worker, due[worker])
        self.now = max(due.values())
        self.shares.divide(here, len(self.seconds) if total is None else total, self.now)
        return list(given.values())


@pytest.mark.parametrize(
    ("seconds", "micro_batches", "expected"),
    [
        ((1.0, 3.0), 4, [6, 2]),
        ((1.0, 1.0, 1.0, 2.0), 2, [3, 2, 2, 1]),
        ((1.0, 1.0, 2.0, 4.0), 4, [6, 6, 3, 1]),
        ((1.0, 1.0, 1.0, 1.0, 1.09), 40, [40] * 5),
        ((1.0, 1.0, 1.0, 1.0, 1.12), 40, [41, 41, 41, 41, 36]),
        ((1.0, 100.0), 2, [3, 1]),
    ],
    ids=["1, 3", "whole micro-batches", "four speeds", "within a tenth", "beyond a tenth", "at least one"],
)
def test_micro_batches_go_to_who_is_done_first(
    seconds: tuple[float, ...], micro_batches: int, expected: list[int]
) -> None:
    workers = Clocked(*seconds, micro_batches=micro_batches)
    given = [workers.step() for _ in range(6)]
    assert given[:3] == [[micro_batches] * len(seconds)] * 3 and given[3:] == [expected] * 3


def test_a_worker_that_becomes_four_times_slower_has_its_share_within_five_steps() -> None:
    workers = Clocked(1.0, 1.0)
    for _ in range(8):
        assert workers.step() == [4, 4]
    workers.seconds[1] = 4.0
    assert [workers.step() for _ in range(5)][-1] == [7, 1]
    workers.seconds[1] = 1.0
    assert [workers.step() for _ in range(5)][-1] == [4, 4]


def test_a_workers_time_is_that_of_its_last_five_steps() -> None:
    """Also where it changes too little to be a jump."""
    shares, now = Shares(4), 0.0
    for seconds in [1.0] * 20 + [1.25] * 5:
        number = shares.begin(0, now)
        now += number * seconds
        shares.arrive(0, now)
    assert shares.state_dict()["took"] == {0: [1.25] * 5}


@pytest.mark.parametrize(
    ("last", "took"),
    [
        ([1.4, 1.4], [1.0, 1.0, 1.0, 1.4, 1.4]),
        ([1.6, 1.6], [1.6] * 3),
        ([0.7, 0.7], [1.0, 1.0, 1.0, 0.7, 0.7]),
        ([0.6, 0.6], [0.6] * 3),
        ([9.0], [1.0, 1.0, 1.0, 1.0, 9.0]),
    ],
)
def test_two_steps_in_a_row_that_are_half_as_long_again_are_a_new_speed(last: list[float], took: list[float]) -> None:
    shares, now = Shares(4), 0.0
    for seconds in [1.0] * 5 + last:
        number = shares.begin(0, now)
        now += number * seconds
        shares.arrive(0, now)
    assert shares.state_dict()["took"][0] == pytest.approx(took)


@pytest.mark.parametrize(("slower", "given"), [(1.95, {0: 6, 1: 2}), (1.85, {0: 5, 1: 3})], ids=["2.5%", "7.5%"])
def test_micro_batches_are_divided_anew_where_that_makes_the_step_a_twentieth_shorter(
    slower: float, given: dict[int, int]
) -> None:
    """With 6 and 2 the step takes 6 seconds."""
    shares = Shares(4)
    shares.load_state_dict({"took": {0: [1.0] * 3, 1: [slower] * 3}, "given": {0: 6, 1: 2}})
    shares.divide([0, 1], 2, 0.0)
    assert shares.state_dict()["given"] == given


def test_workers_whose_times_differ_by_less_than_they_are_uneven_have_equal_shares() -> None:
    shares = Shares(40)
    shares.load_state_dict({"took": {0: [0.8, 1.0, 1.2], 1: [1.0, 1.2, 1.4]}, "given": {}})
    shares.divide([0, 1], 2, 0.0)
    assert shares.state_dict()["given"] == {0: 40, 1: 40}


def test_work_that_is_dealt_again_is_measured_by_as_many_micro_batches_as_it_has() -> None:
    """A worker that comes back takes the batches that it was dealt, though it would be given more by now."""
    shares = Shares(2, workers=2)
    for sequence in range(4):
        for worker, seconds in enumerate((1.0, 3.0)):
            assert shares.deal(worker, sequence, 10.0 * sequence)[1] == 2
            if sequence < 3:
                shares.arrive(worker, 10.0 * sequence + 2 * seconds)
    shares.divide([0, 1], 2, 30.0)
    assert shares.deal(0, 3, 31.0)[1] == 2
    shares.arrive(0, 32.0)
    assert shares.state_dict()["took"][0] == [1.0] * 4 and shares.deal(0, 4, 32.0)[1] == 3


def test_who_leaves_hands_over_its_share_and_who_joins_begins_with_the_mean() -> None:
    workers = Clocked(1.0, 1.0, 1.0)
    for _ in range(4):
        workers.step()
    workers.shares.remove_worker(2)
    workers.shares.divide([0, 1], 3, workers.now)
    assert workers.step([0, 1]) == [6, 6]
    workers.shares.divide([0, 1, 2], 3, workers.now)
    assert workers.step([0, 1, 2]) == [4, 4, 4]


def test_who_takes_twice_its_time_hands_over_its_share_until_it_comes() -> None:
    workers = Clocked(1.0, 1.0)
    for _ in range(4):
        workers.step()
    hung = workers.now
    assert workers.shares.begin(1, hung) == 4
    workers.shares.divide([0, 1], 2, hung + 8.0)
    assert workers.shares.begin(0, hung + 8.0) == 4
    workers.shares.divide([0, 1], 2, hung + 8.1)
    assert workers.shares.begin(0, hung + 8.1) == 8


def test_where_all_take_too_long_each_has_the_mean_again() -> None:
    workers = Clocked(1.0, 3.0)
    assert [workers.step() for _ in range(4)][-1] == [6, 2]
    began = workers.now
    assert [workers.shares.begin(each, began) for each in (0, 1)] == [6, 2]
    workers.shares.divide([0, 1], 2, began + 100.0)
    assert [workers.shares.begin(each, began + 100.0) for each in (0, 1)] == [4, 4]


def test_batches_are_dealt_in_one_order_and_again_to_who_comes_back_without_a_gradient() -> None:
    dealer = Dealer(2, 4)
    assert [dealer.deal(worker, 0, 4)[0] for worker in (1, 0)] == [4, 0], (
        "whoever comes first has the batches of its part"
    )
    assert [dealer.deal(0, 1, 6), dealer.deal(1, 1, 2), dealer.deal(0, 2, 6)] == [(8, 6), (14, 2), (16, 6)]
    again = Dealer(2, 4)
    again.load_state_dict(dealer.state_dict())
    assert [again.deal(0, 2, 6), again.deal(1, 1, 1), again.deal(2, 0, 4)] == [(16, 6), (14, 2), (22, 4)]
    assert [again.deal(1, 1, 3), again.deal(1, 2, 3)] == [(14, 2), (26, 3)], "what was dealt is not left out"


def test_a_worker_that_comes_back_has_the_batches_that_it_was_dealt_and_no_more() -> None:
    """The server has forgotten its speed, as of all workers at the end of a run that goes on later."""
    workers = Clocked(1.0, 3.0)
    assert [workers.step() for _ in range(4)][-1] == [6, 2]
    assert [workers.shares.deal(worker, 0, 0.0) for worker in (0, 1)] == [(4, 6), (10, 2)]
    workers.shares.remove_worker(1)
    assert workers.shares.deal(1, 0, 100.0) == (10, 2) and workers.shares.begun[1] == (100.0, 2)
    assert workers.shares.deal(1, 1, 200.0) == (12, 4)


def test_a_run_that_goes_on_with_more_workers_trains_no_first_batch_again() -> None:
    """The third worker is new. The second one of two had not begun when the state was saved."""
    before, after = Dealer(2, 4), Dealer(3, 4)
    assert [before.deal(0, sequence, 4)[0] for sequence in (0, 1)] == [0, 8]
    after.load_state_dict(before.state_dict())
    assert [after.deal(worker, 0, 4)[0] for worker in (2, 1)] == [12, 4]
    assert after.deal(0, 2, 4) == (16, 4)


def test_the_order_has_the_batches_of_each_part_in_turn_step_after_step() -> None:
    first = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [place(number, 2, 3) for number in range(8)] == [*first, (0, 3), (0, 4)]


@pytest.mark.parametrize("count", [1, 2, 6, 7, 8])
def test_the_batches_of_the_following_steps_are_foreseen_while_the_division_stays(count: int) -> None:
    """Two workers have four batches each on average."""
    counter, drawn = BatchCounter(4, 2), []
    position: Any = SimpleNamespace(sequence=0, done=0, first_micro_batch=21, micro_batches=count)
    for position.sequence in range(3):
        drawn += [counter.next(position) for _ in range(count)]
        position.first_micro_batch += 8
    assert [counter.following(key) for key in drawn[:-1]] == drawn[1:]
    position.sequence, position.first_micro_batch = 3, 21
    assert [counter.next(position) for _ in drawn] == drawn, "also where a loop draws them ahead of its steps"


def test_a_batch_has_the_random_numbers_of_its_part_and_step_whoever_computes_it() -> None:
    """Of two workers of the second region, whose numbers begin with 2."""
    net = nn.Linear(1, 1, bias=False)
    problem: Any = SimpleNamespace(
        model=net, batch=lambda indices: None, loss=lambda batch: (torch.rand(()) * net.weight.sum(), 1.0)
    )
    model = SharedModel(problem, 1, ShardOrder([8, 8], 3), 3)

    def drawn(worker: int, *batches: tuple[int, int]) -> float:
        logical = LogicalWorker(worker, torch.zeros(1), number=2 + worker)
        model.gradient(logical, batches, average=2)
        return float(logical.delta)

    keys = [(part, number) for part in (0, 1) for number in range(4)]
    values = {key: drawn(0, key) for key in keys}
    assert values == {key: drawn(1, key) for key in keys} and len({*values.values()}) == len(keys)
    assert drawn(1, *keys[:3]) == pytest.approx(sum(values[key] for key in keys[:3]) / 3)


def test_a_step_of_so_many_gradients_and_one_without_micro_batches_are_refused() -> None:
    fewer = {"updates_per_step": 1, "micro_batches": 4}
    for given, said in ((fewer, "leave it"), (fewer | BARRIER, "leave it"), ({}, "give --update-freq of at least 2")):
        spell_options(lambda name: spelling("hybrid_async", name))
        with pytest.raises(ConfigurationError, match=said):
            hybrid_spec(HybridOptions(shares="auto", **given), 2, None, {}, 0)  # type: ignore[arg-type]


def cluster(*seconds: float | dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"steps": 80, "cluster": {"workers": len(seconds), "seconds_per_step": list(seconds)} | more}


def in_float64(simulated: Trial, log: Log) -> Tensor:
    """Where a synchronous run ends that takes the same micro-batches in the same steps."""
    model, start = simulated.model, simulated.start_for_test  # type: ignore[attr-defined]
    problem = model.problem
    double = problem.model.to(torch.float64)
    at = 0
    for parameter in double.parameters():
        parameter.data = start[at : at + parameter.numel()].view_as(parameter).double()
        at += parameter.numel()
    parameters = list(double.parameters())
    optimizer = make_optimizer(simulated.method.optimizer, parameters)
    rate = LearningRate(simulated.rate.options, simulated.rate.lr, 80 // 4)
    for number, (_, step) in enumerate(groupby(log.events, key=lambda event: event[0])):
        chosen: list[int] = []
        for _, _, report in step:
            assert report.offset is not None and report.micro_batches is not None
            for each in range(report.offset, report.offset + report.micro_batches):
                part, batch = place(each, 2, 4)
                chosen += model.order.indices(part, batch * model.batch_size, model.batch_size)
        set_lr(optimizer, rate(number))
        optimizer.zero_grad()
        points, labels = problem.batch(chosen)
        cross_entropy(double(points.double()), labels).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def test_a_step_is_that_of_a_synchronous_run_with_the_same_micro_batches(tmp_path: Path) -> None:
    log = Log()
    given = experiment(
        tmp_path,
        methods={"it": SHARES},
        optimizer={"type": "sgd", "lr": 0.05, "momentum": 0.9},
        **cluster(1.0, 3.0),
    )
    simulated = trial(given, log)
    simulated.start_for_test = simulated.parameters.clone()  # type: ignore[attr-defined]
    finish(simulated)
    assert [report.micro_batches for _, _, report in log.events][-2:] == [6, 2]
    assert simulated.version == 20
    expected = in_float64(simulated, log)
    torch.testing.assert_close(simulated.parameters.double(), expected, rtol=1e-6, atol=1e-6)


def test_with_a_barrier_the_run_is_the_synchronous_one_whatever_the_speeds(tmp_path: Path) -> None:
    """Each step has the batches of a synchronous step, and who computes them makes no difference but rounding."""
    same = {"optimizer": {"type": "sgd", "lr": 0.05, "momentum": 0.9}, **cluster(1.0, 1.0, 3.0)}
    ours, log = run(tmp_path, SHARES, **same)
    theirs, _ = run(tmp_path, EQUAL | BARRIER, **same)
    assert [report.micro_batches for _, _, report in log.events][-3:] != [4, 4, 4]
    torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=1e-5, atol=1e-6)


def test_with_parts_of_their_own_equal_workers_train_each_sample_once_and_a_fast_one_repeats(tmp_path: Path) -> None:
    class Counted(OwnParts):
        def _samples(self, shard: int, number: int) -> Sequence[int]:
            chosen = super()._samples(shard, number)
            counts.update(chosen)
            return chosen

    for seconds, equal in (((1.0, 1.0), True), ((1.0, 3.0), False)):
        counts: Counter[int] = Counter()
        finish(trial(experiment(tmp_path, methods={"it": SHARES}, **cluster(*seconds)), kind=Counted))
        assert (max(counts.values()) - min(counts.values()) <= 1) == equal


@pytest.mark.parametrize("seconds", [(1.0, 3.0), (NOISY, NOISY | {"mean": 3.0})], ids=["steady", "noisy"])
def test_each_batch_is_trained_once_whoever_is_fast(tmp_path: Path, seconds: tuple[Any, ...]) -> None:
    _, log = run(tmp_path, AUTO, **cluster(*seconds))
    work = [(report.offset or 0, report.micro_batches or 0) for _, _, report in log.events]
    trained = [number for first, count in work for number in range(first, first + count)]
    assert len(set(trained)) == len(trained) > 100
    assert len(set(range(len(trained))) - set(trained)) <= 8, "only the last ones may still be at work"


@pytest.mark.parametrize("waits", [BARRIER, {}], ids=["barrier", "near arrivals"])
def test_equal_workers_are_not_changed_to_the_bit(tmp_path: Path, waits: dict[str, Any]) -> None:
    ours, _ = run(tmp_path, AUTO | waits, **cluster(1.0, 1.05, 1.0))
    theirs, _ = run(tmp_path, EQUAL | waits, **cluster(1.0, 1.05, 1.0))
    assert torch.equal(ours.parameters, theirs.parameters) and ours.now == theirs.now


def test_who_is_done_first_by_rounding_does_not_step_alone(tmp_path: Path) -> None:
    """Shares of 6, 6, 3 and 1: the last worker is done 2.1 seconds before the first, more than half of its step."""
    _, log = run(tmp_path, AUTO, **cluster(1.03, 1.03, 2.05, 4.1))
    assert {receipt.staleness for time, receipt, _ in log.events if time > 60.0} == {0}


@pytest.mark.parametrize("seconds", [(1.0, 3.0), (ODD, ODD | {"mean": 3.0})], ids=["steady", "noisy"])
def test_without_a_barrier_a_step_counts_micro_batches(tmp_path: Path, seconds: tuple[Any, ...]) -> None:
    """Two workers share eight. A step of one gradient alone is of fewer, also where that is more than half of them; one
    of more, after new shares, is one step."""
    ours, log = run(tmp_path, AUTO, **cluster(*seconds))
    number: Counter[float] = Counter()
    for time, _, report in log.events:
        number[time] += report.micro_batches or 0
    rule = ours.rule
    assert isinstance(rule, ScheduledRule) and rule.steps == pytest.approx(
        sum(min(1, each / 8) for each in number.values())
    )
    assert ours.coordinator.finished and rule.steps < 20 + 1
    settled = [receipt.staleness for time, receipt, _ in log.events if time > 40.0]
    assert sum(settled) <= (0 if seconds == (1.0, 3.0) else len(settled) // 2)
    gradients = Counter(time for time, _, _ in log.events)
    assert (1 in gradients.values()) == (seconds != (1.0, 3.0)), "with noise, some steps are of one gradient"


def test_without_a_barrier_steady_speeds_give_the_run_with_one(tmp_path: Path) -> None:
    """Also while speeds are not known, and where a slow worker comes first."""
    with_one, _ = run(tmp_path, SHARES, **cluster(3.0, 1.0, 1.0))
    without, log = run(tmp_path, AUTO, **cluster(3.0, 1.0, 1.0))
    assert torch.equal(without.parameters, with_one.parameters) and without.now == with_one.now
    assert {receipt.staleness for _, receipt, _ in log.events} == {0}


def test_no_gradient_is_late_and_the_step_takes_half_the_time(tmp_path: Path) -> None:
    ours, log = run(tmp_path, SHARES, **cluster(1.0, 3.0))
    theirs, _ = run(tmp_path, EQUAL | BARRIER, **cluster(1.0, 3.0))
    settled = [receipt.staleness for time, receipt, _ in log.events if time > 40.0]
    assert set(settled) == {0} and ours.now < 0.75 * theirs.now


@pytest.mark.parametrize("method", [SHARES, AUTO], ids=["barrier", "near arrivals"])
def test_a_simulated_worker_that_becomes_slower_has_new_shares_within_five_steps(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    """Five steps have 40 micro-batches. The worker becomes four times slower after five whole steps."""
    trace = tmp_path / "trace.txt"
    trace.write_text("1\n" * 20 + "4\n" * 200)
    _, log = run(tmp_path, method, **cluster(1.0, {"trace": str(trace)}))
    given = [(receipt.worker, report.micro_batches or 0) for _, receipt, report in log.events]
    total = [sum(number for _, number in given[: at + 1]) for at in range(len(given))]
    assert {each for each, at in zip(given, total, strict=True) if at <= 40} == {(0, 4), (1, 4)}
    assert {each for each, at in zip(given, total, strict=True) if at > 80} == {(0, 7), (1, 1)}


@pytest.mark.parametrize("method", [SHARES, AUTO], ids=["barrier", "near arrivals"])
def test_a_simulation_that_is_stopped_goes_on_to_the_bit(tmp_path: Path, method: dict[str, Any]) -> None:
    given = experiment(tmp_path, methods={"it": method}, **cluster(NOISY, NOISY | {"mean": 3.0}))
    whole = trial(given)
    whole_log: list[Any] = []
    whole.write = lambda *event: whole_log.append(repr(event))
    for _ in range(25):
        whole.advance()
    state = whole.state_dict()
    torch.save(state, tmp_path / "state.pt")
    del whole_log[:]
    expected = finish(whole).clone()
    again = trial(given)
    again_log: list[Any] = []
    again.write = lambda *event: again_log.append(repr(event))
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(finish(again), expected) and again_log == whole_log
