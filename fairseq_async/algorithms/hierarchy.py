"""HALoS: a regional server that is itself a worker of a global one."""

from torch import Tensor

from fairseq_async.algorithms.momentum_rule import at_least_one
from fairseq_async.algorithms.rule import State


class Region:
    """What a regional server does besides its rule (HALoS; Kim et al. 2025, arXiv 2506.04531, algorithm 1).

    The workers of a region move its parameters θ_r by a rule of their own. With the K-th of their updates since the
    last merge the region sends δ, how far they have moved it, to the global server. That takes δ as a pseudo-gradient,
    by its own rule, and answers with its parameters θ::

        δ = θ_merged − θ_r;   θ_r ← (1 − α)·θ_r + α·θ;   θ_merged ← θ_r

    The region does not wait for the answer. As in the authors' code, what its workers move it meanwhile stays in θ_r
    and is in no δ.

    Args:
        parameters: θ_r at the beginning, the same in all regions, and the global server's.
        updates: K.
        merge: α in [0, 1].

    Attributes:
        count: updates since the last merge.
        waiting: δ or its answer is on its way.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, parameters: Tensor, updates: int = 32, merge: float = 0.25) -> None:
        self.updates = at_least_one("updates", updates)
        if not 0 <= merge <= 1:
            raise ValueError(f"merge is {merge}; it must be in [0, 1]")
        self.share = merge
        self.count, self.waiting = 0, False
        self._merged = parameters.clone()

    @property
    def due(self) -> bool:
        """Whether there are enough updates to be sent."""
        return self.count >= self.updates and not self.waiting

    def note_update(self) -> None:
        """An update of the region's workers was applied to its parameters."""
        self.count += 1

    def send(self, parameters: Tensor) -> Tensor:
        """δ, for the global server."""
        self.waiting = True
        return self._merged - parameters

    def merge(self, parameters: Tensor, above: Tensor) -> None:
        """Takes the global server's answer in; ``parameters`` (θ_r) change in place."""
        self._merged.copy_(parameters.lerp_(above, self.share))
        self.count, self.waiting = 0, False

    def state_dict(self) -> State:
        """What it needs to go on, beside θ_r."""
        return {"merged": self._merged, "count": self.count, "waiting": self.waiting}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`."""
        self._merged.copy_(state["merged"])
        self.count, self.waiting = state["count"], state["waiting"]
