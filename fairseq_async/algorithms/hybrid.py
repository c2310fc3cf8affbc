"""Hybrid asynchronous SGD: sum several asynchronous gradients, then step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.algorithms.rule import State, fills
from fairseq_async.algorithms.threads import PIECE, copy_in_threads, in_threads, pairs, step_in_threads
from fairseq_async.algorithms.update import Update

_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam)


class HybridAccumulation:
    """Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers"
    (arXiv 1906.03496, section 3).

    ::

        acc += g;  count += 1
        if count == N:  θ = Optimizer(θ, acc);  acc = 0;  count = 0

    The accumulator is kept as the mean over the tokens seen so far, Σ wᵢgᵢ / Σ wᵢ, so that the step is the one
    a synchronous run would take on the same batches. With N = 1 this is plain asynchronous SGD, and the
    optimizer sees the worker's gradient unchanged, to the bit.

    A partial step, of n < N gradients, is n/N of a step: it counts as so much in the schedule, and has a lower learning
    rate, so that a gradient moves the parameters about as far as in a whole step (:func:`partial_rate`). Gradients that
    all have weight 0 make no step.

    Args:
        optimizer: a torch optimizer over ``parameters``, as one tensor or as views into it.
        updates_per_step: N, at least 1.
        clip_norm: largest L2 norm of the aggregated gradient; 0 does not clip.
        tensors: views into ``parameters`` whose norms make up that norm, if not those that the optimizer has. In
            another order of summation it would differ in its last bits.
        elementwise: the optimizer takes each element by itself, so that several threads may share a step.
        partial_steps: :meth:`limit_round` says how many gradients the next step has, and one of fewer than N is a
            partial step. Otherwise all steps are whole ones.

    Attributes:
        norm_of_all: the norm of the whole model's gradient from that of the tensors here; they may be a part of it.

    Raises:
        ValueError: N below 1, or a negative ``clip_norm``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        updates_per_step: int,
        clip_norm: float = 0.0,
        tensors: Sequence[Tensor] | None = None,
        partial_steps: bool = False,
        elementwise: bool = False,
    ) -> None:
        if updates_per_step < 1:
            raise ValueError(f"updates_per_step is {updates_per_step}; it must be at least 1")
        if clip_norm < 0:
            raise ValueError(f"clip_norm is {clip_norm}; it must not be negative")
        self.optimizer = optimizer
        self.updates_per_step = self.whole_step = updates_per_step
        self.clip_norm, self.partial_steps, self.elementwise = clip_norm, partial_steps, elementwise
        self._optimized = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._tensors = self._optimized if tensors is None else tensors
        self.norm_of_all: Callable[[Tensor], Tensor] = _as_it_is
        self.mean: Tensor | None = None
        self.weight = 0.0
        self.count = 0
        self._left = 0  # gradients of a state without partial steps: they go with the first round

    def apply(self, parameters: Tensor, update: Update) -> float:
        """Adds one mean gradient; steps the optimizer on every N-th, and returns how much of a step that is."""
        mean = self._accumulator(parameters)
        self.weight += update.weight
        steps, norm = self.moves_parameters(), None
        if self.count == 0:
            copy_in_threads(mean, update.delta)
        elif update.weight > 0 and not (steps and self.clip_norm):
            fraction = update.weight / self.weight
            in_threads(lambda pair: pair[0].lerp_(pair[1], fraction), pairs(mean, update.delta))
        elif update.weight > 0:
            norm = _norm_of_lerp(mean, update.delta, update.weight / self.weight)
        self.count += 1
        if not steps:
            return 0.0
        share = self._step(mean, norm) if self.weight > 0 else 0.0  # without a token there is nothing to step with
        self.weight, self.count = 0.0, 0
        self.updates_per_step, self._left = max(1, self.updates_per_step - self._left), 0
        return share

    def moves_parameters(self, ahead: int = 0) -> bool:
        return fills(self.count, self.updates_per_step, ahead)

    def dispatch(self, parameters: Tensor) -> Tensor:
        """The parameters themselves."""
        return parameters

    @property
    def momentum_buffer(self) -> None:
        return None

    def limit_round(self, updates: int) -> None:
        """A step waits for no more gradients than a round has."""
        self.updates_per_step = updates + self._left if self.partial_steps else min(self.whole_step, updates)

    def state_dict(self) -> State:
        """The optimizer's state and the gradients that wait for their step."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "mean": self.mean if self.count else None,
            "weight": self.weight,
            "count": self.count,
        }

    def load_state_dict(self, state: State) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.weight, self.count = state["weight"], state["count"]
        self._left = self.count if self.partial_steps else 0
        if state["mean"] is not None:
            self._accumulator(state["mean"]).copy_(state["mean"])

    def _accumulator(self, parameters: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = torch.zeros_like(parameters, requires_grad=False)
            for tensor in (*self._optimized, *self._tensors):  # each gradient lies where its parameter lies
                tensor.grad = self.mean.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return self.mean

    def _step(self, mean: Tensor, norm: Tensor | None) -> float:
        """Steps the optimizer with the mean, of this norm where it is known; returns how much of a step that is."""
        if self.clip_norm:
            self._clip(mean, norm)
        share = min(1.0, self.count / self.whole_step) if self.partial_steps else 1.0
        with _partial_step(self.optimizer, share):
            step_in_threads(self.optimizer) if self.elementwise else self.optimizer.step()
        return share

    def _clip(self, mean: Tensor, norm: Tensor | None) -> None:
        """As ``torch.nn.utils.clip_grad_norm_``, but for the pass over memory that multiplies by 1."""
        if norm is None:
            norm = torch.nn.utils.get_total_norm([tensor.grad for tensor in self._tensors if tensor.grad is not None])
        norm = self.norm_of_all(norm)
        if norm + 1e-6 > self.clip_norm:
            factor = self.clip_norm / (norm + 1e-6)
            in_threads(lambda part: part.mul_(factor), mean.split(PIECE))


def partial_rate(optimizer: torch.optim.Optimizer, share: float) -> float:
    """The share of the learning rate for a step with this share of a whole step's gradients.

    Where the optimizer adds gradients up, as SGD does, it is the same (linear scaling: Goyal et al. 2017, arXiv
    1706.02677, section 2.1). Adam, and every optimizer with ``betas``, divides by the root of the mean square of what
    it steps with. The mean of fewer gradients is noisier, its mean square is larger by 1 / share where noise prevails,
    and the step is shorter by itself: the square root of the share is left (Malladi et al. 2022, arXiv 2205.10287).
    """
    return share**0.5 if "betas" in optimizer.param_groups[0] else share


def _as_it_is(norm: Tensor) -> Tensor:
    return norm


@contextmanager
def _partial_step(optimizer: torch.optim.Optimizer, share: float) -> Iterator[None]:
    """Within this a step of the optimizer is this share of a whole one.

    A weight decay that multiplies the parameters by 1 − lr · decay is no gradient, and has no noise: it is the share of
    a whole step's, whatever is left of the learning rate.
    """
    rate = partial_rate(optimizer, share)
    before = [(group["lr"], group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
    for group, (lr, decay) in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = rate * lr
        if decay and rate != share and _is_decoupled(optimizer):
            group["weight_decay"] = share / rate * decay
    try:
        yield
    finally:
        for group, (lr, decay) in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr
            if decay:
                group["weight_decay"] = decay


def _is_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the weight decay is no part of the gradient. Of torch's optimizers with ``betas`` AdamW says so, by its
    class or by an option; fairseq's, and our own, all have it so."""
    if not isinstance(optimizer, _OF_TORCH):
        return True
    return isinstance(optimizer, torch.optim.AdamW) or bool(optimizer.defaults.get("decoupled_weight_decay"))


def _norm_of_lerp(mean: Tensor, other: Tensor, fraction: float) -> Tensor:
    """mean ← mean + fraction · (other − mean); returns its L2 norm, for which no part is read from memory again."""

    def square(pair: tuple[Tensor, Tensor]) -> Tensor:
        part, new = pair
        part.lerp_(new, fraction)
        return torch.dot(part, part)  # sooner than norm(), and its sum has fewer terms a lane: more exact

    return torch.stack(in_threads(square, pairs(mean, other))).sum().sqrt()


def pieces(parameters: Tensor) -> list[Parameter]:
    """A flat vector in parts, for an optimizer that takes each element by itself: a step of one part after the other
    finds in the cache what a step of all at once reads from memory in every one of its operations."""
    return [Parameter(part) for part in parameters.split(PIECE)]
