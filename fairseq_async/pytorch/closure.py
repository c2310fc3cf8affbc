"""``optimizer.step(closure)``: the closure computes the gradients before the step, where they are exchanged."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.start.process import errors_in_one_line

_Given = tuple[tuple[Any, ...], dict[str, Any]]


class ComputedLoss:
    """Stands for a closure that was called before the step, and returns its loss.

    So an optimizer steps as it would that calls a closure once, before it changes a parameter, as torch's do. Others,
    such as SAM, want gradients of other parameters.

    Args:
        closure: computes gradients, and returns the loss.
        parameters: those of the model.

    Attributes:
        loss: the closure's loss; None if it has returned no number.
    """

    def __init__(self, closure: Callable[[], Any], parameters: Sequence[Parameter]) -> None:
        with torch.enable_grad():
            self._returned = closure()
        is_number = (
            isinstance(self._returned, float) or isinstance(self._returned, Tensor) and self._returned.numel() == 1
        )
        self.loss: float | Tensor | None = self._returned if is_number else None
        self._parameters, self._before = parameters, list[int]()

    def in_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given:
        """Returns a hook's arguments with this in place of the closure, for a step that begins now."""
        self._before = self._versions()
        return ((args[0], self, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": self})

    @errors_in_one_line()
    def __call__(self) -> Any:
        if self._before != self._versions():
            raise ConfigurationError(
                "optimizer.step(closure) changes parameters before it calls the closure, or calls it twice: its "
                "gradients are exchanged before the step; use an optimizer that calls it once, at the beginning"
            )
        self._before = []
        return self._returned

    def _versions(self) -> list[int]:
        return [each._version for each in self._parameters]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Returns the closure among the arguments of a hook before a step, which begin with the optimizer."""
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure
