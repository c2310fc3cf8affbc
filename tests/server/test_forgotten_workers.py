"""After forget(w) an object is what it would be without worker w, after an excuse what it would be seconds later, and
after load_state_dict what the one before was."""

import copy
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from fairseq_async.algorithms import (
    DQSGD,
    BufferedNesterov,
    DelayedNesterov,
    ErrorFeedback,
    FragmentedRule,
    HybridAccumulation,
    NesterovMomentum,
    NormGate,
    Region,
    Rule,
    StalenessPolicy,
    Update,
    WorkerBuffers,
    fragments_of,
)
from fairseq_async.collective.adascale.gains import Gains
from fairseq_async.method.global_server import GlobalServer
from fairseq_async.options import compression
from fairseq_async.options.config import LocalSGDOptions
from fairseq_async.protocol import Receipt, Report, ScheduleEvent, Status
from fairseq_async.records.event_log import Settled
from fairseq_async.regions.upstream import GlobalParameters, Upstream
from fairseq_async.server import ParameterServer
from fairseq_async.server.build import build_coordinator
from fairseq_async.server.compressed_changes import CompressedChanges
from fairseq_async.server.compressed_starts import CompressedFragments, CompressedStarts
from fairseq_async.server.coordinator import Coordinator
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.membership import Membership
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.rounds.grace import GracePeriod, Quorum
from fairseq_async.server.rounds.look_ahead import LookAhead
from fairseq_async.server.rounds.near_arrivals import NearArrivals
from fairseq_async.server.rounds.shares import Shares
from fairseq_async.simulation.clock import Clock, EventKind, ScheduledEvent
from fairseq_async.simulation.experiment import ScheduleOptions
from fairseq_async.simulation.rules import AdaScaleRule
from fairseq_async.simulation.schedule import LearningRate
from recipes.rules.baselines import OuterAdam
from recipes.rules.direction_averaging import DirectionAveraging
from scripts.faults.sgd_server import Constant, sgd_spec
from tests.helpers.driven import Driven

WORKERS = (0, 1, 2)
CHANGES = compression.parse("pull=e3m0").pull


