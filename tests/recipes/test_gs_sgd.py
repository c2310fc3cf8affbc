"""gs-SGD in the simulator: by hand, and beside synchronous training."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Update
from recipes.rules.count_sketch import CountSketch
from recipes.rules.gs_sgd import GsSGD
from tests.helpers.simulations import run

SYNCHRONOUS = {"method": "hybrid_async", "barrier": True}
WIDE = CountSketch(rows=5, columns=1 << 12, seed=3)  # so few values never meet in it


def gs_sgd(parameters: Tensor, keep: int, candidates: int, sketch: CountSketch = WIDE) -> GsSGD:
    """Two workers, and SGD with a learning rate of 1."""
    accumulation = HybridAccumulation(torch.optim.SGD([parameters], 1.0), 1)
    return GsSGD(accumulation, 2, sketch, keep, candidates)


def round_of(rule: GsSGD, parameters: Tensor, *gradients: Tensor) -> None:
    steps = [rule.apply(parameters, Update(w, 0, 0, 7.0, gradient)) for w, gradient in enumerate(gradients)]
    assert steps == [0.0] * (len(gradients) - 1) + [1.0]


def residuals(rule: GsSGD) -> list[list[float]]:
    return [carried.tolist() for carried in rule.state_dict()["carried"].values()]


def test_the_largest_sums_are_the_step_and_the_rest_waits_on_its_worker() -> None:
    """Value 0 is the largest of each worker, but 1 of their sum; 3 was never asked for."""
    parameters = torch.zeros(4)
    rule = gs_sgd(parameters, keep=1, candidates=2)
    round_of(rule, parameters, torch.tensor([3.0, 1.0, 0.0, 0.0]), torch.tensor([-2.0, 1.5, 0.0, 0.5]))
    assert parameters.tolist() == [0.0, -1.25, 0.0, 0.0]
    assert residuals(rule) == [[3.0, 0.0, 0.0, 0.0], [-2.0, 0.0, 0.0, 0.5]]
    round_of(rule, parameters, torch.zeros(4), torch.zeros(4))
    assert parameters.tolist() == [-0.5, -1.25, 0.0, 0.0]
    assert residuals(rule) == [[0.0] * 4, [0.0, 0.0, 0.0, 0.5]]


def test_what_was_stepped_with_and_the_residuals_are_all_gradients() -> None:
    """Also where the sketch is so narrow that it finds hardly anything."""
    parameters, generator = torch.zeros(100), torch.Generator().manual_seed(1)
    rule = gs_sgd(parameters, keep=5, candidates=2, sketch=CountSketch(rows=3, columns=8))
    given = torch.randn(6, 2, 100, generator=generator)
    for gradients in given:
        round_of(rule, parameters, *gradients)
    left = torch.tensor(residuals(rule)).sum(0)
    assert torch.count_nonzero(parameters) >= 5
    assert torch.allclose(-2 * parameters + left, given.sum((0, 1)), atol=1e-5)


def test_where_every_value_is_kept_it_is_synchronous_training(tmp_path: Path) -> None:
    plain, _ = run(tmp_path, SYNCHRONOUS)
    all_of_it, _ = run(tmp_path, {"method": "gs_sgd", "columns": 64, "keep": plain.model.layout.size})
    assert torch.allclose(plain.parameters, all_of_it.parameters, atol=1e-6)


def test_both_rounds_take_time_and_bytes(tmp_path: Path) -> None:
    """A millisecond a byte: parameters, places and values before a second of computing, the sketch after it."""
    cluster = {"workers": 2, "seconds_per_step": 1.0, "exchange": {"seconds_per_byte": 0.001}}
    trial, log = run(tmp_path, {"method": "gs_sgd", "rows": 3, "columns": 10, "keep": 4}, cluster=cluster)
    parameters, (time, _, report) = 4 * trial.model.layout.size, log.events[0]
    sketch, asked = 32 + 16 + 4 * 3 * 10, 32 + 4 * 4 * 4
    assert (report.bytes_sent, report.bytes_received) == (sketch + asked, parameters + asked)
    assert time == pytest.approx(1 + 0.001 * (parameters + asked + asked + sketch))
