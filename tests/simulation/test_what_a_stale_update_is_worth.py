"""Simulated runs, update by update, against formulas that know nothing of the server."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.simulations import Log, tiny_trial

CLUSTER = {"workers": 3, "seconds_per_step": [1.0, 1.7, 4.1]}
SUM = {"method": "local_sgd", "outer": "sgd", "outer_lr": 3.0, "local_steps": 1}  # each update is subtracted whole


def steps(tmp_path: Path, **options: Any) -> list[tuple[int, Tensor, Tensor, Tensor, str]]:
    """Of each update: staleness, pseudo-gradient, the parameters before it, the change, what became of it.

    The staleness is counted here: steps since the worker pulled, which it does when it is answered.
    """
    log, found, version = Log(), [], 0
    simulated = tiny_trial(tmp_path, SUM | options, log, cluster=CLUSTER, steps=8)
    pulled: dict[int, int] = {}
    while True:
        deltas = [worker.delta.clone() for worker in simulated.workers]
        before, seen = simulated.parameters.clone(), len(log.events)
        if not simulated.advance():
            return found
        if len(log.events) > seen:
            _, receipt, _ = log.events[-1]
            change = simulated.parameters - before
            staleness = version - pulled.get(receipt.worker, 0)
            assert receipt.staleness == staleness
            found.append((staleness, deltas[receipt.worker], before, change, receipt.status.value))
            version += receipt.status.value == "applied"
            pulled[receipt.worker] = version


def test_stale_updates_weigh_less(tmp_path: Path) -> None:
    found = steps(tmp_path, staleness_power=-0.5)
    assert {staleness for staleness, *_ in found} >= {0, 1, 2, 3}
    for staleness, delta, _, change, _ in found:
        torch.testing.assert_close(change, -delta / (1 + staleness) ** 0.5, rtol=1e-4, atol=1e-6)


def test_updates_above_the_limit_are_dropped_and_their_steps_counted(tmp_path: Path) -> None:
    found = steps(tmp_path, staleness_limit=1)
    dropped = [change for staleness, _, _, change, _ in found if staleness > 1]
    assert dropped and not any(change.any() for change in dropped)
    assert all((status == "stale") == (staleness > 1) for staleness, *_, status in found)
    assert len(found) == 8 * 3


def test_updates_are_compensated_for_what_has_changed_since_they_were_begun(tmp_path: Path) -> None:
    found = steps(tmp_path, delay_compensation=0.5)
    history = [before for _, _, before, _, _ in found]
    for number, (staleness, delta, before, change, _) in enumerate(found):
        then = history[number - staleness]
        torch.testing.assert_close(change, -(delta + 0.5 * delta * delta * (before - then)), rtol=1e-4, atol=1e-6)
    differing = [delta * delta * (before - history[n - s]) for n, (s, delta, before, _, _) in enumerate(found)]
    assert max(float(each.abs().max()) for each in differing) > 1e-4, "there was something to compensate"


@pytest.mark.parametrize("options", [{}, {"staleness_power": -0.5}])
def test_the_option_alone_makes_the_difference(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = [
        torch.allclose(change, -delta, rtol=1e-4, atol=1e-6) for _, delta, _, change, _ in steps(tmp_path, **options)
    ]
    assert all(whole) == (not options)
