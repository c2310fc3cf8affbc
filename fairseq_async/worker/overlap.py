"""Local SGD whose worker goes on computing while the server's answer is on its way."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_async.method_spec import JsonObject
from fairseq_async.server.protocol import Assignment, Push, PushReply
from fairseq_async.worker.client import Client
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.replica import Replica


class Exchanged(NamedTuple):
    """What has come of an exchange: the answer, the next work, and the version of the parameters in the slot."""

    answer: PushReply
    finished: bool
    assignment: Assignment
    version: int


class OverlappedLocalSGDWorker(LocalSGDWorker):
    """Sends its local steps from another thread, and takes the answer at the end of the step in which it is there.

    ::

        θ_local ← θ_server + (θ_local − θ_sent)

    What was computed meanwhile counts for the next round: these steps did not see the other workers' last updates,
    which is the price. A round is at most one answer ahead. Keeps two copies of the parameters more. The batches of
    these steps follow on those of the round before, in its shard.
    """

    def __init__(self, client: Client, replica: Replica, max_refused: int) -> None:
        super().__init__(client, replica, max_refused)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._exchange: Future[Exchanged] | None = None
        self._sent = self._moved = torch.empty(0)

    def step(self, seconds: float, loss: float | Tensor | None = None, position: JsonObject | None = None) -> bool:
        """After each step of the inner optimizer; True when an answer was taken."""
        self.count(seconds, loss)
        if self._exchange is None:
            if self.done >= self.local_steps:
                self._send(position)
            return False
        if not self._exchange.done() and self.done < self.local_steps:
            return False
        self.settle()
        return True

    def exchange(self, position: JsonObject | None = None) -> None:
        """Waits for an answer that is on its way, then sends the rest and waits for that too."""
        self.settle()
        if self.done and not self.finished:
            super().exchange(position)

    def settle(self) -> None:
        """Takes the answer that is on its way, if there is one."""
        self.take_answer()

    def take_answer(self) -> None:
        """Waits for the answer that is on its way, if there is one, and goes on from what it brings."""
        if self._exchange is None:
            return
        started = self.clock()
        (answer, finished, assignment, version), self._exchange = self._exchange.result(), None
        self._waited = self.clock() - started
        counted = self.done, self._losses, self._step_seconds, self.epochs, self.tokens
        self._take_assignment(finished, assignment)
        self.version = version
        if self.finished:
            self.replica.write(self.client.slot)
        else:
            self.done, self._losses, self._step_seconds, self.epochs, self.tokens = counted
            self._go_on_from(answer)
        self._note(answer)
        self.last["steps_in_flight"] = float(counted[0])

    def _send(self, position: JsonObject | None) -> None:
        self._keep_sent()
        self._exchange = self._thread.submit(self._exchange_in_thread, self.message(position))
        self.sequence += 1
        self.offset += self.done
        self._progress += self.assignment.progress_per_step * self.done
        self.restart_counts()

    def _keep_sent(self) -> None:
        self._keep_memory(self.client.slot.numel())
        self.replica.read(self._sent)

    def _keep_memory(self, size: int) -> None:
        if not self._sent.numel():
            self._sent, self._moved = torch.zeros(size), torch.zeros(size)
            self.replica.device.pin("sent", self._sent)
            self.replica.device.pin("moved", self._moved)

    def _exchange_in_thread(self, push: Push) -> Exchanged:
        """In the other thread, which has the connection and the slot to itself until the future is done."""
        answer = self.client.push(self._subtract_sent, push)
        finished, assignment = self._wait_while_idle(answer.finished, answer.assignment)
        version = self.client.pull(lambda flat: None, starts=not finished)
        return Exchanged(answer, finished, assignment, version)

    def _subtract_sent(self, slot: Tensor) -> None:
        slot.sub_(self._sent)

    def _go_on_from(self, answer: PushReply) -> None:
        self._take(self.replica, self.client.slot, self._sent, self._moved)

    def _take(self, replica: Replica, slot: Tensor, sent: Tensor, moved: Tensor) -> None:
        """Adds to the server's parameters what was done meanwhile."""
        replica.read(moved)
        replica.write(moved.sub_(sent).add_(slot))
