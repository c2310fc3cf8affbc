"""Admission of updates to the server: a policy for stale updates and a gate on the norm, which go with any rule."""

import statistics
from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import State, Update


@dataclass(frozen=True)
class StalenessPolicy:
    """Weights, drops or compensates stale updates: the baselines of Liu et al. 2024 (arXiv 2401.09135, section 4).

    Attributes:
        power: an update of staleness s has the weight (1 + s)^power; 0 leaves it as it is, the paper uses −0.5.
        limit: largest staleness of an update that is not dropped; None drops none, the paper uses 10.
        compensation: λ of delay compensation (Zheng et al. 2017, arXiv 1609.08326), which replaces an update g by
            g + λ·g⊙g⊙(θ_now − θ_then); 0 does not compensate.

    Raises:
        ValueError: an attribute is out of its range.
    """

    power: float = 0.0
    limit: int | None = None
    compensation: float = 0.0

    def __post_init__(self) -> None:
        if not self.power <= 0:
            raise ValueError(f"power is {self.power}; it must not be positive")
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"limit is {self.limit}; it must not be negative")
        if not self.compensation >= 0:
            raise ValueError(f"compensation is {self.compensation}; it must not be negative")

    def drops(self, staleness: int) -> bool:
        """Whether an update of this staleness is dropped."""
        return self.limit is not None and staleness > self.limit

    def adjusted(self, update: Update, staleness: int, now: Tensor, then: Tensor | None) -> Update:
        """Returns the compensated update, times its share and its weight; one whose compensation fp32 cannot hold is
        weighted alone.

        Args:
            now: the current parameters, flat.
            then: the parameters from which the update was computed; None, where these are not known, does not
                compensate.
        """
        delta = update.delta
        if self.compensation and then is not None:
            compensated = delta + self.compensation * delta * delta * (now - then)
            if bool(torch.isfinite(torch.linalg.vector_norm(compensated))):  # g⊙g of a finite g may be Inf
                delta = compensated
        weight = update.share * (1.0 + staleness) ** self.power
        if weight != 1.0:
            delta = delta * weight
        return update if delta is update.delta else replace(update, delta=delta)


_WINDOW = 101  # last norms whose median is the usual one
_FEWEST = 11  # norms; a median of fewer says little
_SEVERAL = 3  # workers; with fewer, one worker alone decides the median of their medians


class NormGate:
    """Refuses an update whose norm is far above the usual norm of its worker and of the workers in general.

    The usual norm is the larger of two: the running median of this worker's accepted norms, and the median of all
    workers' running medians, once three workers have one. So no worker can move another worker's limit: many tiny norms
    of one do not make the norms of others outliers, and huge norms of one do not let outliers of others through. A new
    worker may itself be the faulty one: the running median of all workers' norms takes the place of its own.

    Args:
        ratio: largest accepted norm as a multiple of the usual norm; None accepts all.
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
        """Records the norm of an update that was accepted from this worker."""
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
