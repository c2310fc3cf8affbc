"""Single runs for AdaScale's claims: with AdaScale, or with a rule that fixes the learning rate beforehand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.collective import AdaScale  # noqa: E402
from scripts.bench.batches import Batches  # noqa: E402

WARM_UP = 1 / 20  # share of a run
POINTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # shares of a run at which the gain is compared with that of many batches
AT_ONCE = 8  # batches in one pass for the gain of many batches


class Optimizer(str, Enum):
    """The optimizer that AdaScale wraps."""

    SGD = "SGD"
    ADAM = "Adam"


class Rule(str, Enum):
    """The factor of the learning rate with S batches in a step instead of one: the gain, S, or √S."""

    ADASCALE = "AdaScale"
    LINEAR = "linear scaling"
    SQUARE_ROOT = "square-root rule"


_MAKE: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    Optimizer.SGD: lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9),
    Optimizer.ADAM: lambda parameters: torch.optim.Adam(parameters, lr=1.0, betas=(0.9, 0.98)),
}


@dataclass(frozen=True)
class Run:
    """The settings of one run.

    Attributes:
        lr: peak learning rate of the run with one batch in a step.
        steps: T, the number of steps of the run with one batch in a step.
        batches: values of S, one after another in equal parts of the scale-invariant steps.
        iterations: number of iterations for a rule other than AdaScale; AdaScale's follows from T and its gains.
        smoothing: θ; None for the paper's.
        reference: number of batches for the gain to compare with, at each of ``POINTS``; 0 for no comparison.
    """

    optimizer: Optimizer
    lr: float
    seed: int
    steps: int
    batches: tuple[int, ...] = (1,)
    rule: Rule = Rule.ADASCALE
    iterations: int = 0
    smoothing: float | None = None
    reference: int = 0

    @property
    def key(self) -> str:
        """A name of the run that no other run has."""
        length = f"{self.steps} steps, {self.iterations} iterations, reference {self.reference}"
        what = f"{self.rule.value}, {self.batches} batches, smoothing {self.smoothing}"
        return f"{self.optimizer.value} {self.lr:g}; {what}; {length}; seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        loss: loss on text that is not trained on, in nats per byte; NaN if the run diverged.
        gains: at each of ``POINTS``, the gain of the next step and that of many batches at the same parameters.
    """

    loss: float
    iterations: int
    gains: list[tuple[float, float]] = field(default_factory=list)


def outcome(run: Run, batches: Batches) -> Outcome:
    """Trains from the initial parameters of ``batches``; returns the result."""
    optimizer = _MAKE[run.optimizer](batches.fresh().parameters())
    return _scaled(run, batches, optimizer) if run.rule is Rule.ADASCALE else _fixed(run, batches, optimizer)


def rate(lr: float, done: float) -> float:
    """Returns the learning rate of all runs, a warm-up and a cosine; ``done`` is the share of the run that is over."""
    return lr * min(1.0, done / WARM_UP + 1e-3) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def _scaled(run: Run, batches: Batches, optimizer: torch.optim.Optimizer) -> Outcome:
    adascale = AdaScale(optimizer, scale=1, smoothing=run.smoothing)
    used, gains = 0, list[tuple[float, float]]()
    while (done := adascale.scale_invariant_steps / run.steps) < 1:
        count = run.batches[int(done * len(run.batches))]
        adascale.set_scale(count, count)
        if run.reference and len(gains) < len(POINTS) and done >= POINTS[len(gains)]:
            first = -(len(gains) + 1) * run.reference  # no run trains on batches below 0
            numbers = range(first, first + run.reference)
            gains.append((adascale.gains.whole.gain, gain_of_many(gradients(batches, numbers, optimizer), count)))
        optimizer.param_groups[0]["lr"] = rate(run.lr, int(adascale.scale_invariant_steps) / run.steps)
        if not _accumulate(batches, range(used, used + count)):
            return Outcome(math.nan, adascale.steps, gains)
        used += count
        adascale.step()
        adascale.zero_grad()
    adascale.close()
    return Outcome(batches.score(), adascale.steps, gains)


def _accumulate(batches: Batches, numbers: range) -> bool:
    """Adds up the mean gradient of these batches, one pass for each; returns False if the run has diverged."""
    for number in numbers:
        loss = batches.loss(number) / len(numbers)
        if not math.isfinite(float(loss.detach())):
            return False
        loss.backward()
    return True


def _fixed(run: Run, batches: Batches, optimizer: torch.optim.Optimizer) -> Outcome:
    """Trains with a fixed rule; one pass computes a step's mean gradient, since single gradients are not measured."""
    count = run.batches[0]
    factor = count if run.rule is Rule.LINEAR else math.sqrt(count)
    for step in range(run.iterations):
        optimizer.param_groups[0]["lr"] = factor * rate(run.lr, step / run.iterations)
        optimizer.zero_grad()
        loss = batches.loss(*range(step * count, (step + 1) * count))
        if not math.isfinite(float(loss.detach())):
            return Outcome(math.nan, step)
        loss.backward()
        optimizer.step()
    return Outcome(batches.score(), run.iterations)


def gain_of_many(means: Iterable[Tensor], scale: float, each: int = AT_ONCE) -> float:
    """Returns the gain r from means of many batches, in float64 (Johnson et al. 2020, arXiv 2007.05105, unsmoothed).

    Args:
        means: at least two gradients, each the mean of ``each`` single batches, of shape [elements].
        scale: S.
    """
    number, squares, total = 0, 0.0, torch.zeros(1, dtype=torch.float64)
    for mean in means:
        number, squares, total = number + 1, squares + float(mean.double().square().sum()), total + mean.double()
    square = float((total / number).square().sum())
    variance = each * (squares - number * square) / (number - 1)
    square_mean = max(square - variance / (each * number), 0.0)
    return (variance + square_mean) / (variance / scale + square_mean)


def gradients(batches: Batches, numbers: range, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields mean gradients of ``AT_ONCE`` batches, as AdaScale sees them: with Adam, divided by √v̂ + eps."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    divisor = torch.cat([_divisor(parameter, optimizer) for parameter in parameters])
    for first in numbers[::AT_ONCE]:
        loss = batches.loss(*range(first, min(first + AT_ONCE, numbers.stop)))
        yield torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)]) / divisor


def _divisor(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Returns √v̂ + eps for each element, or ∞ where Adam has seen no gradient; 1 with SGD."""
    state, group = optimizer.state[parameter], optimizer.param_groups[0]
    if "exp_avg_sq" not in state:
        return torch.ones_like(parameter).flatten()
    second = state["exp_avg_sq"].flatten() / (1 - group["betas"][1] ** float(state["step"]))
    return torch.where(second > 0, second.sqrt() + group["eps"], math.inf)
