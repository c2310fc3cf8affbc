"""One simulated worker is plain training, with whatever the experiment says of optimizer, clipping and schedule."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.algorithms import AdaScaleGain, HybridAccumulation, Update
from fairseq_async.protocol import Assignment
from fairseq_async.simulation.experiment import ScheduleOptions
from fairseq_async.simulation.problems.gaussians import Gaussians
from fairseq_async.simulation.rules import AdaScaleRule
from fairseq_async.simulation.schedule import LearningRate
from fairseq_async.simulation.simulate import Simulator
from fairseq_async.worker.shards import ShardOrder
from tests.helpers.simulations import Log, tiny_experiment, tiny_trial

ALONE = {
    "local SGD": {"method": "local_sgd", "outer": "sgd", "outer_lr": 1.0, "local_steps": 1},
    "hybrid": {"method": "hybrid_async"},
}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": (
        {"type": "sgd", "lr": 0.3, "momentum": 0.8, "weight_decay": 0.2},
        lambda tensors: torch.optim.SGD(tensors, 0.3, momentum=0.8, weight_decay=0.2),
    ),
    "adam": (
        {"type": "adam", "lr": 0.1, "betas": [0.5, 0.7], "weight_decay": 0.2},
        lambda tensors: torch.optim.Adam(tensors, 0.1, betas=(0.5, 0.7), weight_decay=0.2),
    ),
    "adamw, clipped": (
        {"type": "adamw", "lr": 0.1, "weight_decay": 0.2, "clip_norm": 0.3},
        lambda tensors: torch.optim.AdamW(tensors, 0.1, weight_decay=0.2),
    ),
    "sgd, clipped": ({"type": "sgd", "lr": 0.3, "clip_norm": 0.3}, lambda tensors: torch.optim.SGD(tensors, 0.3)),
}
SCHEDULES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constant": ({}, [1.0] * 6),
    "warmup": ({"warmup": 2}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    "inverse_sqrt": (
        {"type": "inverse_sqrt", "warmup": 2},
        [0.5, 1.0, math.sqrt(2 / 3), math.sqrt(2 / 4), math.sqrt(2 / 5), math.sqrt(2 / 6)],
    ),
    "cosine": (
        {"type": "cosine", "warmup": 2, "minimum": 0.2},
        [0.5, 1.0] + [0.2 + 0.4 * (1 + math.cos(math.pi * step / 4)) for step in range(1, 4)],
    ),
}
SCHEDULES["cosine"][1].insert(2, 1.0)  # warm at 1.0, from which it falls


def plain(make: Any, rates: list[float], clip_norm: float) -> torch.Tensor:
    """Six steps of plain training."""
    torch.manual_seed(1)
    problem = Gaussians(1, torch.device("cpu"), samples=64, hidden=2)
    order, optimizer = ShardOrder([64], seed=1), make(problem.model.parameters())
    base = optimizer.param_groups[0]["lr"]
    for step, rate in enumerate(rates):
        optimizer.zero_grad()
        problem.loss(problem.batch(order.indices(0, 2 * step, 2)))[0].backward()
        if clip_norm:
            assert torch.nn.utils.clip_grad_norm_(problem.model.parameters(), clip_norm) > clip_norm
        optimizer.param_groups[0]["lr"] = base * rate
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in problem.model.parameters()])


@pytest.mark.parametrize("method", ALONE.values(), ids=ALONE.keys())
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_one_worker_is_plain_training(
    tmp_path: Path, method: dict[str, Any], schedule: tuple[dict[str, Any], list[float]], optimizer: tuple[Any, Any]
) -> None:
    given = {"optimizer": optimizer[0], "schedule": schedule[0], "cluster": {"workers": 1}}
    simulated = tiny_trial(tmp_path, method, Log(), **given)
    while simulated.advance():
        pass
    expected = plain(optimizer[1], schedule[1], optimizer[0].get("clip_norm", 0.0))
    torch.testing.assert_close(simulated.parameters, expected, rtol=1e-4, atol=1e-5)
    assert simulated.tokens == 6 * 2, "samples of all batches"


def test_the_schedule_of_plain_asynchronous_sgd_counts_the_mean_steps_of_the_workers(tmp_path: Path) -> None:
    """Two workers, a step of each gradient: the n-th step is n/2 of a worker's."""
    log = Log()
    simulated = tiny_trial(
        tmp_path, {"method": "hybrid_async", "updates_per_step": 1}, log,
        cluster={"workers": 2, "seconds_per_step": [1.0, 1.5]},
        optimizer={"type": "sgd", "lr": 1.0}, schedule={"type": "cosine"},
    )  # fmt: skip
    number = 0
    while True:
        deltas, before = [worker.delta.clone() for worker in simulated.workers], simulated.parameters.clone()
        if not simulated.advance():
            break
        if len(log.events) > number:
            rate = 0.5 * (1 + math.cos(math.pi * number / 2 / 6))
            change, delta = simulated.parameters - before, deltas[log.events[-1][1].worker]
            torch.testing.assert_close(change, -rate * delta, rtol=1e-4, atol=1e-6)
            number += 1
    assert number == 12