def state(value: Any) -> Any:
    """Everything that an object holds, in a form that can be compared."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, torch.optim.Optimizer):
        return state(value.state_dict())
    if isinstance(value, dict):
        return {key: state(each) for key, each in value.items()}
    if isinstance(value, deque):
        return value.maxlen, list(map(state, value))
    if isinstance(value, list | tuple | set):
        return list(map(state, value))
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


PLAN = LocalStepPlan(workers=3, local_steps=10, total_steps=0, dynamic_local_steps=False, shards=[], seed=1)


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
        it.note_taken(worker, torch.full((5,), 1.0 + worker), None)
        it.note_taken(worker, torch.full((2,), 4.0 + worker), 2)
    return it


def shares(seen: Collection[int], divided: bool = False) -> Shares:
    it = Shares(4)
    for number in range(4):
        for worker in seen:
            it.begin(worker, 10.0 * number)
            it.arrive(worker, 10.0 * number + 2.0 + worker + 0.1 * number)
    if divided and seen:
        it.divide(seen, len(seen), 40.0)
    for worker in seen:
        it.begin(worker, 40.0 + worker)
    return it


@pytest.mark.parametrize("gone", WORKERS)
@pytest.mark.parametrize(
    "make",
    [look_ahead, near_arrivals, shares, lambda seen: grace(seen, lambda: GracePeriod(2.0, PLAN)), quorum, changes],
    ids=["look-ahead", "near arrivals", "shares", "grace", "quorum", "compressed changes"],
)
def test_an_object_that_has_forgotten_a_worker_is_one_that_never_saw_it(make: Callable[..., Any], gone: int) -> None:
    it, never = make(WORKERS), make([worker for worker in WORKERS if worker != gone])
    assert state(it) != state(never)
    it.remove_worker(gone)
    assert state(it) == state(never)


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
    gain = adascale(())
    gain.limit_round(3)
    assert gain.gain.scale == gain.accumulation.updates_per_step == 3


def test_buffers_are_averaged_over_the_updates_of_a_smaller_round() -> None:
    rule, parameters = WorkerBuffers(BufferedNesterov(0.7, 0.9, 4), 3, 4, average=True), torch.zeros(4)
    rule.limit_round(2)
    for worker, value in enumerate((2.0, 4.0, 7.0)):
        rule.store_buffers(parameters, Update(worker, 0, 0, 1.0, torch.tensor([1.0, 1.0, 1.0, -value])))
    assert parameters.tolist() == [0.0, 0.0, 0.0, 5.5]


def fragmented(delay: int) -> FragmentedRule:
    return FragmentedRule(fragments_of([2, 3], 2), [DelayedNesterov(0.7, 0.9, delay), BufferedNesterov(0.7, 0.9, 4)])


def trained(seen: Collection[int], make: Callable[[], Rule]) -> Rule:
    """It has taken three updates of each worker, which wait for others."""
    rule, parameters, generator = make(), torch.zeros(5), torch.Generator().manual_seed(1)
    for number in range(3):
        for worker in seen:
            take(rule, parameters, worker, number, torch.randn(5, generator=generator))
    return rule


def take(rule: Rule, parameters: Tensor, worker: int, number: int, delta: Tensor) -> None:
    part = rule.of(number, parameters) if isinstance(rule, FragmentedRule) else (rule, parameters)
    its = rule.fragments[number % 2].of(delta) if isinstance(rule, FragmentedRule) else delta
    if isinstance(rule, WorkerBuffers):
        rule.store_buffers(parameters, Update(worker, number, 0, 1.0, delta))
    part[0].apply(part[1], Update(worker, number, 0, 1.0 + worker, its, 2.0, micro_batches=2 + worker))


def pushed(seen: Collection[int], in_fragments: bool) -> ParameterServer:
    """It has a last step, norms, refused and stale updates, and, of a whole model, the workers' starts."""
    rule = fragmented(5) if in_fragments else DelayedNesterov(0.7, 0.9, 5)
    policy = StalenessPolicy(-0.5, 2, compensation=0.0 if in_fragments else 0.5)
    it = ParameterServer(torch.zeros(5), rule, staleness=policy, gate=NormGate(10.0), keeps_last_step=True)
    for number in range(3):
        for worker in seen:
            it.note_pull(worker, it.parameters + worker)
            start = it.rule.fragments[number % 2] if isinstance(it.rule, FragmentedRule) else fragments_of([5], 1)[0]
            delta = start.of(torch.arange(5.0) + worker) * (torch.nan if number == worker == 2 else 1.0)
            it.push(Update(worker, number, max(0, it.version - 3 * (worker == 1)), 1.0 + worker, delta))
    return it


def planned(seen: Collection[int]) -> LocalStepPlan:
    it = LocalStepPlan(
        workers=3, local_steps=10, total_steps=90, dynamic_local_steps=True, shards=[5, 10], seed=1, max_epoch=3
    )
    for number in range(2):
        for worker in seen:
            it.assign(worker)
        for worker in seen:
            it.record(worker, Report(epochs=0.25, local_steps=4 + worker, step_seconds=1.0 + number + worker))
    if 1 in seen:
        it.assign(1), it.release(2)
    return it


def starts(seen: Collection[int]) -> CompressedFragments:
    options = compression.parse("pull=int8").pull
    assert options is not None
    it = CompressedFragments([CompressedStarts(options, turn) for turn in range(2)])
    server = ParameterServer(torch.arange(5.0), fragmented(4))
    for number in range(len(seen)):
        server.push(Update(0, number, server.version, 1.0, server.dispatch_fragment(number) * 0.3 + 1.0))
        it.follow(server)
    return it


def region(seen: Collection[int]) -> Region:
    it, parameters = Region(torch.arange(5.0), 2, 0.5), torch.ones(5)
    for worker in seen:
        it.merge(parameters, torch.full((5,), 7.0 + worker))
        it.note_update()
    if seen:
        it.send(parameters)
    return it


