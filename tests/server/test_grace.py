"""How long an update waits for others, by the speeds of those who are at work."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fairseq_async.errors import ConfigurationError
from fairseq_async.method import methods
from fairseq_async.method.spec import MethodSpec, ServerSettings, local_sgd_spec
from fairseq_async.options.config import DelayedNesterovOptions, LocalSGDOptions
from fairseq_async.protocol import Hello, Initialise, Layout, Push, PushReply, Report, Welcome
from fairseq_async.protocol.receipt import Status
from fairseq_async.server.build import build_coordinator
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.membership import Membership
from fairseq_async.server.outcome import Outcome
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.server.programs import local_sgd_main as outer
from fairseq_async.server.rounds.grace import GracePeriod
from tests.helpers import in_process
from tests.helpers.driven import Driven
from tests.helpers.in_process import Connection
from tests.helpers.stand_ins import Clock


def at_work(**seconds_per_step: float) -> LocalStepPlan:
    """Workers a, b, … are 0, 1, …; each was measured and has 10 steps before it."""
    plan = LocalStepPlan(
        workers=len(seconds_per_step), local_steps=10, total_steps=0, dynamic_local_steps=False, shards=[], seed=1
    )
    for worker, seconds in enumerate(seconds_per_step.values()):
        plan.record(worker, Report(local_steps=10, step_seconds=seconds))
        plan.assign(worker)
    return plan


def begun(grace: GracePeriod, *moments: float) -> GracePeriod:
    for worker, moment in enumerate(moments):
        grace.begin_work(worker, moment)
    return grace


def test_who_comes_within_the_period_is_waited_for_and_who_comes_later_is_not() -> None:
    plan = at_work(a=1.0, b=1.0, c=1.0)
    grace = begun(GracePeriod(2.0, plan), 0.0, 1.9, 2.1)
    assert grace.continues(0, [1, 2], now=10.0) and grace.deadline == 12.0
    assert not grace.continues(1, [2], now=11.9)
    assert grace.deadline == 12.0  # it began with the first
    assert not begun(GracePeriod(2.0, plan), 0.0, 1.9, 2.1).continues(0, [2], now=10.0)


def test_nobody_at_work_nobody_waited_for() -> None:
    assert not begun(GracePeriod(5.0, at_work(a=1.0)), 0.0).continues(0, [], now=10.0)


def test_a_round_without_a_period_waits_for_all() -> None:
    grace = begun(GracePeriod(None, at_work(a=1.0)), 0.0)
    assert grace.continues(0, [], now=10.0) and grace.deadline is None


def test_a_worker_that_was_never_measured_may_come_at_any_time() -> None:
    plan = at_work(a=1.0)
    plan.assign(1)
    assert begun(GracePeriod(0.1, plan), 0.0, 9.9).continues(0, [1], now=10.0)


def test_a_worker_that_was_at_work_before_the_server_was_is_waited_for() -> None:
    """How long its work takes is known, and not since when it is at it."""
    assert begun(GracePeriod(2.0, at_work(a=1.0, b=1.0)), 0.0).continues(0, [1], now=10.0)


def test_who_has_not_begun_is_waited_for_in_the_first_round_only() -> None:
    plan = LocalStepPlan(workers=2, local_steps=10, total_steps=0, dynamic_local_steps=False, shards=[], seed=1)
    plan.assign(0)
    assert begun(GracePeriod(0.1, plan), 0.0).continues(0, [1], now=10.0)
    plan.record(0, Report(local_steps=10, step_seconds=1.0))
    plan.assign(0)
    assert not begun(GracePeriod(0.1, plan), 10.0).continues(0, [1], now=20.0)


@pytest.mark.parametrize(("seconds", "waits"), [(10.0, False), (5.0, True), (20.0, False)])
def test_what_speeds_up_one_may_speed_up_the_others(seconds: float, waits: bool) -> None:
    """Both began together; the second had been slow, and a slow first one does not make it later than it was."""
    for at in (0.0, 70.0):
        grace = begun(GracePeriod(2.0, at_work(a=1.0, b=1.25)), at, at)
        assert grace.continues(0, [1], now=at + seconds) is (waits or seconds > 12.5)


LAYOUT = Layout.of([("w", torch.zeros(3))])


class Worker(Connection):
    """One that says what a worker says."""

    def come(self, worker: int, spec: MethodSpec) -> None:
        self.sequence = 0
        self.introduce(worker)
        self.ask(Hello(spec, LAYOUT, remote=False), Welcome)

    def deliver(self, steps: int, step_seconds: float) -> bool:
        """Whether it is answered at once, and does not wait for others."""
        in_process.slot(self.service, self.peer.id).fill_(0.1)
        report = Report(local_steps=steps, step_seconds=step_seconds)
        self.sequence += 1
        return self.send(Push(self.sequence - 1, 0, 1.0, report))


def test_the_server_waits_for_those_who_are_about_to_come_and_not_for_others(tmp_path: Path) -> None:
    options = DelayedNesterovOptions(local_steps=10, grace_period=2.0, total_steps=1000)
    spec, clock = local_sgd_spec(options, 2, [], None, {}), Clock(100.0)
    spec = replace(spec, server=ServerSettings(worker_timeout=1000.0))
    service = in_process.new_service(2, tmp_path, outer.build, clock)
    one, other = Worker(service), Worker(service)
    try:
        one.come(0, spec)
        one.ask(Initialise(False), Welcome)
        server = in_process.server(service)
        other.come(1, spec)
        clock.now += 10
        assert not one.deliver(10, 1.0)  # they have not been measured
        clock.now += 1.5
        assert other.deliver(10, 1.0) and server.version == 2
        clock.now += 10
        assert not one.deliver(10, 1.0)
        clock.now += 1.75
        assert service.tick() == 0.25, "until the period is over"
        clock.now += 0.75
        service.tick()
        assert server.version == 3 and one.answer(PushReply).status is Status.APPLIED
        assert other.deliver(10, 1.0)  # the first will need 10 seconds
        clock.now += 9
        assert not one.deliver(10, 0.9)
        clock.now += 1
        assert other.deliver(10, 1.0) and server.version == 6
    finally:
        in_process.end(service)
    assert torch.isfinite(server.parameters).all()


pytestmark = pytest.mark.usefixtures("recipe_rules")


def driven(quorum: int, grace: float | None, workers: int = 3) -> Driven:
    """Every update is 1, and a round moves the one parameter by −1."""
    options = {"outer": "direction_averaging", "outer_lr": 1.0, "outer_momentum": 0.0, "local_steps": 4}
    chosen = methods.parse(LocalSGDOptions, options | {"quorum": quorum, "grace_period": grace}, "test")
    spec = local_sgd_spec(chosen, workers, [], None, {})
    parameters = torch.zeros(1)
    rule, plan = local_sgd_main.build(spec, Layout.of([("w", torch.zeros(1))]), parameters)
    membership = Membership(workers, now=0.0)
    return Driven(build_coordinator(spec, rule, plan, parameters, membership), workers)


def answered(outcome: Outcome) -> list[int]:
    return [instruction.worker for instruction in outcome.instructions]


def test_a_round_waits_for_its_quorum_and_then_for_the_grace_period() -> None:
    it = driven(quorum=2, grace=3.0)
    assert answered(it.steps(0, 4, now=4.0)) == [] and it.coordinator.deadline is None
    assert answered(it.tick(now=30.0)) == []
    assert answered(it.steps(1, 4, now=31.0)) == [] and it.coordinator.deadline == 34.0
    assert answered(it.tick(now=33.9)) == []
    assert answered(it.tick(now=34.0)) == [0, 1]
    assert (it.version, it.parameter) == (1, -1.0), "one step of the two"
    assert answered(it.steps(0, 4, now=40.0)) == [] and it.coordinator.deadline is None, "as in the first round"


def test_who_comes_within_the_grace_period_is_in_the_round_and_closes_it() -> None:
    it = driven(quorum=1, grace=3.0)
    it.steps(0, 4, now=4.0)
    it.steps(1, 4, now=5.0)
    assert answered(it.steps(2, 4, now=6.0)) == [0, 1, 2] and (it.version, it.parameter) == (1, -1.0)


def test_without_a_grace_period_the_quorum_steps_at_once() -> None:
    it = driven(quorum=2, grace=None)
    it.steps(0, 4, now=4.0)
    it.steps(1, 4, now=5.0)
    assert answered(it.tick(now=5.0)) == [0, 1] and it.version == 1


def test_fewer_workers_than_the_quorum_wait_for_nobody_who_is_gone() -> None:
    it = driven(quorum=3, grace=1.0)
    it.steps(0, 4, now=4.0)
    it.leave(2, for_good=True, now=5.0)
    assert it.version == 0
    assert answered(it.steps(1, 4, now=6.0)) == [0, 1] and it.version == 1


def test_a_worker_that_dies_while_its_update_is_held_does_not_count_for_the_quorum() -> None:
    it = driven(quorum=2, grace=0.0)
    it.steps(0, 4, now=4.0)
    it.leave(0, for_good=False, now=4.5)
    assert answered(it.steps(1, 4, now=5.0)) == [] and it.version == 0
    it.steps(2, 4, now=6.0)
    assert it.version == 1


def test_a_quorum_of_more_workers_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="quorum is 4: there are only 3 workers; give at most 3"):
        driven(quorum=4, grace=None)
