"""The worker side of a method: how a worker joins a run, and when it gives up."""

import logging

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError, option
from fairseq_async.method_spec import MethodSpec
from fairseq_async.server.protocol import Welcome
from fairseq_async.worker.client import Client
from fairseq_async.worker.replica import Replica

logger = logging.getLogger(__name__)


class Refusals:
    """Counts the updates that the server has refused, which says with each answer how many there were.

    It counts the local steps that a worker leaves out by itself, too.

    Args:
        worker: its number, for the error.
        limit: refused in a row, after which the worker stops.
        what: they are.
        fate: what becomes of them.
    """

    def __init__(self, worker: int, limit: int, what: str = "update", fate: str = "refused") -> None:
        self.worker, self.limit, self.what, self.fate = worker, limit, what, fate
        self.total = self.in_a_row = 0

    def count(self, total: int) -> None:
        """After each answer.

        Raises:
            RefusedError: there were too many in a row.
        """
        more, self.total = max(0, total - self.total), total
        self.in_a_row = self.in_a_row + more if more else 0
        if more:
            logger.warning("the last %s was %s: it had NaN or Inf (%d in all)", self.what, self.fate, total)
        if self.in_a_row >= self.limit:
            raise RefusedError(
                f"the last {self.in_a_row} {self.what}s of worker {self.worker} had NaN or Inf and were {self.fate} "
                f"({option('max_refused')}); try a lower learning rate"
            )


def left_out_steps(worker: int, limit: int) -> Refusals:
    """Counts local steps with NaN or Inf, which never reach the server."""
    return Refusals(worker, limit, "local step", "left out")


class AsyncWorker:
    """The worker side of a method: joins a run, and takes the server's parameters.

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
        look_ahead: versions ahead of ``version`` at which it has started.
        first_batch: a digest of the worker's first batch, until its first update has gone.
        last: what is to be logged of the last exchange.
    """

    def __init__(self, client: Client, replica: Replica, max_refused: int) -> None:
        self.client, self.replica = client, replica
        self.refusals = Refusals(client.worker, max_refused)
        self.joined = self.finished = False
        self.version = self.sequence = self.done = 0
        self.look_ahead = 0.0
        self.first_batch: str | None = None
        self.last: dict[str, float] = {}

    def join(self, spec: MethodSpec) -> Welcome:
        """Joins the run; the welcome says whether the server has parameters."""
        return self.client.join(self.replica.layout, spec)

    def bring_parameters(self, state: str | None, from_checkpoint: bool = False) -> Welcome:
        """Worker 0's parameters, or the server state in a file, to a new server."""
        self.pin_exchanged()
        self.replica.read(self.client.slot)
        return self.client.initialise(state, from_checkpoint)

    def begin(self, welcome: Welcome) -> None:
        """Starts from the server's parameters, and counts on from what the server has of this worker."""
        self.joined, self.finished = True, welcome.finished
        self.sequence, self.refusals.total = welcome.sequence, welcome.refused
        self.start()

    def start(self) -> None:
        """Takes what this worker's next work starts from: here the server's current parameters."""
        self.pull()

    def start_again(self) -> None:
        """Takes anew what the present work starts from, which a replay gives after the exchange."""
        self.pull()

    def pin_exchanged(self) -> None:
        """Lets a GPU reach what server and worker hand each other by itself. Before each exchange: it lies elsewhere
        after the server has come back."""
        if self.replica.device.asynchronous:
            for name, vector in self.client.exchanged.items():
                self.replica.device.pin(name, vector)

    def compressor_state(self) -> State | None:
        """What a checkpoint of this worker keeps of its compressed updates; None where they are not compressed."""
        return None if self.client.compressor is None else self.client.compressor.state_dict()

    def restore_compressor(self, state: State | None) -> None:
        """Goes on from :meth:`compressor_state`, once the worker has begun; from another time it is left."""
        if self.client.compressor is not None and state is not None:
            self.client.compressor.load_state_dict(state, self.sequence)

    def pull(self) -> None:
        """Takes the server's current parameters, in fp32."""
        self.version, self.look_ahead = self.client.pull(self.replica.write), 0.0

    def catch_up(self) -> None:
        """Takes the server's current parameters where the work that is done may be in them: sends that first."""
        self.settle()
        if not self.finished:
            self.send_done()
            self.pull()  # what an answer has brought may be ahead of the parameters, or compressed

    def send_done(self) -> None:
        """Sends what is done and was not sent; here nothing, since a gradient goes when it is there."""

    def take_first_batch(self) -> str | None:
        """The digest of the first batch, once."""
        digest, self.first_batch = self.first_batch, None
        return digest

    def settle(self) -> None:
        """Waits for an exchange that is on its way; here none is, between two calls."""
