"""The worker side of a method: how a worker joins a run, and when it gives up."""

import logging
import threading

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError, option
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Welcome
from fairseq_async.worker.batches import BatchDigest
from fairseq_async.worker.changes import ParameterWatch
from fairseq_async.worker.connection.server_connection import JoinDetails, ServerConnection
from fairseq_async.worker.replica import Replica
from fairseq_async.worker.start.server_process import say

logger = logging.getLogger(__name__)

MOST_LEFT_OUT = 3  # updates of local SGD, or local steps, in a row that have NaN or Inf before a worker stops
_QUIET_SECONDS = 10.0  # of waiting for others before a line says so


class Refusals:
    """Counts the refused updates of one worker; the server sends their total with each answer.

    Also counts the local steps that a worker leaves out by itself.

    Args:
        worker: the worker's number, for the error.
        limit: number of refused updates in a row after which the worker stops.
        what: name of what is counted, for messages.
        fate: what happened to the counted ones, for messages.
    """

    def __init__(self, worker: int, limit: int, what: str = "update", fate: str = "refused") -> None:
        self.worker, self.limit, self.what, self.fate = worker, limit, what, fate
        self.total = self.in_a_row = 0
        self._reasons: set[str] = set()  # of those in a row

    def count(self, total: int, outlier: bool = False) -> None:
        """Takes the total after an answer.

        Args:
            outlier: whether the last update was refused for its norm, and not for NaN or Inf.

        Raises:
            RefusedError: ``limit`` updates in a row were refused.
        """
        more, self.total = max(0, total - self.total), total
        if not more:
            self.in_a_row, self._reasons = 0, set()
            return
        reason = f"a norm above {option('max_update_norm_ratio')}" if outlier else "NaN or Inf"
        self.in_a_row += more
        self._reasons.add(reason)
        logger.warning("the last %s was %s: it had %s (%d in all)", self.what, self.fate, reason, total)
        if self.in_a_row >= self.limit:
            reasons = " or ".join(sorted(self._reasons))
            raise RefusedError(
                f"the last {self.in_a_row} {self.what}s of worker {self.worker} had {reasons} and were {self.fate}; "
                "try a lower learning rate"
            )


class AsyncWorker:
    """The worker side of a method: joins a run, and takes the server's parameters.

    Args:
        client: the connection to the server.
        replica: this worker's parameters.
        most_refused: number of refused updates in a row after which the worker stops.

    Attributes:
        joined: whether the worker has taken the server's parameters.
        finished: whether the run is over.
        version: the server's version of the parameters that the worker started from.
        sequence: the number of the worker's next update.
        done: number of local steps that were not sent yet.
        drawn: number of micro-batches in this worker's steps, where these differ in their number; else None.
        micro_batches: how many of them the next gradient is to be of; 0 where this worker decides.
        first_micro_batch: number of the present step's first one in the run's order, where the server deals them.
        look_ahead: number of versions ahead of ``version`` at which the worker has started.
        batches: the worker's first batches, of which a digest goes with an update.
        details: what the worker tells of itself when it joins.
        share: its number of ranks over the mean number of all workers.
        last: values of the last exchange, for the log.
    """

    def __init__(self, client: ServerConnection, replica: Replica, most_refused: int) -> None:
        self.client, self.replica = client, replica
        self.refusals = Refusals(client.worker, most_refused)
        self.joined = self.finished = False
        self.version = self.sequence = self.done = 0
        self.look_ahead = 0.0
        self.drawn: int | None = None
        self.micro_batches = 0
        self.first_micro_batch: int | None = None
        self.share = 1.0
        self.batches = BatchDigest()
        self.last: dict[str, float] = {}
        self.details = JoinDetails()
        self._watched, self._watch = replica, ParameterWatch(replica.named)

    def join(self, spec: MethodSpec) -> Welcome:
        """Joins the run; the welcome says whether the server has parameters."""
        if spec.server.server_device != "cpu":
            self.details.gpu = self.replica.device.gpu
        return self.client.join(self.replica.layout, spec, self.details)

    def bring_parameters(self, state: str | None, from_checkpoint: bool = False) -> Welcome:
        """Sends worker 0's parameters, or the server state in a file, to a new server."""
        self.pin_exchanged()
        self.replica.read(self.client.slot, shared=True)
        return self.client.initialise(state, from_checkpoint)

    def begin(self, welcome: Welcome) -> None:
        """Starts from the server's parameters, and continues the server's counts of this worker's updates."""
        self.joined, self.finished = True, welcome.finished
        self.sequence, self.refusals.total = welcome.sequence, welcome.refused
        self.start()

    def start(self) -> None:
        """Takes the parameters that this worker's next work starts from: here the server's current ones."""
        self.pull()

    def start_again(self) -> None:
        """Takes again the parameters that the present work starts from: a replay gives them after the exchange."""
        self.pull()

    def pin_exchanged(self) -> None:
        """Pins the memory that server and worker exchange, so that a GPU accesses it directly. Called before each
        exchange: the memory lies elsewhere after the server has come back."""
        if self.replica.device.asynchronous:
            for name, vector in self.client.exchanged.items():
                if vector.is_cpu:
                    self.replica.device.pin(name, vector)

    def compressor_state(self) -> State | None:
        """The compressor's state for a checkpoint of this worker; None where updates are not compressed."""
        return None if self.client.compressor is None else self.client.compressor.state_dict()

    def restore_compressor(self, state: State | None) -> None:
        """Goes on from :meth:`compressor_state`, once the worker has begun; a state of another time is ignored."""
        if self.client.compressor is not None and state is not None:
            self.client.compressor.load_state_dict(state, self.sequence)

    def pull(self) -> None:
        """Takes the server's current parameters, in fp32."""
        self.version, self.look_ahead = self.client.pull(self.replica.write), 0.0
        self.note_parameters()

    def note_parameters(self) -> None:
        """Notes that the parameters are now as the run has made them, for :meth:`changed_parameter`."""
        if self._watched is not self.replica:
            self._watched, self._watch = self.replica, ParameterWatch(self.replica.named)
        self._watch.note()

    def changed_parameter(self) -> str | None:
        """Returns the name of a parameter that has changed since this worker took the server's; None if none has."""
        return self._watch.changed() if self._watched is self.replica else None

    def check_unchanged(self, changed: str | None = None) -> None:
        """Checks that no change of the parameters would be lost with the next pull; local SGD sends such changes.

        Args:
            changed: the name of a parameter of which a change is known.
        """

    def catch_up(self) -> None:
        """Sends the work that is done, then takes the server's current parameters, which may contain it."""
        self.settle()
        if not self.finished:
            self.send_done()
            self.pull()  # the parameters that came with an answer may be ahead of the server's own, or compressed

    def await_end(self) -> None:
        """Sends the work that is done, waits until no other worker is at work, and takes the finished parameters.

        A worker that has died, or does not come, is waited for as long as a round would wait for it.
        """
        self.settle()
        if self.finished:
            return
        self.send_done()
        if not self.finished:
            self._wait_for_end()
        self.pull()

    def _wait_for_end(self) -> None:
        told = f"worker {self.client.worker} has taken its last step, and waits for the end of the others"
        notice = threading.Timer(_QUIET_SECONDS, say, [f"{told}, to have the finished model"])
        notice.daemon = True
        notice.start()
        try:
            self.client.wait_for_work(for_end=True)
        finally:
            notice.cancel()
        self.finished = True

    def send_done(self) -> None:
        """Sends the work that is done and not sent yet."""

    def settle(self) -> None:
        """Waits for an exchange that is on its way; here there is none between two calls."""
