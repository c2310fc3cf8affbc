"""Hybrid asynchronous SGD: sum several asynchronous gradients, then step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fairseq_async.algorithms.missing import HiddenGradients, tensors_of
from fairseq_async.algorithms.pieces import Pieces
from fairseq_async.algorithms.rule import State, Update, fills
from fairseq_async.algorithms.threads import PIECE, copy_in_threads, cut, in_threads, pairs, step_in_threads

_OF_TORCH = tuple(getattr(torch.optim, name) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"))


class HybridAccumulation:
    """Adds up N asynchronous gradients, then steps the optimizer once (Aji & Heafield 2019, "Making Asynchronous
    Stochastic Gradient Descent Work for Transformers", arXiv 1906.03496, section 3).

    ::

        acc += g;  count += 1
        if count == N:  θ = Optimizer(θ, acc);  acc = 0;  count = 0

    The accumulator holds the mean over the tokens so far, Σ wᵢgᵢ / Σ wᵢ with wᵢ tokens in gradient gᵢ, so that the step
    is the one that a synchronous run would take on the same batches. With N = 1 this is plain asynchronous SGD, and the
    optimizer sees the worker's gradient unchanged, to the bit.

    A partial step, of n < N gradients, counts as n/N of a step in the schedule; where gradients are of several
    micro-batches each, these are counted in their place. Its learning rate is lower, so that a
    gradient moves the parameters about as far as in a whole step (:func:`partial_rate`). Gradients that all have weight
    0 make no step.

    A tensor that no gradient of a step has is left alone: parameters, moments, step count and weight decay. Where some
    of the gradients have it, the others count as zeros, as in DistributedDataParallel.

    Args:
        optimizer: a torch optimizer over ``parameters``, as one tensor or as views into it.
        updates_per_step: N, the number of gradients in a step; at least 1.
        clip_norm: largest L2 norm of the aggregated gradient; 0 does not clip.
        tensors: the model's tensors, as views into ``parameters``. Their norms make up the gradient's norm: with
            another order of summation it would differ in its last bits. By default the norms are those of the
            optimizer's tensors, and a tensor without a gradient counts as zeros, since it is not known where it lies.
        elementwise: whether the optimizer computes each element by itself, so that several threads may share a step.
        micro_batches: how many of them a gradient is of on average, where they differ.
        partial_steps: whether :meth:`limit_round` sets how many gradients the next step has, and a step of fewer than N
            is a partial step. Otherwise all steps are whole steps.

    Attributes:
        norm_of_all: returns the norm of the whole model's gradient, given the norm of the tensors here, which may be a
            part of the model; by default the same norm.

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
        micro_batches: int = 1,
    ) -> None:
        if updates_per_step < 1:
            raise ValueError(f"updates_per_step is {updates_per_step}; it must be at least 1")
        if not clip_norm >= 0:
            raise ValueError(f"clip_norm is {clip_norm}; it must not be negative")
        self.optimizer = optimizer
        self.updates_per_step = self.whole_step = updates_per_step
        self.clip_norm, self.partial_steps, self.elementwise = clip_norm, partial_steps, elementwise
        self._tensors = self._optimized if tensors is None else tensors
        whole = all(piece.dim() == 1 and not piece.is_cpu for piece in self._optimized)  # see `pieces`
        self._pieces = Pieces(optimizer, PIECE if whole else 0)
        self._hidden = HiddenGradients(self._pieces, tensors or ())
        self.norm_of_all: Callable[[Tensor], Tensor] = _as_it_is
        self.mean: Tensor | None = None
        self._has_gradients = False  # whether the tensors' gradients are parts of the mean
        self._missing = 0  # the tensors that no gradient of the present step has
        self.weight = 0.0
        self.count = 0
        self._micro_batches, self._whole = 0, updates_per_step * micro_batches  # in the present step, in a whole one
        self._left = 0  # gradients left by a state without partial steps: the first step takes them too

    def apply(self, parameters: Tensor, update: Update) -> float:
        """Adds one mean gradient, and steps the optimizer on every N-th.

        Returns:
            True for a whole step, False for none, and the share of a whole step for a partial one.
        """
        steps = self.moves_parameters()
        norm = self.add(parameters, update, measures=steps and self.clip_norm > 0)
        return self.close(norm) if steps else False

    def add(self, parameters: Tensor, update: Update, measures: bool = False) -> Tensor | None:
        """Adds one mean gradient; returns the L2 norm of the mean so far where it ``measures`` that on the way."""
        mean, norm = self._accumulator(parameters), None
        self.weight += update.weight
        self._micro_batches += update.micro_batches
        self._missing = update.missing & (self._missing if self.count else -1)
        if self.count == 0:
            copy_in_threads(mean, update.delta)
        elif update.weight > 0 and not (measures and mean.is_cpu):  # a GPU measures in a kernel more
            fraction = update.weight / self.weight
            in_threads(lambda pair: pair[0].lerp_(pair[1], fraction), pairs(mean, update.delta))
        elif update.weight > 0:
            norm = _norm_of_lerp(mean, update.delta, update.weight / self.weight)
        self.count += 1
        return norm

    def close(self, norm: Tensor | None = None) -> float:
        """Steps the optimizer with the gradients that were added, of this norm if it is known; returns as
        :meth:`apply`."""
        share = self._step(norm) if self.weight > 0 else False  # no token, no gradient to step with
        self.weight, self.count, self._micro_batches = 0.0, 0, 0
        self.updates_per_step, self._left = max(1, self.updates_per_step - self._left), 0
        return share if share < 1 else True

    def moves_parameters(self, ahead: int = 0) -> bool:
        return fills(self.count, self.updates_per_step, ahead)

    def dispatch(self, parameters: Tensor) -> Tensor:
        """Returns the parameters themselves."""
        return parameters

    @property
    def momentum_buffer(self) -> None:
        return None

    def limit_round(self, updates: int) -> None:
        """Sets the number of gradients in a round, so that no step waits for more."""
        self.updates_per_step = updates + self._left if self.partial_steps else min(self.whole_step, updates)

    def state_dict(self) -> State:
        """Returns the optimizer's state, and the gradients that wait for their step."""
        return {
            "optimizer": self._pieces.state_dict(),
            "mean": self.mean if self.count else None,
            "weight": self.weight,
            "count": self.count,
            "micro_batches": self._micro_batches,
            "missing": tensors_of(self._missing) if self.count else [],
            "pieces": self._pieces.sizes(),
        }

    def load_state_dict(self, state: State) -> None:
        sizes = state.get("pieces")  # not in an older state, where no piece was cut
        self._pieces.load_state_dict(state["optimizer"], sizes)
        self._has_gradients = False
        self._missing = sum(1 << number for number in state.get("missing", ()))
        self.weight, self.count = state["weight"], state["count"]
        self._micro_batches = state.get("micro_batches", self.count)  # not in an older state
        self._left = self.count if self.partial_steps else 0
        if state["mean"] is not None:
            self.mean = torch.empty_like(state["mean"]) if self.mean is None else self.mean
            self.mean.copy_(state["mean"])

    def cut_into_tensors(self) -> None:
        """Lets the optimizer have a state of its own for each of the tensors."""
        self._hidden.cut_into_tensors()

    @property
    def _optimized(self) -> list[Tensor]:
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]

    def _accumulator(self, parameters: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = torch.zeros_like(parameters, requires_grad=False)
        if not self._has_gradients:
            begin, self._has_gradients = parameters.storage_offset(), True
            for tensor in (*self._optimized, *self._tensors):  # each gradient lies where its parameter lies
                tensor.grad = self.mean.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - begin)
        return self.mean

    def _step(self, norm: Tensor | None) -> float:
        """Steps the optimizer with the mean gradient, of this norm if it is known; returns how much of a step it is."""
        share = min(1.0, self._micro_batches / self._whole) if self.partial_steps else 1.0
        with self._hidden.without(self._missing), _partial_step(self.optimizer, share):
            if self.clip_norm:
                self._clip(norm)
            step_in_threads(self.optimizer) if self.elementwise else self.optimizer.step()
        return share

    def _clip(self, norm: Tensor | None) -> None:
        """Clips as ``torch.nn.utils.clip_grad_norm_`` does, but without a pass over memory where the factor is 1."""
        if norm is None and self.mean is not None and not self.mean.is_cpu:
            norm = torch.linalg.vector_norm(self.mean)  # one kernel; what no gradient has is 0
        if norm is None:
            norm = torch.nn.utils.get_total_norm([tensor.grad for tensor in self._tensors if tensor.grad is not None])
        norm = self.norm_of_all(norm)
        if norm + 1e-6 > self.clip_norm:
            factor = self.clip_norm / (norm + 1e-6)
            assert self.mean is not None
            in_threads(lambda part: part.mul_(factor), cut(self.mean))


