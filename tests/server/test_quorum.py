"""Rounds of a quorum with grace, for direction averaging: worked out by hand."""

import pytest
import torch

from fairseq_async.errors import ConfigurationError
from fairseq_async.method import methods
from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions
from fairseq_async.protocol import Layout
from fairseq_async.server.coordinator import build_coordinator
from fairseq_async.server.membership import Membership
from fairseq_async.server.outcome import Outcome
from fairseq_async.server.programs import local_sgd_main
from tests.helpers.driven import Driven

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
