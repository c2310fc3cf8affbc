"""The worker of local SGD in fragments: sends one fragment at a time, and takes it back some local steps later."""

from concurrent.futures import Future, wait

from torch import Tensor

from fairseq_async.algorithms import Fragment, in_turn
from fairseq_async.method.spec import JsonObject
from fairseq_async.options.config import AsyncLocalSGDOptions
from fairseq_async.protocol import Push, PushReply, Status
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.overlap import Exchanged, OverlappedLocalSGDWorker
from fairseq_async.worker.replica import Replica


class FragmentedLocalSGDWorker(OverlappedLocalSGDWorker):
    """Sends the fragment whose turn it is after H/P local steps, and takes it back τ steps later.

    ::

        δ_p = Θ_p − θ_p;  τ steps;  θ_p ← Θ_p + (θ_p − θ_p when it was sent), with the new Θ_p

    Θ_p are the server's parameters of fragment p as this worker took them last. The slot holds Θ, and δ_p while that is
    sent. The worker takes the answer exactly τ steps after it sent the update, and waits if the answer is not there by
    then. With τ = 0 it takes Θ_p as it is. Needs memory for two more fragments. See
    :mod:`fairseq_async.algorithms.fragments` for the papers.

    Lost work: a worker that is killed loses the steps since each fragment was sent, H at most. So does a worker that
    takes the server's whole model, by :meth:`catch_up` or at the end of the run, except for the fragment that it sends
    then. A worker whose update was refused takes the whole model too: its other fragments have NaN or Inf as well.
    """

    def __init__(self, client: Client, replica: Replica, options: AsyncLocalSGDOptions) -> None:
        super().__init__(client, replica)
        self._fragment_delay = options.fragment_delay
        self._fragments = replica.layout.fragments(options.fragments)
        self._parts: list[Replica] = []
        self._pulled: int | None = None  # number of the update whose fragment was pulled last; None: the whole model

    def step(self, seconds: float, loss: float | Tensor | None = None, position: JsonObject | None = None) -> bool:
        """Counts one step of the inner optimizer, and sends or takes a fragment when it is time; True when an answer
        was taken."""
        self.count(seconds, loss)
        taken = self._exchange is not None and self.done >= self._fragment_delay
        if taken:
            self.take_answer()
        if self._exchange is None and self.done >= self.local_steps and not self.finished:
            self._send(position)
            if not self._fragment_delay:
                self.take_answer()
                taken = True
        return taken

    def exchange(self, position: JsonObject | None = None) -> None:
        """Takes an answer that is on its way, then sends the next fragment early and takes the answer to that too."""
        self.take_answer()
        if not self.finished and self.has_work():
            self._send(position)
            self.take_answer()

    def pull(self) -> None:
        """Takes an answer that is on its way, then the server's whole current parameters."""
        self.take_answer()
        super().pull()

    def settle(self) -> None:
        """Waits for the exchange that is on its way; its answer is still taken at its own time, after τ steps."""
        if self._exchange is not None:
            wait([self._exchange])

    def start_again(self) -> None:
        """Takes again the parameters of the last exchange: a replay gives them after the exchange."""
        if self._exchange is None and self._pulled is None:
            return self.start()
        self.settle()
        version = self._pull_into_slot(self._pulled)
        if self._exchange is None:
            self.version = version
            self._write(in_turn(self._fragments, self.sequence - 1))
        else:
            before, self._exchange = self._exchange.result(), Future()
            self._exchange.set_result(before._replace(version=version))

    def _keep_sent(self) -> None:
        fragment = in_turn(self._fragments, self.sequence)
        self._part(fragment).read(self._room(fragment))

    def _exchange_in_thread(self, push: Push) -> Exchanged:
        fragment = in_turn(self._fragments, push.sequence)
        answer = self.client.push(lambda slot: fragment.of(slot).sub_(self._room(fragment)), push)
        work = self._wait_while_idle(answer)
        lost = answer.refused > self.refusals.total  # the answer that it was refused: this one says that it came before
        refused = answer.status is Status.REFUSED or lost
        self._pulled = None if work.finished or refused else push.sequence
        return Exchanged(answer, work, self._pull_into_slot(self._pulled, starts=not work.finished))

    def _pull_into_slot(self, fragment_of: int | None, starts: bool = True) -> int:
        return self.client.pull(lambda flat: None, starts=starts, fragment_of=fragment_of)

    def _go_on_from(self, answer: PushReply) -> None:
        if self._pulled is None:
            self.replica.write(self.client.slot)
        else:
            fragment = in_turn(self._fragments, self._pulled)
            if self.done:
                slot = fragment.of(self.client.slot)
                self._add_own_steps(self._part(fragment), slot, self._room(fragment), self._moved[: fragment.size])
            else:
                self._write(fragment)

    def _write(self, fragment: Fragment) -> None:
        """Takes the fragment in the slot as it is."""
        self._part(fragment).write(fragment.of(self.client.slot))

    def _part(self, fragment: Fragment) -> Replica:
        """The replica of one fragment of this worker's parameters; made once, as each may hold a GPU's stream and
        memory."""
        if not self._parts:  # at the first exchange, since the attribute replica may be set again before the run begins
            self._parts = [self.replica.part(each.tensors) for each in self._fragments]
        return self._parts[self._fragments.index(fragment)]

    def _room(self, fragment: Fragment) -> Tensor:
        """Memory for the fragment's parameters at the time when it is sent."""
        self._keep_memory(max(each.size for each in self._fragments))
        return self._sent[: fragment.size]
