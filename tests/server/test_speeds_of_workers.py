"""How many local steps a worker is told to take, by the speeds of those who are there; and on which shard."""

from typing import Any

import torch

from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options.config import DelayedNesterovOptions
from fairseq_async.protocol import Report
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.programs import local_sgd_main as outer
from tests.helpers.local_sgd_workers import LAYOUT


def plan(**changes: Any) -> LocalStepPlan:
    """Of two workers, 12 steps of the faster a round."""
    options = DelayedNesterovOptions(local_steps=12, dynamic_local_steps=True, **changes)
    return outer.build(local_sgd_spec(options, 2, [100, 100], None, {}), LAYOUT, torch.zeros(3))[1]


def report(seconds: float) -> Report:
    return Report(local_steps=1, step_seconds=seconds)


def test_the_speed_of_a_worker_that_is_gone_counts_no_more_until_it_is_back() -> None:
    rounds = plan()
    rounds.record(0, report(0.1))
    rounds.record(1, report(0.3))
    assert rounds.assign(1).local_steps == 4
    rounds.release(0)
    assert rounds.assign(1).local_steps == 12
    assert rounds.assign(0).local_steps == 12 and rounds.assign(1).local_steps == 4


def test_a_speed_is_the_mean_of_the_last_round_and_of_what_it_was() -> None:
    """10 a second, then 10/3: 20/3, which is 2/3 of the other's 10."""
    rounds = plan()
    for seconds in (0.1, 0.3):
        rounds.record(0, report(0.1))
        rounds.record(1, report(seconds))
    assert rounds.assign(1).local_steps == 8


def test_the_choice_of_shards_follows_the_seed() -> None:
    def drawn(seed: int) -> list[int | None]:
        rounds, shards = plan(seed=seed), list[int | None]()
        for _ in range(40):
            shards.append(rounds.assign(0).shard)
            rounds.record(0, report(0.1))
            shards.append(rounds.assign(1).shard)
            rounds.record(1, report(0.1))
        return shards

    assert drawn(1) == drawn(1) != drawn(2)
