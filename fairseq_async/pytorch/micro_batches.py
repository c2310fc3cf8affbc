"""Counts the micro-batches whose gradients a step accumulates."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from fairseq_async.errors import ConfigurationError


class BackwardPasses:
    """Counts calls of ``backward`` since the last step: a parameter accumulates once in each that it takes part in."""

    def __init__(self) -> None:
        self._of_parameter: Counter[int] = Counter()

    @property
    def count(self) -> int:
        return max(self._of_parameter.values(), default=0)

    def add_hooks(self, named: Sequence[tuple[str, Parameter]]) -> list[RemovableHandle]:
        """Begins to count; the handles end it."""
        self._of_parameter.clear()
        return [
            parameter.register_post_accumulate_grad_hook(self._note)
            for _, parameter in named
            if parameter.requires_grad
        ]

    def check(self, micro_batches: int) -> None:
        """Checks that a step is of all its micro-batches, and begins to count anew.

        Raises:
            ConfigurationError: it is of more or fewer.
        """
        count = self.count
        self._of_parameter.clear()
        if count != micro_batches:
            raise ConfigurationError(
                f"optimizer.step() after backward of {count} micro-batches, in a step that has {micro_batches} of "
                "them: call it when worker.step_is_due, and divide each loss by worker.micro_batches"
            )

    def _note(self, parameter: Tensor) -> None:
        self._of_parameter[id(parameter)] += 1
