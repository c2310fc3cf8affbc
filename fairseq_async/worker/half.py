"""What every worker's half of a method has: its way into the run, and an end when nothing it sends is taken."""

import logging
from typing import Any

from fairseq_async.errors import RefusedError
from fairseq_async.server import ServerClient
from fairseq_async.worker.replica import Replica

logger = logging.getLogger(__name__)


class Refusals:
    """Counts the updates that the server has refused, which says with each answer how many there were.

    Args:
        worker: its number, for the error.
        limit: refused in a row, after which the worker stops.
    """

    def __init__(self, worker: int, limit: int) -> None:
        self.worker, self.limit = worker, limit
        self.total = self.in_a_row = 0

    def count(self, total: int) -> None:
        """After each answer.

        Raises:
            RefusedError: there were too many in a row.
        """
        more, self.total = max(0, total - self.total), total
        self.in_a_row = self.in_a_row + more if more else 0
        if more:
            logger.warning("an update was refused: it had NaN or Inf (%d in all)", total)
        if self.in_a_row >= self.limit:
            raise RefusedError(
                f"the last {self.in_a_row} updates of worker {self.worker} had NaN or Inf and were refused "
                '(--max-refused; deepspeed: "max_refused"); try a lower learning rate'
            )


class Half:
    """A worker's half of a method.

    Args:
        client: the connection.
        replica: this worker's parameters.
        max_refused: refused updates in a row after which the worker stops.

    Attributes:
        joined: the worker has the server's parameters.
        finished: the run is over.
        version: the server's, of the parameters that the worker started from.
        sequence: the number of its next update.
        done: local steps that the server has not heard of.
        last: what is to be logged of the last exchange.
    """

    def __init__(self, client: ServerClient, replica: Replica, max_refused: int) -> None:
        self.client, self.replica = client, replica
        self.refusals = Refusals(client.worker, max_refused)
        self.joined = self.finished = False
        self.version = self.sequence = self.done = 0
        self.last: dict[str, float] = {}

    def join(self, method: dict[str, Any]) -> dict[str, Any]:
        """Enters the run; the welcome says whether the server has parameters."""
        return self.client.join(self.replica.layout, method)

    def bring_parameters(self, state: str | None) -> dict[str, Any]:
        """Worker 0's parameters, or the server state in a file, to a new server."""
        self.replica.read(self.client.slot)
        return self.client.initialise(state)

    def begin(self, welcome: dict[str, Any]) -> None:
        """Takes the server's parameters, and its word on what this worker has sent before."""
        self.joined, self.finished = True, welcome["finished"]
        self.sequence, self.refusals.total = welcome["sequence"], welcome["refused"]
        self.pull()

    def pull(self) -> None:
        """Takes the server's current parameters."""
        self.version = self.client.pull(self.replica.write)

    def settle(self) -> None:
        """Nothing is on its way between two calls."""