def partial_rate(optimizer: torch.optim.Optimizer, share: float) -> float:
    """Returns the factor of the learning rate for a step with ``share`` of a whole step's gradients.

    For an optimizer that adds gradients up, as SGD does, the factor is the share itself (linear scaling: Goyal et al.
    2017, arXiv 1706.02677, section 2.1). Adam, every optimizer with ``betas``, and RMSprop divide by the root of the
    mean square of the gradients. The mean of fewer gradients is noisier: where noise prevails, its mean square is
    larger by 1 / share, which alone shortens the step by the square root of the share. So the factor is the other
    square root (Malladi et al. 2022, arXiv 2205.10287). Muon, whose step has one length whatever the gradient's, has
    it too.
    """
    return share**0.5 if {"betas", "alpha", "ns_steps"} & optimizer.param_groups[0].keys() else share


def _as_it_is(norm: Tensor) -> Tensor:
    return norm


@contextmanager
def _partial_step(optimizer: torch.optim.Optimizer, share: float) -> Iterator[None]:
    """Makes a step of the optimizer inside the block ``share`` of a whole step.

    A weight decay that multiplies the parameters by 1 − lr · decay is no gradient and has no noise: it becomes
    ``share`` of a whole step's decay, whatever the factor of the learning rate.
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
    """Whether the weight decay is separate from the gradient. Of torch's optimizers with ``betas``, and RMSprop, that
    is so in AdamW and with the option ``decoupled_weight_decay``; in fairseq's and in our own it always is."""
    if not isinstance(optimizer, _OF_TORCH):
        return True
    return isinstance(optimizer, torch.optim.AdamW) or bool(optimizer.defaults.get("decoupled_weight_decay"))


def _norm_of_lerp(mean: Tensor, other: Tensor, fraction: float) -> Tensor:
    """Sets mean ← mean + fraction · (other − mean), and returns its L2 norm without reading it from memory again."""

    def square(pair: tuple[Tensor, Tensor]) -> Tensor:
        part, new = pair
        part.lerp_(new, fraction)
        return torch.dot(part, part)  # faster than norm(), and more exact: its sum has fewer terms a lane

    return torch.stack(in_threads(square, pairs(mean, other))).sum().sqrt()
