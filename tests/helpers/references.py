"""Methods and statistics in float64, written from their papers, for tests to compare with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Norms = tuple[list[float], float]


class DelayedNesterov64:
    """Algorithm 3 of Liu et al. 2024 (arXiv 2401.09135), line by line.

    Args:
        theta: the parameters at the start; ``arrive`` gives those after one update more.
    """

    def __init__(self, theta: Tensor, lr: float, beta: float, delay: int, c: float = 0.0) -> None:
        self.theta, self.lr, self.beta, self.n, self.c = theta.double(), lr, beta, delay, c
        self.m, self.total, self.t = torch.zeros_like(self.theta), torch.zeros_like(self.theta), 0

    def arrive(self, g: Tensor) -> Tensor:
        g, n, c = g.double(), self.n, self.c
        self.total = self.total + g
        if (self.t + 1) % n == 0:
            self.m = self.beta * self.m + self.total / n
            self.theta = self.theta - self.lr * ((1 - c * n + c) * self.beta * self.m + g / n)
            self.total = torch.zeros_like(self.theta)
        else:
            self.theta = self.theta - self.lr * (c * self.beta * self.m + g / n)
        self.t += 1
        return self.theta


def norms(gradients: Sequence[Tensor]) -> Norms:
    """|g_i|² of each and |ḡ|²."""
    stacked = torch.stack([g.double().flatten() for g in gradients])
    return stacked.square().sum(1).tolist(), float(stacked.mean(0).square().sum())


def papers_gains(iterations: Sequence[Norms], scale: float) -> list[float]:
    """AdaScale's r of each iteration, from the estimates of those before it, all of which are kept: r₀ = 1."""
    theta, gains = max(1 - scale / 1000, 0.0), [1.0]
    past: list[tuple[float, float]] = []
    for local, mean in iterations[:-1]:
        variance = sum(local) / (scale - 1) - scale / (scale - 1) * mean
        past.append((max(variance, 1e-6), max(mean - variance / scale, 0.0)))
        variance, square = past[0]
        for t, (v, m) in enumerate(past[1:], start=2):
            in_mean = t < 1 / (1 - theta) if theta < 1 else True
            weight = 1 / t if in_mean else 1 - theta
            variance, square = variance + weight * (v - variance), square + weight * (m - square)
        gains.append((variance + square) / (variance / scale + square))
    return gains


class HALoS64:
    """Algorithm 1 of HALoS (arXiv 2506.04531) where messages take no time: delayed Nesterov in each region and above.

    Args:
        theta: the parameters at the start.
        local, above: rate, momentum and N of either level.
        every: K, of a region's updates.
        alpha: the share of the global parameters in a merge.
    """

    def __init__(
        self,
        theta: Tensor,
        regions: int,
        local: tuple[float, float, int],
        above: tuple[float, float, int],
        every: int,
        alpha: float,
    ) -> None:
        self.every, self.alpha = every, alpha
        self.above = DelayedNesterov64(theta, *above)
        self.regions = [DelayedNesterov64(theta, *local) for _ in range(regions)]
        self.merged = [theta.double() for _ in range(regions)]
        self.arrived = [0] * regions

    def arrive(self, region: int, delta: Tensor) -> None:
        self.regions[region].arrive(delta)
        self.arrived[region] += 1
        if self.arrived[region] % self.every == 0:
            self.exchange(region)

    def exchange(self, region: int) -> None:
        local = self.regions[region]
        theta = self.above.arrive(self.merged[region] - local.theta)
        local.theta = (1 - self.alpha) * local.theta + self.alpha * theta
        self.merged[region] = local.theta


class Muon64:
    """Muon as ``torch.optim.Muon`` documents it: momentum as a sum, and Newton-Schulz on the whole matrix.

    Args:
        adjust: factor of the learning rate for a matrix of so many rows and columns.
    """

    A, B, C = 3.4445, -4.7750, 2.0315

    def __init__(self, lr: float, weight_decay: float, adjust: Callable[[int, int], float], momentum: float = 0.95):
        self.lr, self.weight_decay, self.adjust, self.momentum = lr, weight_decay, adjust, momentum
        self.buffers: dict[object, Tensor] = {}

    def stepped(self, key: object, theta: Tensor, gradient: Tensor) -> Tensor:
        """The matrix that ``key`` names after one step more."""
        g, theta = gradient.double(), theta.double()
        self.buffers[key] = self.momentum * self.buffers.get(key, torch.zeros_like(g)) + g
        x = g + self.momentum * self.buffers[key]
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = self.A * x + (self.B * gram + self.C * gram @ gram) @ x
        return (1 - self.lr * self.weight_decay) * theta - self.lr * self.adjust(*theta.shape) * x
