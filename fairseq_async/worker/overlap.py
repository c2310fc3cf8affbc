"""The worker of overlapped local SGD: goes on computing while the server's answer is on its way."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol import Push, PushReply, WorkReply
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.replica import Replica


class Exchanged(NamedTuple):
    """The result of an exchange: the answer, the next work, and the version of the parameters in the slot."""

    answer: PushReply
    work: WorkReply
    version: int


class OverlappedLocalSGDWorker(LocalSGDWorker):
    """Sends its local steps from another thread, and takes the answer at the end of the step during which it arrives.

    ::

        θ_local ← θ_server + (θ_local − θ_sent)

    The steps that are computed meanwhile count for the next round. Their price: they start from parameters without the
    other workers' last updates. A round is at most one answer ahead. Needs memory for two more copies of the
    parameters. The batches of these steps follow those of the round before, in the same shard.
    """

    def __init__(self, client: Client, replica: Replica) -> None:
        super().__init__(client, replica)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._exchange: Future[Exchanged] | None = None
        self._sent = self._moved = torch.empty(0)

    def step(self, seconds: float, loss: float | Tensor | None = None, position: JsonObject | None = None) -> bool:
        """Counts one step of the inner optimizer, and sends the round or takes an answer when it is time; True when an
        answer was taken."""
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
        """Takes an answer that is on its way, then sends the steps done since, and takes the answer to these too."""
        self.settle()
        if not self.finished and self.has_work():
            super().exchange(position)

    def settle(self) -> None:
        """Waits for the answer that is on its way, if there is one, and takes it."""
        self.take_answer()

    def take_answer(self) -> None:
        """Waits for the answer that is on its way, if there is one, and goes on from the parameters that it brings."""
        if self._exchange is None:
            return
        started = self.clock()
        (answer, work, self.version), self._exchange = self._exchange.result(), None
        self._waited = self.clock() - started
        counted = self.done, self._losses, self._step_seconds, self.epochs, self.tokens
        self._take_work(work)
        if self.finished:
            self.replica.write(self.client.slot)
        else:
            self.done, self._losses, self._step_seconds, self.epochs, self.tokens = counted
            by_hand = not self.done and self.changed_parameter() is not None  # since they were sent, by no step
            self._go_on_from(answer)
            if not by_hand:
                self.note_parameters()
        self._note(answer)
        self.last["steps_in_flight"] = float(counted[0])

    def _send(self, position: JsonObject | None) -> None:
        self._keep_sent()
        self.note_parameters()
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
            self._sent, self._moved = (torch.zeros(size, dtype=torch.float32, device="cpu") for _ in range(2))
            self.replica.device.pin("sent", self._sent)
            self.replica.device.pin("moved", self._moved)

    def _exchange_in_thread(self, push: Push) -> Exchanged:
        """Pushes and pulls in the other thread, which has connection and slot to itself until the future is done."""
        answer = self.client.push(self._subtract_sent, push)
        work = self._wait_while_idle(answer)
        version = self.client.pull(lambda flat: None, starts=not work.finished)
        return Exchanged(answer, work, version)

    def _subtract_sent(self, slot: Tensor) -> None:
        slot.sub_(self._sent)

    def _go_on_from(self, answer: PushReply) -> None:
        self._add_own_steps(self.replica, self.client.slot, self._sent, self._moved)

    def _add_own_steps(self, replica: Replica, slot: Tensor, sent: Tensor, moved: Tensor) -> None:
        """Adds the local steps that were done meanwhile to the server's parameters in the slot."""
        replica.read(moved)
        replica.write(moved.sub_(sent).add_(slot))
