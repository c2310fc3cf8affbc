"""What every server rule offers."""

from typing import Any, Protocol

from torch import Tensor

from fairseq_async.algorithms.update import Update


class Rule(Protocol):
    """Turns updates, in the order of their arrival, into changes of the parameters."""

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Takes one update in; ``parameters`` (flat) change in place. True when the optimizer or momentum stepped."""
        ...

    def changes(self, ahead: int = 0) -> bool:
        """Whether the update behind ``ahead`` others will change the parameters; its sender waits only then."""
        ...

    @property
    def direction(self) -> Tensor | None:
        """The momentum, with which updates can be compared; None where there is none."""
        ...

    def limit_round(self, updates: int) -> None:
        """A round behind the barrier has only this many updates from now on: no step is to wait for more."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def fills(count: int, size: int, ahead: int) -> bool:
    """Whether the update behind ``ahead`` others fills a buffer that has ``count`` and is emptied when it has ``size``.

    A buffer may have become smaller than what is in it: then the next update empties it.
    """
    missing = max(1, size - count)
    return ahead + 1 >= missing and (ahead + 1 - missing) % size == 0
