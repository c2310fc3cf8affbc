"""Outer optimizers of local SGD: the rules by which a server applies pseudo-gradients.

Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling" (arXiv 2401.09135). A worker takes H local
steps from θ_start and sends δ = θ_start − θ_local; ε is the outer learning rate, β the outer momentum. Each rule takes
``start_ahead``, see :class:`~fairseq_async.algorithms.outer.momentum_rule.MomentumRule`.
"""

import torch
from torch import Tensor

from fairseq_async.algorithms.outer.momentum_rule import MomentumRule, at_least_one, copied
from fairseq_async.algorithms.rule import State, Update, fills


class NesterovMomentum(MomentumRule):
    """Takes one Nesterov step for each update, on δ/k: the naive asynchronous method, whose stale momentum overshoots.

    ::

        m ← βm + δ/k;  θ ← θ − ε(βm + δ/k)

    With β = 0 this is asynchronous outer SGD, which keeps no momentum.

    Args:
        lr: ε, the outer learning rate.
        momentum: β in [0, 1).
        workers: k, the number of workers.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, lr: float, momentum: float, workers: int, start_ahead: bool = False) -> None:
        super().__init__(lr, momentum, start_ahead)
        self.workers = at_least_one("workers", workers)

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Applies one update with a step; always returns True."""
        if self.momentum:
            momentum = self._momentum_after(update.delta, 1 / self.workers)
            parameters.add_(momentum, alpha=-self.lr * self.momentum)
        parameters.add_(update.delta, alpha=-self.lr / self.workers)
        return True


class _Buffered(MomentumRule):
    """Base of the rules that add updates up in a buffer Δ; at every N-th update the momentum takes Δ/N."""

    def __init__(self, lr: float, momentum: float, start_ahead: bool = False) -> None:
        super().__init__(lr, momentum, start_ahead)
        self.buffer: Tensor | None = None
        self.count = 0

    def state_dict(self) -> State:
        return super().state_dict() | {"buffer": self.buffer if self.count else None, "count": self.count}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.buffer, self.count = copied(state["buffer"]), state["count"]

    def _add(self, delta: Tensor) -> Tensor:
        """Adds an update to the buffer, Δ ← Δ + δ, and returns Δ."""
        if self.buffer is None:
            self.buffer = torch.zeros_like(delta)
        self.count += 1
        return self.buffer.add_(delta)


class BufferedNesterov(_Buffered):
    """Takes one Nesterov step on the mean of every N updates.

    ::

        Δ ← Δ + δ;  every N-th:  m ← βm + Δ/N;  θ ← θ − ε(βm + Δ/N);  Δ ← 0

    Without a barrier this is the method of FedBuff (Nguyen et al. 2022, arXiv 2106.06639) with momentum; behind a
    barrier of N workers it is DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

    Args:
        lr: ε, the outer learning rate.
        momentum: β in [0, 1).
        buffer_size: N, the number of updates in a step.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, lr: float, momentum: float, buffer_size: int, start_ahead: bool = False) -> None:
        super().__init__(lr, momentum, start_ahead)
        self.buffer_size = at_least_one("buffer_size", buffer_size)
        self._wanted = buffer_size

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Adds one update. Takes a step on every N-th, and returns True for it."""
        total = self._add(update.delta)
        if self.count < self.buffer_size:
            return False
        momentum = self._momentum_after(total, 1 / self.count)
        parameters.add_(momentum, alpha=-self.lr * self.momentum)
        parameters.add_(total, alpha=-self.lr / self.count)
        total.zero_()
        self.count = 0
        return True

    def moves_parameters(self, ahead: int = 0) -> bool:
        return fills(self.count, self.buffer_size, ahead)

    def limit_round(self, updates: int) -> None:
        """Sets the number of updates in a round, so that no step waits for more."""
        self.buffer_size = min(self._wanted, updates)


class DelayedNesterov(_Buffered):
    """Delayed Nesterov (Liu et al. 2024, algorithm 3): a gradient step for each update, a momentum step on every N-th.

    ::

        Δ ← Δ + g
        every N-th:  m ← βm + Δ/N;  θ ← θ − ε[(1 − cN + c)·βm + g/N];  Δ ← 0
        otherwise:                  θ ← θ − ε[c·βm + g/N]

    An update is g = δ. With c = 0, N updates that were computed from one θ make one Nesterov step on their mean.

    Args:
        lr: ε, the learning rate of N updates together.
        momentum: β in [0, 1).
        delay: N, usually the number of workers.
        c: share of the momentum in each step between two momentum steps, in [0, 1/N].

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, lr: float, momentum: float, delay: int, c: float = 0.0, start_ahead: bool = False) -> None:
        super().__init__(lr, momentum, start_ahead)
        self.delay = at_least_one("delay", delay)
        if not 0 <= c <= 1 / delay:
            raise ValueError(f"c is {c}; it must be in [0, 1/delay] = [0, {1 / delay:g}]")
        self.c = c

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Applies one update; returns True on every N-th, when the momentum is updated."""
        total = self._add(update.delta)
        stepped = self.count >= self.delay  # more than N if a checkpoint has the buffer of a larger N
        if stepped:
            self._momentum_after(total, 1 / self.count)
            total.zero_()
            self.count = 0
        share = 1 - self.c * self.delay + self.c if stepped else self.c
        if self.momentum_buffer is not None and share > 0:
            parameters.add_(self.momentum_buffer, alpha=-self.lr * share * self.momentum)
        parameters.add_(update.delta, alpha=-self.lr / self.delay)
        return stepped
