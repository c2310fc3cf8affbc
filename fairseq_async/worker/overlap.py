"""Local SGD whose worker goes on computing while the server's answer is on its way."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fairseq_async.server import ServerClient
from fairseq_async.worker.config import LocalSGDOptions
from fairseq_async.worker.local_sgd import LocalSGD
from fairseq_async.worker.replica import Replica


def local_sgd(client: ServerClient, replica: Replica, options: LocalSGDOptions) -> LocalSGD:
    """A worker's half, as the options say."""
    return (OverlappedLocalSGD if options.overlap else LocalSGD)(client, replica, options.max_refused)


class OverlappedLocalSGD(LocalSGD):
    """Sends its local steps from another thread, and takes the answer at the end of the step in which it is there.

    ::

        θ_local ← θ_server + (θ_local − θ_sent)

    What was computed meanwhile counts for the next round: these steps did not see the other workers' last updates,
    which is the price. A round is at most one answer ahead. Keeps two copies of the parameters more. The batches of
    these steps follow on those of the round before, in its shard.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._answer: Future[dict[str, Any]] | None = None
        self._sent = self._moved = torch.empty(0)

    def step(self, seconds: float, loss: float | Tensor | None = None, position: dict[str, Any] | None = None) -> bool:
        """After each step of the inner optimizer; True when an answer was taken."""
        self.count(seconds, loss)
        if self._answer is None:
            if self.done >= self.local_steps:
                self._send(position)
            return False
        if not self._answer.done() and self.done < self.local_steps:
            return False
        self.settle()
        return True

    def exchange(self, position: dict[str, Any] | None = None) -> None:
        """Waits for an answer that is on its way, then sends the rest and waits for that too."""
        self.settle()
        if self.done and not self.finished:
            super().exchange(position)

    def settle(self) -> None:
        """Takes the answer that is on its way, if there is one."""
        if self._answer is None:
            return
        started = self.clock()
        answer, self._answer = self._answer.result(), None
        self._waited = self.clock() - started
        counted = self.done, self._losses, self._step_seconds, self.epochs, self.tokens
        self._take(answer)
        self.version = answer["version"]
        if self.finished:
            self.replica.write(self.client.slot)
        else:
            self.done, self._losses, self._step_seconds, self.epochs, self.tokens = counted
            self._add_what_was_done_meanwhile()
        self._note(answer)
        self.last["steps_in_flight"] = float(counted[0])

    def _send(self, position: dict[str, Any] | None) -> None:
        if not self._sent.numel():
            self._sent, self._moved = torch.zeros_like(self.client.slot), torch.zeros_like(self.client.slot)
        self.replica.read(self._sent)
        message = self.message(position)
        self._answer = self._thread.submit(self._converse, message)
        self.sequence += 1
        self.offset += self.done
        self._place["progress"] += self._place["pace"] * self.done
        self.restart_counts()

    def _converse(self, message: dict[str, Any]) -> dict[str, Any]:
        """In the other thread, which has the connection and the slot to itself."""
        answer = self.wait_for_work(self.client.push(self._subtract_sent, **message))
        return answer | {"version": self.client.pull(lambda flat: None)}

    def _subtract_sent(self, slot: Tensor) -> None:
        slot.sub_(self._sent)

    def _add_what_was_done_meanwhile(self) -> None:
        self.replica.read(self._moved)
        self.replica.write(self._moved.sub_(self._sent).add_(self.client.slot))
