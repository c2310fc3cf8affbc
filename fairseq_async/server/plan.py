"""What the server tells its workers of their work, and when the work is done."""

import math
from typing import Any, Protocol

Message = dict[str, Any]


def checked_number(value: object, name: str) -> float:
    """A finite number that is not below 0; a ValueError for another."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}: not a finite number of at least 0")
    return float(value)


class Plan(Protocol):
    """One method's view of the run beside its rule: learning rate, local steps, data, end."""

    @property
    def finished(self) -> bool: ...

    def assign(self, worker: int) -> Message:
        """What an answer says of the worker's next work; ``idle`` in it: nothing, as long as others do theirs."""
        ...

    def expected_seconds(self, worker: int) -> float | None:
        """What the worker's present work takes, from its speed before; None where that is not known."""
        ...

    def check(self, report: Message) -> None:
        """Raises a KeyError, TypeError or ValueError for a report that :meth:`record` could not take."""
        ...

    def record(self, worker: int, weight: float, report: Message) -> None:
        """An update was settled; ``report`` is what its worker said of it."""
        ...

    def forget(self, worker: int) -> None:
        """The worker is gone, with what it was at."""
        ...

    def hear(self, worker: int, message: Message) -> Message:
        """A message of this method's own."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Schedule(Protocol):
    """A learning rate that may change at the ends of epochs."""

    @property
    def learning_rate(self) -> float: ...

    def begin_epoch(self, epoch: int) -> None: ...

    def end_epoch(self, epoch: int, loss: float | None) -> None: ...


class Passes:
    """The plan of gradient methods: a schedule beside the optimizer, and an end after so many passes over the data.

    Args:
        max_epoch: passes of all workers together; 0 for no end.
    """

    def __init__(self, schedule: Schedule, max_epoch: int) -> None:
        self.schedule, self.max_epoch = schedule, max_epoch
        self.epochs = 0.0

    @property
    def finished(self) -> bool:
        return bool(self.max_epoch and self.epochs > self.max_epoch - 1e-6)

    def assign(self, worker: int) -> Message:
        return {"learning_rate": self.schedule.learning_rate}

    def expected_seconds(self, worker: int) -> float | None:
        return None

    def check(self, report: Message) -> None:
        checked_number(report.get("epochs", 0.0), "epochs")

    def record(self, worker: int, weight: float, report: Message) -> None:
        self.epochs += report.get("epochs", 0.0)

    def forget(self, worker: int) -> None:
        """Nothing was promised to it."""

    def hear(self, worker: int, message: Message) -> Message:
        """Worker 0, who validates, tells of its epochs."""
        if message["event"] == "begin_epoch":
            self.schedule.begin_epoch(int(message["epoch"]))
        else:
            self.schedule.end_epoch(int(message["epoch"]), message["loss"])
        return self.assign(worker)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]
