"""What every server rule offers."""

from typing import Any, Protocol

from torch import Tensor

from fairseq_async.algorithms.update import Update


class Rule(Protocol):
    """Turns updates, in the order of their arrival, into changes of the parameters."""

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Takes one update in; ``parameters`` (flat) change in place. True when the optimizer or momentum stepped."""
        ...

    @property
    def changes_next(self) -> bool:
        """Whether the next update will change the parameters; its sender waits for them only then."""
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