def upstream(seen: Collection[int]) -> Upstream:
    server, receipt = SimpleNamespace(parameters=torch.arange(5.0)), Receipt(0, 0, 0, 1.0, Status.APPLIED, 0, 1.0, 1)
    coordinator = SimpleNamespace(
        server=server, finished=False, merge=lambda region, above: region.merge(server.parameters, above)
    )
    it = Upstream(GlobalServer(LocalSGDOptions(), updates=1, merge=0.5), coordinator)  # type: ignore[arg-type]
    if seen:
        it.join(GlobalParameters(1, 2, False, torch.ones(5)), 5.0, fresh=True)
        it.count([Settled(receipt, Report(local_steps=steps)) for steps in (3, 4)])
        server.parameters += 1.0
        assert it.due(8.0) is not None
        it.count([Settled(receipt, Report(local_steps=5))])
    return it


def gate(seen: Collection[int]) -> NormGate:
    it = NormGate(10.0)
    for worker in seen:
        for number in range(12):
            it.note(worker, 1.0 + worker + number)
    return it


def feedback(seen: Collection[int]) -> ErrorFeedback:
    """The last update was sent and not answered, and lacks a tensor."""
    it = ErrorFeedback(DQSGD(3))
    for worker in seen:
        it.acknowledge()
        it.send(torch.arange(5.0) ** worker, worker, [slice(worker, 3)])
    return it


def gains(seen: Collection[int]) -> Gains:
    it = Gains(2)
    it.set_scale(4.0)
    for worker in seen:
        it.observe([9.0 + worker, 8.0], 2, [1.0, 2.0 + worker])
        it.advance()
    return it


def adascale(seen: Collection[int]) -> AdaScaleRule:
    """The second step has the gradients of some of four workers."""
    optimizer = SGD([parameters := torch.zeros(5)], lr=0.1, momentum=0.9)
    it = AdaScaleRule(HybridAccumulation(optimizer, 4), LearningRate(ScheduleOptions(), 0.1, 9), None)
    for number in range(3):
        for worker in seen:
            it.apply(parameters, Update(worker, number, 0, 1.0 + worker, torch.arange(5.0) * (1 + worker + number)))
    return it


def clock(seen: Collection[int]) -> Clock:
    it = Clock()
    for worker in seen:
        for kind in (EventKind.ARRIVES, EventKind.GRACE_ENDS, EventKind.JOINS):
            it.schedule(ScheduledEvent(9.0 - worker - kind, kind, worker, worker))
        it.next()
    return it


RULES: dict[str, Callable[[], Rule]] = {
    "Nesterov": lambda: NesterovMomentum(0.7, 0.9, 3),
    "Adam": lambda: OuterAdam(0.7, 0.9, 3),
    "buffered": lambda: BufferedNesterov(0.7, 0.9, 4),
    "delayed": lambda: DelayedNesterov(0.7, 0.9, 4),
    "directions": lambda: DirectionAveraging(0.7, 0.9, 4, [2, 3]),
    "buffers": lambda: WorkerBuffers(BufferedNesterov(0.7, 0.9, 4), 3, 3, True),
    "buffers of worker 0": lambda: WorkerBuffers(DelayedNesterov(0.7, 0.9, 4), 3, 3, False),
    "fragments": partial(fragmented, 5),
    "accumulation": lambda: HybridAccumulation(torch.optim.Adam([torch.zeros(5)]), 4),
    "accumulation of partial steps": lambda: HybridAccumulation(SGD([torch.zeros(5)]), 4, partial_steps=True),
}
NOT_KEPT = {  # what another object begins anew with, or finds out
    ParameterServer: {"_restarted", "_heard_since"},
    LocalStepPlan: {"awaited"},
    Shares: {"begun"},
    Upstream: {"joined", "_sent_at", "coordinator"},
    AdaScaleRule: {"accumulation", "learning_rate", "rate"},
    # the parameters, which the server's state has, and how the run before made its rounds
    HybridAccumulation: {"_hidden", "_pieces", "_tensors", "_has_gradients", "_left"},
}


# these write to no tensor of a state; torch's optimizers take a state's tensors as they are
READ_ONLY = {"look-ahead", "upstream", "error feedback", "buffers", "buffers of worker 0", "accumulation"}


def spoil(value: Any, tensors: bool) -> None:
    if isinstance(value, dict | list | deque):
        for each in list(value.values() if isinstance(value, dict) else value):
            spoil(each, tensors)
        value.clear()
    elif isinstance(value, Tensor) and tensors:
        value.zero_()