def test_the_rate_of_a_local_step_is_that_of_the_runs_progress(tmp_path: Path) -> None:
    """From 10 on, and 2.5 with each step: of a worker whose shard is small, or who is slow."""
    simulated, asked = tiny_trial(tmp_path, ALONE["local SGD"], Log(), cluster={"workers": 1}), list[float]()
    work = Assignment(local_steps=3, shard=0, progress=10.0, progress_per_step=2.5)

    def rate(progress: float) -> float:
        asked.append(progress)
        return 0.1

    simulated.model.local_steps(simulated.workers[0], simulated.parameters, work, rate, 0.0)  # type: ignore[arg-type]
    assert asked == [10.0, 12.5, 15.0]


def test_a_warm_up_never_goes_beyond_the_peak() -> None:
    """Between two steps, where a worker with a small shard may be."""
    rate = LearningRate(ScheduleOptions(warmup=1), lr=0.5, steps=10)
    assert [rate(progress) for progress in (0.0, 0.4, 0.999, 1.0)] == [0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("method", ALONE.values(), ids=ALONE.keys())
def test_rounding_noise_is_of_the_experiments_seed(tmp_path: Path, method: dict[str, Any]) -> None:
    alone = {"cluster": {"workers": 1}}
    seeds = [tiny_trial(tmp_path, method, Log(), seed=seed, **alone).spec.options["seed"] for seed in (1, 2)]
    assert seeds == [1, 2]


def test_adascale_weighs_the_norms_of_batches_by_their_tokens() -> None:
    """Of 3 and 1 tokens: (2/4)·(3·|g₁|² + |g₂|²), and the norm of the mean per token."""
    parameters, (first, second) = torch.zeros(2), (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0]))
    accumulation = HybridAccumulation(torch.optim.SGD([parameters], lr=0.1), 2)
    rule = AdaScaleRule(accumulation, LearningRate(ScheduleOptions(), lr=0.1, steps=10), smoothing=0.0)
    for weight, delta in ((3.0, first), (1.0, second)):
        rule.apply(parameters, Update(0, 0, 0, weight, delta))
    mean = (3 * first + second) / 4
    assert rule.last_gain == pytest.approx(AdaScaleGain(2, 0.0).update([1.5 * 5, 0.5 * 9], float(mean.square().sum())))


