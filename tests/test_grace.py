"""How long an update waits for others, by the speeds of those who are at work."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.server import Layout
from fairseq_async.server.grace import Grace
from fairseq_async.server.rounds import Rounds
from fairseq_async.worker import outer
from fairseq_async.worker.config import LocalSGDOptions
from tests.chaos import in_process
from tests.chaos.in_process import Connection


def at_work(**seconds_per_step: float) -> Rounds:
    """Workers a, b, … are 0, 1, …; each was measured and has 10 steps before it."""
    plan = Rounds(workers=len(seconds_per_step), maximum=10, total_steps=0, dynamic=False, shards=[], seed=1)
    for worker, seconds in enumerate(seconds_per_step.values()):
        plan.record(worker, 10, {"local_steps": 10, "step_seconds": seconds})
        plan.assign(worker)
    return plan


def begun(grace: Grace, *moments: float) -> Grace:
    for worker, moment in enumerate(moments):
        grace.begin_work(worker, moment)
    return grace


def test_who_comes_within_the_period_is_waited_for_and_who_comes_later_is_not() -> None:
    plan = at_work(a=1.0, b=1.0, c=1.0)
    grace = begun(Grace(2.0), 0.0, 1.9, 2.1)
    assert grace.goes_on(0, [1, 2], plan, now=10.0) and grace.deadline == 12.0
    assert not grace.goes_on(1, [2], plan, now=11.9)
    assert grace.deadline == 12.0  # it began with the first
    assert not begun(Grace(2.0), 0.0, 1.9, 2.1).goes_on(0, [2], plan, now=10.0)


def test_nobody_at_work_nobody_waited_for() -> None:
    assert not begun(Grace(5.0), 0.0).goes_on(0, [], at_work(a=1.0), now=10.0)


def test_a_round_without_a_period_waits_for_all() -> None:
    grace = begun(Grace(None), 0.0)
    assert grace.goes_on(0, [], at_work(a=1.0), now=10.0) and grace.deadline is None


def test_a_worker_that_was_never_measured_may_come_at_any_time() -> None:
    plan = at_work(a=1.0)
    plan.assign(1)
    assert begun(Grace(0.1), 0.0, 9.9).goes_on(0, [1], plan, now=10.0)


def test_who_has_not_begun_is_waited_for_in_the_first_round_only() -> None:
    plan = Rounds(workers=2, maximum=10, total_steps=0, dynamic=False, shards=[], seed=1)
    plan.assign(0)
    assert begun(Grace(0.1), 0.0).goes_on(0, [1], plan, now=10.0)
    plan.record(0, 10, {"local_steps": 10, "step_seconds": 1.0})
    plan.assign(0)
    assert not begun(Grace(0.1), 10.0).goes_on(0, [1], plan, now=20.0)


@pytest.mark.parametrize(("seconds", "waits"), [(10.0, False), (5.0, True), (20.0, False)])
def test_what_speeds_up_one_may_speed_up_the_others(seconds: float, waits: bool) -> None:
    """Both began together; the second had been slow, and a slow first one does not make it later than it was."""
    assert begun(Grace(2.0), 0.0, 0.0).goes_on(0, [1], at_work(a=1.0, b=1.25), now=seconds) is (waits or seconds > 12.5)


LAYOUT = Layout.of([("w", torch.zeros(3))])


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Worker(Connection):
    """One that says what a worker says."""

    def come(self, worker: int, method: dict[str, Any]) -> None:
        self.sequence = 0
        self.introduce(worker)
        self.ask({"kind": "hello", "layout": LAYOUT.to_json(), "method": method})

    def deliver(self, steps: int, step_seconds: float) -> dict[str, Any] | None:
        """The answer, if it does not wait for others."""
        report = {"local_steps": steps, "step_seconds": step_seconds}
        self.service.job.memory.slot(self.peer.id).fill_(0.1)
        push = {"kind": "push", "sequence": self.sequence, "base_version": 0, "weight": 1.0, "wait": True}
        self.sequence += 1
        return self.ask(push | {"report": report})


def test_the_server_waits_for_those_who_are_about_to_come_and_not_for_others(tmp_path: Path) -> None:
    options = LocalSGDOptions(method="local_sgd", local_steps=10, grace_period=2.0, total_steps=1000)
    method, clock = options.describe(2, []) | {"worker_timeout": 1000.0}, Clock()
    service = in_process.new_service(2, tmp_path, outer.build, clock)
    one, other = Worker(service), Worker(service)
    try:
        one.come(0, method)
        one.ask({"kind": "initialise", "state": None})
        other.come(1, method)
        clock.now += 10
        assert one.deliver(10, 1.0) is None  # they have not been measured
        clock.now += 1.5
        assert other.deliver(10, 1.0) is not None and service.server.version == 2
        clock.now += 10
        assert one.deliver(10, 1.0) is None
        clock.now += 2.5
        service.tick()
        assert service.server.version == 3 and one.channel.said[-1]["status"] == "applied"
        assert other.deliver(10, 1.0) is not None  # the first will need 10 seconds
        clock.now += 9
        assert one.deliver(10, 0.9) is None
        clock.now += 1
        assert other.deliver(10, 1.0) is not None and service.server.version == 6
    finally:
        in_process.end(service)
    assert torch.isfinite(service.server.parameters).all()
