"""Methods in float64, written from their papers, for tests to compare with."""

import torch
from torch import Tensor


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
