"""Square norms of one step's gradients: of its backward passes over all ranks, or of two consecutive steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_async.collective.adascale.square_norms import LocalSquareNorms, Norm, plain_norm, sum_of_squares

ReducedGradients = Callable[[], Sequence[Sequence[Tensor]]]


@dataclass(frozen=True)
class StepNorms:
    """Square norms of one step's gradients, over all ranks.

    Attributes:
        local: Σ|g_i|² of each parameter group, over all backward passes.
        mean: |.grad|² of each parameter group.
        passes: number of backward passes.
        weight: their total weight.
    """

    local: list[float]
    mean: list[float]
    passes: float
    weight: float


class StepNormMeter:
    """Takes the square norms of a step's gradients.

    The norms of single passes come from hooks during backward, the norm of their mean from ``.grad`` at the end of the
    step. All norms are added up over the ranks in one small all-reduce.

    Args:
        parameters: the model's parameters of each parameter group.
        norm: |g| of a parameter's gradient, or None where it is not to count.
        ranks: size of the process group.
        process_group: the ranks.
        reduced: returns the mean gradients of each parameter group, if they are not in ``.grad``.
        partitioned: whether the mean gradients lie in parts, one on each rank.

    Attributes:
        local: the norms of this rank's single passes.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Tensor]],
        norm: Norm,
        ranks: int,
        process_group: dist.ProcessGroup | None,
        reduced: ReducedGradients | None,
        partitioned: bool,
    ) -> None:
        self.local = LocalSquareNorms(parameters, norm)
        self._parameters, self._norm = parameters, norm
        self._ranks, self._group = ranks, process_group
        self._reduced, self._copies = reduced, 1 if partitioned else ranks

    def all_reduce(self, weight: float, factor: float) -> StepNorms:
        """Returns the norms of this step over all ranks. Every rank must call it, and all get the same bits.

        Args:
            weight: total weight of this rank's passes.
            factor: multiplies this rank's gradients of single passes to give g_i.
        """
        device = next(parameter.device for group in self._parameters for parameter in group)
        local = self.local.sums(device) * factor**2
        own = local.new_tensor([self.local.passes, weight])
        numbers = torch.cat([local, self._mean_square_norms(device), own])
        if self._ranks > 1:
            dist.all_reduce(numbers, group=self._group)
        *norms, passes, total = numbers.tolist()
        groups = len(self._parameters)
        return StepNorms(norms[:groups], [square / self._copies for square in norms[groups:]], passes, total)

    def _mean_square_norms(self, device: torch.device) -> Tensor:
        """Returns |.grad|² of each parameter group: float64, shape [groups]."""
        if self._reduced is not None:
            groups = [[plain_norm(part, part) for part in parts] for parts in self._reduced()]
            return torch.stack([sum_of_squares(norms, device) for norms in groups])
        return torch.stack([sum_of_squares(list(self._norms_of(group)), device) for group in self._parameters])

    def _norms_of(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        for parameter in parameters:
            norm = None if parameter.grad is None else self._norm(parameter, parameter.grad)
            if norm is not None:
                yield norm


class Differences:
    """Uses the gradients of two consecutive steps in place of two gradients of one step.

    The two are of different parameters, so whatever a step changes in the gradient counts as noise. Keeps a copy of
    every gradient until the next step.

    Args:
        groups: the parameters of each parameter group.
        norm: |g| of a parameter's gradient, or None where it is not to count.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], norm: Norm) -> None:
        self._groups, self._norm = groups, norm
        self._previous: dict[Tensor, Tensor] = {}

    def square_norms(self, factor: float) -> tuple[list[float], list[float]]:
        """Returns |g_1|² + |g_2|² and |(g_1 + g_2)/2|² of each group, with g_1 of the last step and g_2 of this one; 0
        in the first step.

        Args:
            factor: multiplies ``.grad`` to give the gradient.
        """
        squares, means = zip(*(self._of_group(group, factor) for group in self._groups), strict=True)
        return list(squares), list(means)

    def _of_group(self, group: Sequence[Tensor], factor: float) -> tuple[float, float]:
        both: list[Tensor | None] = []
        mean: list[Tensor | None] = []
        for parameter in group:
            if parameter.grad is None:
                continue
            before = self._previous.get(parameter)
            now = self._previous[parameter] = parameter.grad.detach() * factor
            if before is not None:
                both += [self._norm(parameter, before), self._norm(parameter, now)]
                mean += [self._norm(parameter, (before + now) / 2)]
        return _total(both), _total(mean)


def _total(norms: Sequence[Tensor | None]) -> float:
    return float(sum_of_squares([norm for norm in norms if norm is not None], torch.device("cpu")))
