"""Which updates a server takes, and what a stale one is worth: options that go with any rule."""

import statistics
from collections import deque
from dataclasses import dataclass, replace

from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.algorithms.update import Update


@dataclass(frozen=True)
class StalenessPolicy:
    """The baselines of Liu et al. 2024 (arXiv 2401.09135, section 4) for updates of staleness s.

    Attributes:
        power: the update is weighted by (1 + s)^power; 0 leaves it as it is, the paper has −0.5.
        limit: an update of a higher staleness is dropped; None drops none, the paper has 10.
        compensation: λ of delay compensation (Zheng et al. 2017, arXiv 1609.08326): g + λ·g⊙g⊙(θ_now − θ_then).

    Raises:
        ValueError: an attribute is out of its range.
    """

    power: float = 0.0
    limit: int | None = None
    compensation: float = 0.0

    def __post_init__(self) -> None:
        if self.power > 0:
            raise ValueError(f"power is {self.power}; it must not be positive")
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"limit is {self.limit}; it must not be negative")
        if self.compensation < 0:
            raise ValueError(f"compensation is {self.compensation}; it must not be negative")

    def drops(self, staleness: int) -> bool:
        return self.limit is not None and staleness > self.limit

    def adjusted(self, update: Update, staleness: int, now: Tensor, then: Tensor | None) -> Update:
        """The update as the rule is to see it; ``now`` and ``then`` are the parameters now and where it started."""
        delta = update.delta
        if self.compensation and then is not None:
            delta = delta + self.compensation * delta * delta * (now - then)
        if self.power and staleness > 0:
            delta = delta * (1.0 + staleness) ** self.power
        return update if delta is update.delta else replace(update, delta=delta)


_WINDOW = 101
_FEWEST = 11  # before, a median says little


class NormGate:
    """Refuses an update whose norm is far above the running median of those that were taken.

    Args:
        ratio: how many times the median an update's norm may be; None takes all.
    """

    def __init__(self, ratio: float | None = None) -> None:
        self.ratio = ratio
        self._norms: deque[float] = deque(maxlen=_WINDOW)

    def refuses(self, norm: float) -> bool:
        if self.ratio is None or len(self._norms) < _FEWEST:
            return False
        return norm > self.ratio * statistics.median(self._norms)

    def note(self, norm: float) -> None:
        """An update of this norm was taken."""
        if self.ratio is not None:
            self._norms.append(norm)

    def state_dict(self) -> State:
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: State) -> None:
        self._norms = deque(state["norms"], maxlen=_WINDOW)
