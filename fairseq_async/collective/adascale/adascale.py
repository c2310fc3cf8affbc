"""AdaScale around a torch optimizer."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_async.collective.adascale.adam_norm import AdamNorm, Masters
from fairseq_async.collective.adascale.gains import Gains, GainsState
from fairseq_async.collective.adascale.square_norms import plain_norm
from fairseq_async.collective.adascale.step_norms import Differences, ReducedGradients, StepNormMeter
from fairseq_async.errors import ConfigurationError

Loss = TypeVar("Loss")


_FEW = (
    "That may be at the end of an epoch; but a loss that is summed over batches before backward hides their noise, and "
    "the gain stays near 1"
)
_MANY = "Each counts as a batch; but differences between the parts of one batch are no noise, and the gain is too high"


class AdaScaleState(GainsState):
    """The state of :class:`AdaScale` in a checkpoint, beside the optimizer's state."""

    steps: int


class AdaScale:
    """Wraps a torch optimizer so that each step is r times as long: r is the gain of S batches in a step over one.

    Johnson et al. 2020 (arXiv 2007.05105); :class:`fairseq_async.algorithms.AdaScaleGain` has the formulas. A gain
    follows from the gradients of earlier steps, and the first is 1. Schedule, momentum and the number of steps stay
    those of the run with one batch in a step: index the schedule with ⌊:attr:`scale_invariant_steps`⌋ and stop when
    this reaches that number of steps. Each parameter group steps with a gain of its own; scale-invariant steps advance
    by the gain of the whole model.

    With SGD, with or without momentum, the learning rate is multiplied by r. With Adam, for which there is no proof, it
    is multiplied by √r, and norms are of g/(√v̂ + eps) (Qiao et al. 2021, Pollux, arXiv 2008.12260); moments are never
    reset.

    The gradients g_i come from ranks, from accumulation, or both. Hooks take their norms during backward, and one small
    all-reduce in each step adds them up; so all ranks must take every step together. Call backward once for each batch,
    on its mean loss divided by ``accumulation``: a sum of losses has only one gradient, in which the noise of its
    batches cannot be seen. A step with NaN or Inf leaves the averages as they are.

    Args:
        optimizer: its gradients at ``step`` are the mean over ranks, as DistributedDataParallel leaves them.
        scale: S; by default ranks times ``accumulation``. Give it when one gradient is of several single batches.
        accumulation: backward passes in a step.
        process_group: the ranks; all by default, and this process alone where torch.distributed is not initialised.
        estimator: "batches", or "differences" for one worker without accumulation: the gradients of two consecutive
            steps stand in for two of one step. They are of different parameters, so the gain is too high where a step
            changes the gradient, and the first step after a resumption adds no estimate.
        adaptive: whether to use Adam's rule; by default for torch.optim's Adam and AdamW.
        smoothing: θ of the averages, in place of the paper's.
        interval: norms are taken in every ``interval``-th step, and the gain stays the same in between; the averages
            then reach over that many times more steps. Norms cost most with Adam.
        masters: for a model whose parameters are not the tensors that the optimizer steps: for each parameter, the
            stepped tensor, and where the parameter's elements begin in it. Gradients are those of the parameters.
        preconditioned: whether norms are of g/(√v̂ + eps); by default with Adam's rule.
        reduced: returns the mean gradients of each parameter group, if they are not in ``.grad``.
        partitioned: whether the mean gradients lie in parts, one on each rank.

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
        reduced: ReducedGradients | None = None,
        partitioned: bool = False,
    ) -> None:
        if interval < 1 or (interval > 1 and estimator == "differences"):
            raise ConfigurationError(f"interval is {interval}; it must be at least 1, and 1 for differences")
        self.optimizer = optimizer
        self.estimator = estimator
        self.adaptive = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) if adaptive is None else adaptive
        self._ranks = dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1
        self.gains = Gains(len(optimizer.param_groups), smoothing)
        self.set_scale(scale, accumulation)
        self.interval = interval
        self.steps = 0
        self._gain: float | None = None
        parameters = [_parameters(group["params"], masters) for group in optimizer.param_groups]
        preconditioned = self.adaptive if preconditioned is None else preconditioned
        self._norm = AdamNorm(optimizer, masters) if preconditioned else plain_norm
        self._meter = StepNormMeter(parameters, self._norm, self._ranks, process_group, reduced, partitioned)
        self._differences = Differences(parameters, self._norm)
        self._warned = False
        self.discard_norms()

    def set_scale(self, scale: float | None = None, accumulation: int = 1) -> None:
        """Sets S, between two steps.

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

    # For a training loop

    @property
    def gain(self) -> float:
        """r of the whole model in the last step; before the first step, and after a resumption, r in the next step."""
        return self.gains.whole.gain if self._gain is None else self._gain

    @property
    def scale_invariant_steps(self) -> float:
        """τ: how many steps of the run with one batch in a step these steps are worth."""
        return self.gains.whole.scale_invariant_steps

    @property
    def noise_scale(self) -> float:
        """φ of the whole model, in single batches."""
        return self.gains.whole.noise_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, with the learning rates of the schedule."""
        return self.optimizer.param_groups

    def step(self, closure: Callable[[], Loss] | None = None, loss_scale: float = 1.0) -> Loss | None:
        """Takes the norms, unless :meth:`measure` has, and steps the optimizer with the learning rates times the gains.

        Args:
            closure: computes gradients and returns the loss; it is called once, before the norms are taken.
            loss_scale: see :meth:`measure`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._measured:
            self.measure(loss_scale)
        with self.scaled_learning_rate():
            self.optimizer.step()
        self.advance()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and discards the norms of a step that was not taken, as after an overflow in fp16."""
        self.discard_norms()
        self.optimizer.zero_grad(set_to_none)

    def measure(self, loss_scale: float = 1.0, in_gradients: float = 1.0) -> None:
        """Takes the norms of this step. A loop that clips gradients calls it between backward and clipping.

        Every rank must call it: the norms are added up in an all-reduce.

        Args:
            loss_scale: factor of the loss in backward; for a GradScaler that has unscaled the gradients, its
                ``get_scale()``.
            in_gradients: factor that is still in the mean gradients.
        """
        if self.estimator == "differences":
            self._measure_differences(1.0 / in_gradients)
            return
        whole = self._ranks * self.accumulation / in_gradients
        local_factor = self.accumulation / loss_scale
        self._check(self._measure(self._meter.local.passes, local_factor, lambda passes: whole / passes))

    # For a trainer or an engine that takes the steps itself

    def begin_pass(self, tokens: float) -> None:
        """Sets the number of tokens of the next backward pass, in a loop whose losses are sums over tokens.

        Args:
            tokens: this number; 0 for a batch that does not count.
        """
        self._meter.local.active = self.due and tokens > 0
        self._meter.local.weight = 1.0 / tokens if tokens else 0.0

    def measure_sums(self, tokens: float, factor: float = 1.0, loss_scale: float = 1.0) -> None:
        """:meth:`measure` for a loop whose losses are sums over tokens, and whose gradient is their mean per token.

        The variance is that of a batch of the mean number of tokens, n̄: with n_i tokens in g_i and N in all,
        Σ|g_i|² in the estimate is (G/N)·Σ n_i|g_i|², which is free of bias where the noise of g_i falls as 1/n_i.

        Args:
            tokens: number of tokens in this rank's passes.
            factor: multiplies ``.grad`` to give the mean gradient per token.
            loss_scale: factor of the losses in backward.
        """
        if self.estimator == "differences":
            self._measure_differences(factor)
            return
        self._measure(tokens, 1.0 / loss_scale, lambda total: factor)

    def advance(self) -> None:
        """Counts a step. Must be called after each step of the optimizer."""
        self._gain = self.gains.advance()
        self.steps += 1
        self.discard_norms()

    def discard_norms(self) -> None:
        """Discards the norms of this step's gradients, as after a step that is not taken."""
        self._measured = False
        self.gains.discard()
        self._meter.local.clear()
        self._meter.local.active = self.due
        if isinstance(self._norm, AdamNorm):
            self._norm.invalidate()

    def close(self) -> None:
        """Removes the hooks from the model's parameters."""
        self._meter.local.close()

    @property
    def passes(self) -> int:
        """Backward passes of this rank since the last step."""
        return self._meter.local.passes

    @contextmanager
    def scaled_learning_rate(self) -> Iterator[None]:
        """Multiplies each parameter group's learning rate by its gain (by √r with Adam's rule) inside the block."""
        rates = [group["lr"] for group in self.param_groups]
        for group, gain in zip(self.param_groups, self.gains.groups, strict=True):
            group["lr"] = group["lr"] * (math.sqrt(gain.gain) if self.adaptive else gain.gain)
        try:
            yield
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, object]:
        """Returns the optimizer's state, the averages and τ. S is not in it: a run may go on with another S."""
        return {"optimizer": self.optimizer.state_dict(), **self.statistics()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_statistics({"whole": state["whole"], "groups": state["groups"], "steps": state["steps"]})

    def statistics(self) -> AdaScaleState:
        """Returns the state without the optimizer's state."""
        return {**self.gains.state_dict(), "steps": self.steps}

    def load_statistics(self, state: AdaScaleState) -> None:
        """Restores what :meth:`statistics` returned."""
        self.gains.load_state_dict(state)
        self.steps, self._gain = state["steps"], None
        self.discard_norms()

    @property
    def due(self) -> bool:
        """Whether the norms of this step's passes are taken."""
        return self.estimator == "batches" and self.steps % self.interval == 0

    def _measure(self, weight: float, local_factor: float, factor: Callable[[float], float]) -> float:
        """Takes the norms of a step whose passes have ``weight`` together on this rank.

        Args:
            local_factor: multiplies the gradient of a single pass to give g_i.
            factor: from the weight of all ranks, what multiplies ``.grad`` to give the mean gradient.

        Returns:
            the number of passes, as a fraction of those of a whole step: below 1 at the end of an epoch.
        """
        self._measured = True
        self.gains.set_scale(self.scale)
        if not self.due:
            return 1.0
        norms = self._meter.all_reduce(weight, local_factor)
        fraction = norms.passes / (self._ranks * self.accumulation)
        self.gains.set_scale(max(1.0, self.scale * fraction))
        if norms.passes >= 2:
            squares = [square * norms.passes / norms.weight for square in norms.local]
            means = [square * factor(norms.weight) ** 2 for square in norms.mean]
            self.gains.observe(squares, int(norms.passes), means)
        return fraction

    def _measure_differences(self, factor: float) -> None:
        self._measured = True
        squares, means = self._differences.square_norms(factor)
        self.gains.observe(squares, 2, means, batches=2 * self.scale)

    def _check(self, fraction: float) -> None:
        """Warns once where backward was not called for each batch."""
        if fraction != 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"AdaScale saw {fraction * self.accumulation:g} backward passes before a step, and accumulation is "
                f"{self.accumulation}. {_FEW if fraction < 1 else _MANY}: call backward once for each batch",
                stacklevel=4,
            )


def _parameters(stepped: list[Tensor], masters: Masters | None) -> list[Tensor]:
    """The model's parameters behind the tensors that an optimizer steps."""
    if masters is None:
        return list(stepped)
    return [parameter for parameter, (master, _) in masters.items() if any(master is each for each in stepped)]
