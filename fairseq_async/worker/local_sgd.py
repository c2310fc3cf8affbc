"""The worker side of local SGD: H steps of its own, then an exchange with the server."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from fairseq_async.errors import ConfigurationError
from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol import Assignment, Push, PushReply, Report, Welcome, WorkReply
from fairseq_async.protocol.receipt import Status
from fairseq_async.worker.async_worker import MOST_LEFT_OUT, AsyncWorker
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.replica import Replica


class LocalSGDWorker(AsyncWorker):
    """Counts local steps, and exchanges when as many are done as the server has asked for.

    An exchange leaves the inner optimizer's state as it is. The slot holds θ_start between two exchanges, and the
    pseudo-gradient θ_start − θ is computed in place there, so that a worker keeps no further copy of the model.

    Args:
        client: the connection to the server.
        replica: the parameters that the inner optimizer steps.

    Attributes:
        exchanges: how the worker exchanges; directly by default.
        clock: returns the time in seconds, by which waiting for answers is measured.
        assignment: the work that the server has assigned; ``done`` of its local steps are taken.
        offset: number of batches of the shard that were drawn before this worker's, or that others draw.
        epochs, tokens: amount of data since the last exchange, where the caller counts it.
        step_number: number of the worker's next local step, counted on from the run's progress when the worker began;
            no step of this worker has the number of another one, though the run's progress jumps.
    """

    def __init__(self, client: ServerConnection, replica: Replica) -> None:
        super().__init__(client, replica, MOST_LEFT_OUT)
        self.exchanges = DirectExchange(self)
        self.clock: Callable[[], float] = time.perf_counter
        self.assignment = Assignment(local_steps=0)
        self.offset = 0
        self.epochs = self.tokens = 0.0
        self.step_number = 0
        self._most_progress = math.inf
        self._progress = 0.0  # position in the schedule at the first step that is not sent yet
        self._furthest = 0.0  # the highest estimate of the run's progress so far
        self._losses: list[float | Tensor] = []
        self._step_seconds: list[float] = []
        self.waited = 0.0
        self._has_stepped = False

    @property
    def local_steps(self) -> int:
        return self.assignment.local_steps

    @property
    def shard(self) -> int | None:
        """The part of the training set to draw from; None where the server chooses none."""
        return self.assignment.shard

    @property
    def progress(self) -> float:
        """Position in the learning-rate schedule, in mean local steps per worker. It is the progress of the shard or of
        the run, not this worker's own count, with which a fast worker would end its schedule long before the others.

        A slow worker may be behind the others' last steps: every step that is still taken is the last one at most.
        """
        return self._limited(self._progress + self.assignment.progress_per_step * self.done)

    @property
    def total_progress(self) -> float:
        """Mean local steps per worker in the run, as the last assignment from the server says."""
        return self.assignment.total_progress

    @property
    def run_progress(self) -> float:
        """Progress of the whole run, in mean local steps per worker. Between two assignments it is an estimate: the
        other workers are taken to go on at their measured speed or, where the schedule follows a shard, at this one's.

        It never goes back. Where others were slower than the estimate, it stays until they are there: else a schedule
        would take back rates, and a ``Trainer`` log a step with the rate of one that it had logged before.
        """
        return max(self._furthest, self._estimate())

    def _estimate(self) -> float:
        return self.progress if self.shard is None else self._limited(self.total_progress + self.done)

    def _limited(self, progress: float) -> float:
        return progress if self.finished else min(progress, self._most_progress)

    def begin(self, welcome: Welcome) -> None:
        """Starts from the server's parameters, with the first assignment."""
        self._most_progress = (welcome.total_steps or math.inf) - 1
        work = self.wait_while_idle(welcome)
        super().begin(replace(welcome, finished=work.finished))
        self.take_work(work)
        self.step_number = int(self._progress)

    def start(self) -> None:
        """Takes the parameters that the next local steps start from, which may be ahead of the server's own; at the
        end of the run, the server's own parameters."""
        self.version = self.client.pull(self.replica.write, starts=not self.finished)
        self.note_parameters()

    def step(self, seconds: float, loss: float | Tensor | None = None, position: JsonObject | None = None) -> bool:
        """Counts one step of the inner optimizer, and exchanges when the round is done; True after an exchange.

        Args:
            seconds: duration of the step, without time spent waiting for others.
            loss: loss of the step's batch, for the log; a scalar tensor is read only when it is needed.
            position: this worker's position in its data, for its restart.

        Raises:
            RefusedError: the last :data:`MOST_LEFT_OUT` updates had NaN or Inf, or were outliers.
            ExchangeError: the server is gone.
        """
        self.count(seconds, loss)
        return self.exchanges.after_step(position)

    def count(self, seconds: float, loss: float | Tensor | None) -> None:
        """Counts one more local step."""
        self.done += 1
        self.step_number += 1
        self._has_stepped = True
        self._furthest = self.run_progress
        self._step_seconds.append(seconds)
        if loss is not None:
            self._losses.append(loss)

    def send_done(self) -> None:
        """Takes an answer that is on its way, then ends the round early, with the local steps that are done: the rest
        of the assignment is dropped."""
        self.exchanges.take_answer()
        if not self.finished and self.has_work():
            self.exchanges.run(None)

    def pull(self) -> None:
        """Takes an answer that is on its way, then the server's whole current parameters."""
        self.exchanges.take_answer()
        super().pull()

    def settle(self) -> None:
        """Waits for the answer that is on its way, if there is one; see :meth:`BackgroundExchange.settle`."""
        self.exchanges.settle()

    def start_again(self) -> None:
        """Takes again the parameters that the present work starts from: a replay gives them after the exchange."""
        self.exchanges.start_again()

    def has_work(self) -> bool:
        """Whether there is something to send: local steps, or what the script has done to the parameters after them.

        Raises:
            ConfigurationError: parameters have changed, and this worker has taken no local step at all.
        """
        if self.done:
            return True
        changed = self.changed_parameter()
        if changed is not None and not self._has_stepped:
            raise ConfigurationError(
                f"{changed} has changed without a step of the run's optimizer, and the server's parameters would "
                "overwrite the change: call step() of the optimizer that the run was given, and of no other"
            )
        return self.client.on_any_rank(changed is not None)

    def message(self, position: JsonObject | None) -> Push:
        """The message that goes with the pseudo-gradient."""
        return Push(self.sequence, self.version, float(max(1, self.done)), self._report(position), pulls=True)

    def wait_while_idle(self, answer: Welcome | PushReply) -> WorkReply:
        """Returns the work that an answer brings; waits for other work as long as the assignment is to do nothing."""
        work = WorkReply(answer.finished, answer.assignment)
        while work.assignment.idle and not work.finished:
            work = self.client.wait_for_work()
        return work

    def _report(self, position: JsonObject | None) -> Report:
        return Report(
            local_steps=self.done,
            step_seconds=statistics.median(self._step_seconds) if self._step_seconds else 0.0,
            computing_seconds=sum(self._step_seconds),
            waiting_seconds=self.waited,
            loss=statistics.fmean(map(float, self._losses)) if self._losses else None,
            shard=self.shard,
            offset=self.offset,
            progress=self._progress,
            progress_per_step=self.assignment.progress_per_step,
            epochs=self.epochs,
            tokens=self.tokens,
            share=None if self.share == 1.0 else self.share,
            position=position,
            first_batch=self.batches.take(),
        )

    def take_work(self, work: WorkReply) -> None:
        """Takes the work that the server has assigned."""
        self.finished, self.assignment = work.finished, work.assignment
        self.offset, self._progress = work.assignment.offset, work.assignment.progress

    def count_as_sent(self) -> None:
        """Counts the local steps that are done as sent, before the answer assigns others."""
        self.offset += self.done
        self._progress += self.assignment.progress_per_step * self.done
        self.restart_counts()

    def restart_counts(self) -> None:
        """Resets the counts at the beginning of a round."""
        self.epochs = self.tokens = 0.0
        self.done, self._losses, self._step_seconds = 0, [], []

    def note_answer(self, answer: PushReply, waited: float) -> None:
        """Notes what an answer says of the last update, for which the worker has waited so many seconds."""
        self.waited = waited
        self.last = {"staleness": float(answer.staleness), "norm": answer.norm, "cosine": answer.cosine}
        self.last |= {"local_steps": float(self.local_steps), "waiting_seconds": self.waited}
        self.refusals.count(answer.refused, outlier=answer.status is Status.OUTLIER)


class DirectExchange:
    """Exchanges when the round is done: sends θ_start − θ, waits, and starts from the server's parameters.

    The base class of other ways to exchange.
    """

    def __init__(self, worker: LocalSGDWorker) -> None:
        self.worker = worker

    def after_step(self, position: JsonObject | None) -> bool:
        """Runs after each local step; returns whether an answer was taken."""
        if self.worker.done < self.worker.local_steps:
            return False
        self.run(position)
        return True

    def run(self, position: JsonObject | None) -> None:
        """Sends the local steps that are done, and starts again from the server's parameters."""
        worker, started = self.worker, self.worker.clock()
        worker.pin_exchanged()
        answer = worker.client.push(worker.replica.subtract, worker.message(position))
        work = worker.wait_while_idle(answer)
        worker.sequence += 1
        worker.take_work(work)
        worker.restart_counts()
        worker.start()
        worker.note_answer(answer, worker.clock() - started)

    def settle(self) -> None:
        """Waits for the answer that is on its way; here there is none between two steps."""

    def take_answer(self) -> None:
        """Waits for the answer that is on its way, and takes it; here there is none between two steps."""

    def start_again(self) -> None:
        """Takes again the parameters that the present work starts from."""
        self.worker.pull()
