"""Updates that are finite and yet cannot be right."""

import statistics
from collections import deque
from typing import Any

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

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms = deque(state["norms"], maxlen=_WINDOW)
