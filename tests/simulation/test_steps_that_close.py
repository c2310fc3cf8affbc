"""Hybrid's steps that close when nobody is near, and look-ahead, on simulated machines."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from tests.helpers.simulations import METHODS, run

AUTO: dict[str, Any] = {"method": "hybrid_async"}
FIXED = {"method": "hybrid_async", "updates_per_step": 4, "look_ahead": "off"}
NOISY = {"distribution": "lognormal", "mean": 1.0, "spread": 0.1}


def cluster(*seconds: float | dict[str, Any]) -> dict[str, Any]:
    return {"cluster": {"workers": len(seconds), "seconds_per_step": list(seconds)}}


def test_equal_workers_are_a_synchronous_run_to_the_bit(tmp_path: Path) -> None:
    ours, log = run(tmp_path, AUTO, **cluster(1.0, 1.0, 1.0, 1.0))
    theirs, _ = run(tmp_path, METHODS["synchronous"], **cluster(1.0, 1.0, 1.0, 1.0))
    assert torch.equal(ours.parameters, theirs.parameters) and ours.clock.now == theirs.clock.now
    assert all(receipt.staleness == 0 for _, receipt, _ in log.events)


def test_a_fixed_number_with_a_look_ahead_of_zero_is_the_papers_method_to_the_bit(tmp_path: Path) -> None:
    unequal = cluster(1.0, 1.0, 2.0, 4.0)
    ours, _ = run(tmp_path, FIXED | {"look_ahead": 0}, **unequal)
    theirs, _ = run(tmp_path, FIXED, **unequal)
    ahead, _ = run(tmp_path, FIXED | {"look_ahead": "auto"}, **unequal)
    assert torch.equal(ours.parameters, theirs.parameters) and not torch.equal(ahead.parameters, theirs.parameters)


def test_fast_workers_step_together_and_never_wait_for_a_slow_one(tmp_path: Path) -> None:
    """The first step waits half a second for the slow one, of which nothing is known. It comes half a second before the
    second step, waits, and is there at every other step from then on."""
    _, log = run(tmp_path, AUTO, **cluster(1.0, 1.0, 1.0, 2.0))
    assert [log.of(worker)[:4] for worker in (0, 1, 2)] == [[1.5, 2.5, 3.5, 4.5]] * 3
    assert log.of(3)[:3] == [2.5, 4.5, 6.5]
    assert {receipt.staleness for _, receipt, _ in log.events if receipt.worker < 3} == {0}
    late = [(receipt.staleness, report.look_ahead) for _, receipt, report in log.events if receipt.worker == 3]
    assert late[:2] == [(1, None), (1, 1.0)], "its staleness, before anything is measured"
    assert all(staleness == 1 and ahead is not None and 0 < ahead <= 2 for staleness, ahead in late[2:])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_equal_workers_with_noise_stay_in_step(tmp_path: Path, seed: int) -> None:
    trial, log = run(tmp_path, AUTO, seed=seed, steps=60, **cluster(NOISY, NOISY, NOISY, NOISY))
    assert fmean(receipt.staleness for _, receipt, _ in log.events) <= 0.1
    assert len(log.events) / trial.server.version > 3.8


def test_equal_workers_that_begin_apart_come_together(tmp_path: Path) -> None:
    """The second one is 0.7 s behind: it waits once, for 0.3 s."""
    apart = {"workers": 2, "seconds_per_step": 1.0, "absences": [{"worker": 1, "from": 0, "to": 0.7}]}
    _, log = run(tmp_path, AUTO, cluster=apart)
    assert log.of(0)[:4] == [1.0, 2.0, 3.0, 4.0] and log.of(1)[:3] == [2.0, 3.0, 4.0]


def test_a_run_ends_after_its_gradients_however_many_are_in_a_step(tmp_path: Path) -> None:
    trial, log = run(tmp_path, AUTO, **cluster(1.0, 1.0, 2.0, 4.0))
    gradients = 4 * 12
    assert gradients <= len(log.events) < gradients + 4 and trial.finished
