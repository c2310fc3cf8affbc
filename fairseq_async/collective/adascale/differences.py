"""The noise of a gradient from two consecutive steps, for one worker without accumulation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_async.collective.adascale.square_norms import Norm, sum_of_squares


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
