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
_SEVERAL = 3  # workers; of fewer medians, one worker decides the median


class NormGate:
    """Refuses an update whose norm is far above the usual ones: of its worker, and of workers in general.

    Usual is the running median of the worker's own norms that were taken, or, if it is larger, the median over three
    workers or more of theirs. So no worker can move the limit of another: neither do many tiny norms of one make those
    of the others outliers, nor huge ones let outliers of others through. A worker that is new may be the one that is
    wrong: it is measured by the running median of all workers' norms.

    Args:
        ratio: how many times the usual norm an update's may be; None takes all.
    """

    def __init__(self, ratio: float | None = None) -> None:
        self.ratio = ratio
        self._of_all: deque[float] = deque(maxlen=_WINDOW)
        self._norms: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def refuses(self, worker: int, norm: float) -> bool:
        """Whether the norm of this worker's update is too large."""
        usual = []
        if worker in self._medians:
            usual.append(self._medians[worker])
        elif len(self._of_all) >= _FEWEST:
            usual.append(statistics.median(self._of_all))
        if len(self._medians) >= _SEVERAL:
            usual.append(statistics.median(self._medians.values()))
        return self.ratio is not None and bool(usual) and norm > self.ratio * max(usual)

    def note(self, worker: int, norm: float) -> None:
        """An update of this worker and norm was taken."""
        if self.ratio is not None:
            self._of_all.append(norm)
            self._norms.setdefault(worker, deque(maxlen=_WINDOW)).append(norm)
            self._measure(worker)

    def _measure(self, worker: int) -> None:
        if len(norms := self._norms[worker]) >= _FEWEST:
            self._medians[worker] = statistics.median(norms)

    def state_dict(self) -> State:
        return {"norms": list(self._of_all), "own": {worker: list(norms) for worker, norms in self._norms.items()}}

    def load_state_dict(self, state: State) -> None:
        self._of_all = deque(state["norms"], maxlen=_WINDOW)
        own = state.get("own", {})  # not in older states
        self._norms = {worker: deque(norms, maxlen=_WINDOW) for worker, norms in own.items()}
        self._medians = {}
        for worker in self._norms:
            self._measure(worker)