def test_a_round_of_fewer_ranks_has_the_gain_of_so_many() -> None:
    """As where some are dead; afterwards it is that of all again."""
    generator, gains = torch.Generator().manual_seed(0), list[float]()
    parameters, alone = torch.zeros(8), AdaScaleGain(4, 0.0)
    accumulation = HybridAccumulation(torch.optim.SGD([parameters], lr=0.1), 4)
    rule = AdaScaleRule(accumulation, LearningRate(ScheduleOptions(), lr=0.1, steps=10), smoothing=0.0)
    for ranks in (4, 2, 3, 4):
        deltas = 1.0 + torch.randn(ranks, 8, generator=generator)
        rule.limit_round(ranks)
        for delta in deltas:
            rule.apply(parameters, Update(0, 0, 0, 1.0, delta))
        alone.scale = ranks
        mean = float(deltas.mean(0).square().sum())
        assert rule.last_gain == pytest.approx(alone.update(deltas.square().sum(1).tolist(), mean), rel=1e-5)
        gains.append(rule.last_gain)
    assert gains[0] == 1.0 < min(gains[1:]), "it shows nothing otherwise"


def test_pretraining_has_its_own_learning_rate_or_that_of_the_optimizer(tmp_path: Path) -> None:
    """A step of plain SGD goes twice as far at twice the rate; the optimizer's is 0.1."""

    def start(name: str, **changes: Any) -> torch.Tensor:
        sgd = {"type": "sgd", "lr": 0.1}
        given = tiny_experiment(tmp_path, ALONE["hybrid"], cluster={"workers": 1}, optimizer=sgd, steps=1, **changes)
        Simulator(given, tmp_path / name, resume=False).run()
        found: torch.Tensor = torch.load(tmp_path / name / "start.pt", weights_only=True)
        return found

    before = start("none")
    usual = start("usual", pretraining={"steps": 1}) - before
    twice = start("twice", pretraining={"steps": 1, "lr": 0.2}) - before
    warming = start("warming", pretraining={"steps": 1}, schedule={"warmup": 2}) - before
    assert usual.norm() > 1e-3
    torch.testing.assert_close(twice, 2 * usual, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(warming, usual / 2, rtol=1e-4, atol=1e-6)


def test_pretraining_sees_the_whole_data_set_however_many_workers_follow(tmp_path: Path) -> None:
    starts = []
    for workers in (1, 4):
        cluster = {"workers": workers}
        given = tiny_experiment(tmp_path, ALONE["hybrid"], cluster=cluster, steps=1, pretraining={"steps": 9})
        Simulator(given, tmp_path / str(workers), resume=False).run()
        starts.append(torch.load(tmp_path / str(workers) / "start.pt", weights_only=True))
    assert torch.equal(*starts)


@pytest.mark.parametrize("smoothing", [None, 0.5])
def test_adascales_gain_is_that_of_the_ranks_gradients(tmp_path: Path, smoothing: float | None) -> None:
    log, options = Log(), {} if smoothing is None else {"smoothing": smoothing}
    simulated = tiny_trial(tmp_path, {"method": "adascale", "optimizer": {"type": "sgd", "lr": 0.1}} | options, log,
                      optimizer={"type": "sgd", "lr": 0.1}, cluster={"workers": 2})  # fmt: skip
    expected, gains = AdaScaleGain(2, smoothing), []
    while True:
        deltas, seen = [worker.delta.double() for worker in simulated.workers], len(log.events)
        if not simulated.advance():
            break
        if len(log.events) > seen:
            mean = (deltas[0] + deltas[1]) / 2
            gains.append(expected.update([float(d.square().sum()) for d in deltas], float(mean.square().sum())))
            assert log.extra[-1]["gain"] == pytest.approx(gains[-1], rel=1e-5)
    assert len(gains) > 2 and max(gains) > 1.05 and expected.scale_invariant_steps >= 6


@pytest.mark.parametrize(
    ("given", "progress", "rate"),
    [
        ({"type": "inverse_sqrt"}, 0.0, 1.0),
        ({"type": "inverse_sqrt"}, 3.0, 0.5),
        ({"type": "cosine", "warmup": 4}, 4.0, 1.0),
        ({"type": "cosine"}, 2.0, 0.5),
    ],
)
def test_a_schedule_may_have_no_warm_up_or_nothing_else(given: dict[str, Any], progress: float, rate: float) -> None:
    schedule = LearningRate(ScheduleOptions.model_validate(given), lr=1.0, steps=4)
    assert schedule(progress) == pytest.approx(rate)
