"""HALoS: a regional server that is itself a worker of a global server."""

from torch import Tensor

from fairseq_async.algorithms.outer.momentum_rule import at_least_one
from fairseq_async.algorithms.rule import State


class Region:
    """A regional server's exchange with the global server (HALoS; Kim et al. 2025, arXiv 2506.04531, algorithm 1).

    The region's own rule applies its workers' updates to the region's parameters θ_r. At the K-th update since the last
    merge, the region sends δ, how far θ_r has moved since then, to the global server. The global server applies δ as a
    pseudo-gradient, by its own rule, and answers with its parameters θ::

        δ = θ_merged − θ_r;   θ_r ← (1 − α)·θ_r + α·θ;   θ_merged ← θ_r

    The region does not wait for the answer. The updates that its workers make meanwhile stay in θ_r and are in no δ, as
    in the authors' code.

    Args:
        parameters: the initial θ_r, which all regions and the global server have in common.
        updates: K, the number of updates after which the region sends.
        merge: α in [0, 1], the share of θ in a merge.

    Attributes:
        count: number of updates since the last merge.
        waiting: whether δ, or the answer to it, is on its way.

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
        """Whether δ is to be sent: K updates are there, and no earlier δ or answer is on its way."""
        return self.count >= self.updates and not self.waiting

    def note_update(self) -> None:
        """Counts an update of the region's workers that was applied to θ_r."""
        self.count += 1

    def send(self, parameters: Tensor) -> Tensor:
        """Returns δ for the global server, and marks it as on its way."""
        self.waiting = True
        return self._merged - parameters

    def merge(self, parameters: Tensor, above: Tensor) -> None:
        """Merges the global server's answer ``above`` (θ) into ``parameters`` (θ_r), in place."""
        self._merged.copy_(parameters.lerp_(above, self.share))
        self.count, self.waiting = 0, False

    def state_dict(self) -> State:
        """Returns all that the region needs to go on, except θ_r."""
        return {"merged": self._merged, "count": self.count, "waiting": self.waiting}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._merged.copy_(state["merged"])
        self.count, self.waiting = state["count"], state["waiting"]
