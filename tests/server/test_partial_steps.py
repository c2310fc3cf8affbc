"""Parts of steps in the schedule, in the run's end and in what a restart keeps."""

import pytest
import torch

from fairseq_async.algorithms import Update
from fairseq_async.options.config import HybridOptions
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule
from fairseq_async.server.plan import EpochPlan


class Recorded:
    """A schedule that keeps what it was told."""

    learning_rate = 0.5

    def __init__(self) -> None:
        self.followed: list[int] = []

    def follow(self, steps: int) -> None:
        self.followed.append(steps)

    def begin_epoch(self, epoch: int) -> None: ...

    def end_epoch(self, epoch: int, loss: float | None) -> None: ...

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def rule_of(workers: int) -> tuple[ScheduledRule, Recorded, torch.Tensor]:
    parameters, schedule = torch.zeros(1), Recorded()
    optimizer = torch.optim.SGD([parameters], lr=1.0)
    return ScheduledRule(optimizer, workers, schedule, partial_steps=True), schedule, parameters


def step(rule: ScheduledRule, parameters: torch.Tensor, gradients: int) -> float:
    rule.limit_round(gradients)
    return sum(rule.apply(parameters, Update(0, 0, 0, 1.0, torch.ones(1))) for _ in range(gradients))


@pytest.mark.parametrize(("shares", "steps"), [("equal", 1.0), ("auto", 0.5)])
def test_gradients_are_counted_by_their_micro_batches_where_shares_are_by_speed(shares: str, steps: float) -> None:
    """Of the eight of two workers there are four; where they are equal, no worker says how many it has."""
    optimizer = torch.optim.SGD([parameters := torch.zeros(1)], lr=1.0)
    options = HybridOptions(micro_batches=4, shares=shares)  # type: ignore[arg-type]
    rule = ScheduledRule.of(options, 2, optimizer, Recorded())
    for worker in (0, 1):
        sent = {"micro_batches": 2} if shares == "auto" else {}
        rule.apply(parameters, Update(worker, 0, 0, 1.0, torch.ones(1), **sent))
    assert rule.steps == steps


def test_the_schedule_goes_on_when_parts_make_a_whole_step() -> None:
    """Three thirds are one, whatever their sum is in binary."""
    rule, schedule, parameters = rule_of(3)
    for _ in range(3):
        step(rule, parameters, 1)
    step(rule, parameters, 2)
    step(rule, parameters, 3)
    assert schedule.followed == [0, 0, 0, 1, 1, 2] and rule.steps == pytest.approx(1 + 2 / 3 + 1)


def test_a_run_ends_after_so_many_whole_steps() -> None:
    rule, _, parameters = rule_of(10)
    plan = EpochPlan(rule, max_epoch=0, total_steps=1)
    for _ in range(10):
        assert not plan.finished
        step(rule, parameters, 1)
    assert rule.steps < 1.0, "ten tenths, in binary"
    assert plan.finished and plan.assign(0).total_progress == pytest.approx(1.0)


def test_a_restart_goes_on_in_the_middle_of_a_step() -> None:
    rule, _, parameters = rule_of(4)
    step(rule, parameters, 3)
    again, schedule, parameters = rule_of(4)
    again.load_state_dict(rule.state_dict())
    step(again, parameters, 1)
    assert again.steps == 1.0 and schedule.followed == [0, 0, 1]


class Rate(Recorded):
    """Sets ``first`` / (1 + steps)."""

    def __init__(self, optimizer: torch.optim.Optimizer, first: float) -> None:
        super().__init__()
        self.optimizer, self.first = optimizer, first

    def follow(self, steps: int) -> None:
        self.optimizer.param_groups[0]["lr"] = self.first / (1 + steps)


def test_the_first_step_after_a_reset_of_the_schedule_has_the_new_schedules_rate() -> None:
    """The saved optimizer has the old rate, 8 / (1 + 1) = 4; the new schedule has 2 / (1 + 1) = 1."""
    rules = []
    for first in (8.0, 2.0):
        parameters = torch.zeros(1)
        optimizer = torch.optim.SGD([parameters], lr=1.0)
        rule = ScheduledRule(optimizer, 1, Rate(optimizer, first))
        rules.append((rule, optimizer, parameters))
    (before, _, moved), (after, optimizer, parameters) = rules
    step(before, moved, 1)
    after.load_state_dict(before.state_dict() | {"schedule": None})
    assert optimizer.param_groups[0]["lr"] == 1.0
    step(after, parameters, 1)
    assert parameters.tolist() == [-1.0]
