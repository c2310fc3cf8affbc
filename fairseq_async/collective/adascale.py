"""AdaScale round a torch optimizer."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_async.collective.adam_norm import AdamNorm, Masters
from fairseq_async.collective.differences import Differences
from fairseq_async.collective.gains import Gains
from fairseq_async.collective.square_norms import LocalSquareNorms, plain_norm, sum_of_squares
from fairseq_async.errors import ConfigurationError


class AdaScale:
    """Steps r times as far as the schedule says, r being what S batches in a step are worth: see
    :class:`fairseq_async.algorithms.AdaScaleGain`.

    Schedule, momentum and the number of steps stay those of the run with one batch in a step: index the schedule with
    ⌊:attr:`scale_invariant_steps`⌋ and stop when they reach that number. Each parameter group steps with a gain of its
    own; scale-invariant steps advance by the gain of the whole model.

    With SGD, with or without momentum, the learning rate is multiplied by r. With Adam, for which there is no proof, by
    √r, and norms are of g/(√v̂ + eps) (Qiao et al. 2021, Pollux, arXiv 2008.12260); moments are never reset.

    The gradients g_i come from ranks, from accumulation, or both; their norms are taken by hooks during backward, and
    go round in one small all-reduce in a step. Call backward once for each batch, on its mean loss divided by
    ``accumulation``: a sum of losses has only one gradient, in which the noise of its batches cannot be seen. A step
    with NaN or Inf leaves the averages as they are.

    Args:
        optimizer: its gradients at ``step`` are the mean over ranks, as DistributedDataParallel leaves them.
        scale: S; by default ranks times ``accumulation``. Give it when a gradient is of more than one single batch.
        accumulation: backward passes in a step.
        process_group: the ranks; all by default, and this process alone where torch.distributed is not initialised.
        estimator: "batches", or "differences" for one worker without accumulation: the gradients of two consecutive
            steps stand in for two of one step. They are of different parameters, so the gain is too high where a step
            changes the gradient, and the first step after a resumption adds no estimate.
        adaptive: whether Adam's rule holds; by default for torch.optim's Adam and AdamW.
        smoothing: θ of the averages, in place of the paper's.
        interval: norms are taken in every ``interval``-th step, and the gain stays between; the averages then reach
            over that many times more steps. Norms cost most with Adam.
        masters: for a model whose parameters are not the tensors that the optimizer steps: for each parameter that
            tensor, and where the parameter's elements begin in it. Gradients are those of the parameters.
        preconditioned: whether norms are of what Adam makes of gradients; by default where Adam's rule holds.
        reduced: where the mean gradients of each parameter group lie, if not in ``.grad``.
        partitioned: they lie in parts, one on each rank.

    Raises:
        ConfigurationError: S, ``accumulation`` or ``interval`` is out of its range, or a step has one gradient, S is
            not 1 and the estimator is "batches".

    Example::

        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + step / 100) ** -0.5)
        >>> adascale = AdaScale(optimizer, accumulation=4)
        >>> while adascale.scale_invariant_steps < 1000:
        ...     for batch in next_batches(4):
        ...         (loss(model(batch)) / 4).backward()
        ...     adascale.step()
        ...     adascale.zero_grad()
        ...     while schedule.last_epoch < int(adascale.scale_invariant_steps):
        ...         schedule.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scale: float | None = None,
        accumulation: int = 1,
        process_group: dist.ProcessGroup | None = None,
        *,
        estimator: Literal["batches", "differences"] = "batches",
        adaptive: bool | None = None,
        smoothing: float | None = None,
        interval: int = 1,
        masters: Masters | None = None,
        preconditioned: bool | None = None,
        reduced: Callable[[], Sequence[Sequence[Tensor]]] | None = None,
        partitioned: bool = False,
    ) -> None:
        if interval < 1 or (interval > 1 and estimator == "differences"):
            raise ConfigurationError(f"interval is {interval}; it must be at least 1, and 1 for differences")
        self.optimizer = optimizer
        self.estimator = estimator
        self.adaptive = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) if adaptive is None else adaptive
        self._group = process_group
        self._ranks = dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1
        self.gains = Gains(len(optimizer.param_groups), smoothing)
        self.set_scale(scale, accumulation)
        self.interval = interval
        self.steps = 0
        self._parameters = [_parameters(group["params"], masters) for group in optimizer.param_groups]
        preconditioned = self.adaptive if preconditioned is None else preconditioned
        self._norm = AdamNorm(optimizer, masters) if preconditioned else plain_norm
        self._reduced, self._copies = reduced, 1 if partitioned else self._ranks
        self._local = LocalSquareNorms(self._parameters, self._norm)
        self._differences = Differences(self._parameters, self._norm)
        self._warned = False
        self.forget()

    def set_scale(self, scale: float | None = None, accumulation: int = 1) -> None:
        """Changes S, between two steps.

        Raises:
            ConfigurationError: as for the constructor.
        """
        if accumulation < 1:
            raise ConfigurationError(f"accumulation is {accumulation}; it must be at least 1")
        gradients = self._ranks * accumulation
        if scale is not None and not 1 <= scale < math.inf:
            raise ConfigurationError(f"scale is {scale}; it must be at least 1")
        if gradients == 1 and scale != 1 and self.estimator == "batches":
            raise ConfigurationError(
                "AdaScale compares the gradients of a step's batches, and this step has one: use several ranks or "
                'accumulation, or give scale and estimator="differences", or scale=1 for plain training'
            )
        self.scale = float(gradients if scale is None else scale)
        self.accumulation = accumulation
        self.gains.set_scale(self.scale)

    # What a training loop uses

    @property
    def gain(self) -> float:
        """r of the whole model."""
        return self.gains.whole.gain

    @property
    def scale_invariant_steps(self) -> float:
        """τ."""
        return self.gains.whole.scale_invariant_steps

    @property
    def noise_scale(self) -> float:
        """φ of the whole model, in single batches."""
        return self.gains.whole.noise_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self, closure: Callable[[], Any] | None = None, loss_scale: float = 1.0) -> Any:
        """Takes the norms, unless :meth:`measure` has, and lets the optimizer step with the learning rates that follow.

        Args:
            closure: computes gradients and returns the loss; it is called once, before the norms are taken.
            loss_scale: see :meth:`measure`.
        """
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._measured:
            self.measure(loss_scale)
        with self.stretched():
            self.optimizer.step()
        self.advance()
        return loss if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forgets the norms of a step that was not taken, as after an overflow in fp16."""
        self.forget()
        self.optimizer.zero_grad(set_to_none)

    def measure(self, loss_scale: float = 1.0, in_gradients: float = 1.0) -> None:
        """Takes the norms now. For a loop that clips gradients: between backward and clipping.

        Args:
            loss_scale: factor of the loss in backward; for a GradScaler that has unscaled the gradients, its
                ``get_scale()``.
            in_gradients: factor that is still in the mean gradients.
        """
        if self.estimator == "differences":
            self._measure_differences(1.0 / in_gradients)
            return
        self._local_scale = self.accumulation / loss_scale
        whole = self._ranks * self.accumulation / in_gradients
        self._check(self._measure(self._local.passes, lambda passes: whole / passes))

    # What a driver uses that knows the loop

    def begin_pass(self, tokens: float) -> None:
        """Before each backward pass of a loop whose losses are sums: how many tokens this one is over.

        Args:
            tokens: 0 for a batch that does not count.
        """
        self._local.active = self.due and tokens > 0
        self._local.weight = 1.0 / tokens if tokens else 0.0

    def measure_sums(self, tokens: float, factor: float = 1.0, loss_scale: float = 1.0) -> None:
        """:meth:`measure` for a loop whose losses are sums over tokens, and whose gradient is their mean per token.

        The variance is that of a batch of the mean number of tokens, n̄: with n_i tokens in g_i and N in all,
        Σ|g_i|² in the estimate is (G/N)·Σ n_i|g_i|², which is free of bias where the noise of g_i falls as 1/n_i.

        Args:
            tokens: of this rank's passes.
            factor: what makes ``.grad`` that mean gradient.
            loss_scale: factor of the losses in backward.
        """
        if self.estimator == "differences":
            self._measure_differences(factor)
            return
        self._local_scale = 1.0 / loss_scale
        self._measure(tokens, lambda total: factor)

    def advance(self) -> None:
        """After the optimizer's step: scale-invariant steps."""
        self.gains.whole.advance()
        self.steps += 1
        self.forget()

    def forget(self) -> None:
        """Forgets the norms of a step that was not taken."""
        self._measured = False
        self._local.clear()
        self._local.active = self.due
        if isinstance(self._norm, AdamNorm):
            self._norm.forget()

    def close(self) -> None:
        """Takes the hooks away."""
        self._local.close()

    @property
    def passes(self) -> int:
        """Backward passes of this rank since the last step."""
        return self._local.passes

    @contextmanager
    def stretched(self) -> Iterator[None]:
        """Learning rates of the parameter groups are multiplied by what their gains say."""
        rates = [group["lr"] for group in self.param_groups]
        for group, gain in zip(self.param_groups, self.gains.groups, strict=True):
            group["lr"] = group["lr"] * (math.sqrt(gain.gain) if self.adaptive else gain.gain)
        try:
            yield
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, the averages and τ. S is not in it: that is for the run that goes on to say."""
        return {"optimizer": self.optimizer.state_dict(), **self.statistics()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_statistics(state)

    def statistics(self) -> dict[str, Any]:
        """The state without the optimizer's."""
        return {**self.gains.state_dict(), "steps": self.steps}

    def load_statistics(self, state: dict[str, Any]) -> None:
        self.gains.load_state_dict(state)
        self.steps = state["steps"]
        self.forget()

    @property
    def due(self) -> bool:
        return self.estimator == "batches" and self.steps % self.interval == 0

    def _measure(self, weight: float, factor: Callable[[float], float]) -> float:
        """Takes the norms of a step whose passes have ``weight`` together on this rank.

        Args:
            factor: from the weight of all ranks, what makes ``.grad`` the mean gradient.

        Returns:
            passes, as a part of what a whole step has.
        """
        self._measured = True
        self.gains.set_scale(self.scale)
        if not self.due:
            return 1.0
        device = next(parameter.device for group in self._parameters for parameter in group)
        local = self._local.sums(device) * self._local_scale**2
        own = local.new_tensor([self._local.passes, weight])
        numbers = torch.cat([local, self._square_norms(device), own])
        if self._ranks > 1:  # all ranks get the same bits of everything that the gain is made of
            dist.all_reduce(numbers, group=self._group)
        *norms, passes, total = numbers.tolist()
        share = passes / (self._ranks * self.accumulation)  # below 1 where an epoch ends
        self.gains.set_scale(max(1.0, self.scale * share))
        if passes >= 2:
            squares = [square * passes / total for square in norms[: len(self.gains.groups)]]
            means = [square / self._copies * factor(total) ** 2 for square in norms[len(self.gains.groups) :]]
            self.gains.observe(squares, int(passes), means)
        return float(share)

    def _square_norms(self, device: torch.device) -> Tensor:
        """|.grad|² of each parameter group: float64, shape [groups]."""
        if self._reduced is not None:
            groups = [[plain_norm(part, part) for part in parts] for parts in self._reduced()]
            return torch.stack([sum_of_squares(norms, device) for norms in groups])
        return torch.stack([sum_of_squares(list(self._norms_of(group)), device) for group in self._parameters])

    def _norms_of(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        for parameter in parameters:
            norm = None if parameter.grad is None else self._norm(parameter, parameter.grad)
            if norm is not None:
                yield norm

    def _check(self, share: float) -> None:
        if share != 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"AdaScale saw {share * self.accumulation:g} backward passes before a step, and accumulation is "
                f"{self.accumulation}. That may be at the end of an epoch; but a loss that is summed over batches "
                "before backward hides their noise, and the gain stays near 1: call backward for each batch",
                stacklevel=4,
            )

    def _measure_differences(self, factor: float) -> None:
        self._measured = True
        self.gains.set_scale(self.scale)
        squares, means = self._differences.square_norms(factor)
        self.gains.observe(squares, 2, means, batches=2 * self.scale)


def _parameters(stepped: Sequence[Tensor], masters: Masters | None) -> list[Tensor]:
    """The model's parameters behind the tensors that an optimizer steps."""
    if masters is None:
        return list(stepped)
    return [parameter for parameter, (master, _) in masters.items() if any(master is each for each in stepped)]
