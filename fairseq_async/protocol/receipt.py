"""The server's receipt of an update, which says what became of it."""

import math
from dataclasses import dataclass
from enum import Enum


class Status(str, Enum):
    """What became of an update."""

    APPLIED = "applied"
    HELD = "held"  # behind the barrier, until its round is complete
    REFUSED = "refused"  # NaN or Inf
    STALE = "stale"  # its staleness is above the limit
    OUTLIER = "outlier"  # its norm is too far above those before it
    DUPLICATE = "duplicate"  # its sequence number was settled before
    FINISHED = "finished"  # the run had taken its last step


SETTLED = frozenset({Status.APPLIED, Status.REFUSED, Status.STALE, Status.OUTLIER})
"""The statuses that use a sequence number up: the worker's steps count, and its data goes on behind them."""


@dataclass(frozen=True)
class Receipt:
    """The answer to one update.

    Attributes:
        staleness: versions applied between the worker's pull and the arrival of its update.
        norm: L2 norm of the update.
        version: the server's version afterwards.
        cosine: cosine of the update and the rule's momentum before it; NaN without momentum.
    """

    worker: int
    sequence: int
    base_version: int
    weight: float
    status: Status
    staleness: int
    norm: float
    version: int
    cosine: float = math.nan