MAKERS: dict[str, Callable[..., Any]] = {
    "look-ahead": look_ahead,
    "near arrivals": near_arrivals,
    "shares": partial(shares, divided=True),
    "grace": lambda seen: grace(seen, lambda: GracePeriod(2.0, PLAN)),
    "quorum": quorum,
    "compressed changes": changes,
    "compressed starts": starts,
    "plan": planned,
    "region": region,
    "upstream": upstream,
    "norm gate": gate,
    "error feedback": feedback,
    "gains": gains,
    "AdaScale": adascale,
    "clock": clock,
    "parameter server": partial(pushed, in_fragments=False),
    "parameter server of fragments": partial(pushed, in_fragments=True),
} | {name: partial(trained, make=make) for name, make in RULES.items()}


@pytest.mark.parametrize(("seen", "past"), [(WORKERS, ()), ((0, 1), (2, 1, 0))], ids=["new", "of another past"])
@pytest.mark.parametrize("name", MAKERS)
def test_an_object_that_goes_on_from_a_state_is_the_one_before_and_has_nothing_in_common_with_it(
    name: str, seen: Collection[int], past: Collection[int]
) -> None:
    make = MAKERS[name]
    first, second, skipped = make(seen), make(past), NOT_KEPT.get(type(make(())), set())
    given = first.state_dict()
    assert state(first) != state(second)
    second.load_state_dict(given)
    left, right = ({key: state(each) for key, each in vars(it).items() if key not in skipped} for it in (first, second))
    assert right == left
    spoil(given, tensors=name not in READ_ONLY)
    assert {key: state(each) for key, each in vars(second).items() if key not in skipped} == right


def coordinator(seen: Collection[int]) -> Coordinator:
    """It measures how far ahead workers start, and divides micro-batches; with three workers the run has ended."""
    parameters = torch.zeros(1)
    spec, plan = sgd_spec(workers=3, look_ahead=None, micro_batches=4), EpochPlan(Constant(), max_epoch=9)
    rule = HybridAccumulation(SGD([parameters], lr=1.0), 1)
    run = Driven(build_coordinator(spec, rule, plan, parameters, Membership(3, 0.0)), 3)
    for number in range(4):
        for worker in seen:
            run.push(worker, 1.0, 10.0 * number + worker + 1.0, Report(epochs=0.25, position={"at": number}), number)
    if seen:
        run.coordinator.follow(0, ScheduleEvent("a", "end_epoch", 3, 0.5))
        run.coordinator.merge(Region(torch.zeros(1), merge=0.5), torch.tensor([9.0]))
        run.coordinator.look_ahead.follow(run.version, run.coordinator.server.parameters)
    if len(seen) == 3:
        run.coordinator.end(50.0)
    return run.coordinator


@pytest.mark.parametrize(("seen", "past"), [(WORKERS, ()), ((0, 1), (2, 1)), ((), (0, 1))])
def test_a_coordinator_that_goes_on_from_a_state_is_the_one_before(
    seen: Collection[int], past: Collection[int]
) -> None:
    first, second = coordinator(seen), coordinator(past)
    second.load_state_dict(copy.deepcopy(first.state_dict() | first.state_for_waiting_workers()))
    left, right = (state(it.state_dict() | it.state_for_waiting_workers()) for it in (first, second))
    assert right == left and second.finished == first.finished == (len(seen) == 3)


@pytest.mark.parametrize("taken", range(6))
@pytest.mark.parametrize("name", [name for name in RULES if not name.startswith("accumulation")])
def test_a_rule_that_goes_back_to_a_state_steps_as_the_one_before(name: str, taken: int) -> None:
    """At each place in a round; the other one has come to another place in its own."""
    first, second, deltas = RULES[name](), RULES[name](), torch.randn(9, 5, generator=torch.Generator().manual_seed(2))
    for rule, count in ((first, taken), (second, 3)):
        for number in range(count):
            take(rule, torch.zeros(5), number % 3, number, deltas[number] * (1 if rule is first else 7))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    left, right = torch.zeros(5), torch.zeros(5)
    for number in range(taken, 9):
        for rule, parameters in ((first, left), (second, right)):
            take(rule, parameters, number % 3, number, deltas[number].clone())
        assert torch.equal(left, right)
