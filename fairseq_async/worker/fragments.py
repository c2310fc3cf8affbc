"""Local SGD whose worker exchanges the model in fragments, and takes each back some steps after it was sent."""

from concurrent.futures import Future, wait

from torch import Tensor

from fairseq_async.algorithms import Fragment, in_turn
from fairseq_async.config import AsyncLocalSGDOptions
from fairseq_async.method_spec import JsonObject
from fairseq_async.server import Status
from fairseq_async.server.protocol import Push, PushReply
from fairseq_async.worker.client import Client
from fairseq_async.worker.overlap import Exchanged, OverlappedLocalSGDWorker
from fairseq_async.worker.replica import Replica


class FragmentedLocalSGDWorker(OverlappedLocalSGDWorker):
    """Sends the fragment whose turn it is after H/P local steps, and takes it back τ steps later.

    ::

        δ_p = Θ_p − θ_p;  τ steps;  θ_p ← Θ_p + (θ_p − θ_p when it was sent), with the new Θ_p

    Θ_p are the server's parameters as this worker has taken them last. The slot holds Θ, and δ_p while it is sent. The
    answer is taken τ steps after the update was sent, neither sooner nor later: for an answer that takes longer the
    worker waits. With τ = 0 it takes Θ_p as it is. Keeps two fragments more. See
    :mod:`fairseq_async.algorithms.fragments` for the papers.

    Lost work: a worker that is killed loses the steps since each fragment was sent, H at most. So does one that takes
    the server's parameters whole, by :meth:`catch_up` or at the end of the run, but for the fragment that it sends
    then. A worker whose update was refused takes the whole model too: its other fragments have NaN or Inf as well.
    """

    def __init__(self, client: Client, replica: Replica, options: AsyncLocalSGDOptions) -> None:
        super().__init__(client, replica, options.max_refused)
        self._delay = options.fragment_delay
        self._fragments = replica.layout.fragments(options.fragments)
        self._parts: list[Replica] = []
        self._whole: Replica | None = None  # whose parts they are; the replica may be set again
        self._pulled: int | None = None  # update whose fragment was taken last; None for the whole model

    def step(self, seconds: float, loss: float | Tensor | None = None, position: JsonObject | None = None) -> bool:
        """After each step of the inner optimizer; True when an answer was taken."""
        self.count(seconds, loss)
        taken = self._exchange is not None and self.done >= self._delay
        if taken:
            self.take_answer()
        if self._exchange is None and self.done >= self.local_steps and not self.finished:
            self._send(position)
            if not self._delay:
                self.take_answer()
                taken = True
        return taken

    def exchange(self, position: JsonObject | None = None) -> None:
        """Takes an answer that is on its way, then sends the rest of the turn and takes the answer to that too."""
        self.take_answer()
        if self.done and not self.finished:
            self._send(position)
            self.take_answer()

    def pull(self) -> None:
        """Takes the server's current parameters, whole, after what is on its way."""
        self.take_answer()
        super().pull()

    def settle(self) -> None:
        """Waits for the exchange that is on its way; its answer is taken when its time comes, as without this call."""
        if self._exchange is not None:
            wait([self._exchange])

    def start(self) -> None:
        """Takes the whole model."""
        super().start()
        self._pulled = None

    def start_again(self) -> None:
        """Takes anew what the last exchange has brought, which a replay gives late."""
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
        finished, assignment = self._wait_while_idle(answer.finished, answer.assignment)
        self._pulled = None if finished or answer.status is Status.REFUSED else push.sequence
        return Exchanged(answer, finished, assignment, self._pull_into_slot(self._pulled, starts=not finished))

    def _pull_into_slot(self, fragment_of: int | None, starts: bool = True) -> int:
        return self.client.pull(lambda flat: None, starts=starts, fragment_of=fragment_of)

    def _go_on_from(self, answer: PushReply) -> None:
        if self._pulled is None:
            self.replica.write(self.client.slot)
        else:
            fragment = in_turn(self._fragments, self._pulled)
            if self.done:
                slot = fragment.of(self.client.slot)
                self._take(self._part(fragment), slot, self._room(fragment), self._moved[: fragment.size])
            else:
                self._write(fragment)

    def _write(self, fragment: Fragment) -> None:
        """Takes the fragment in the slot as it is."""
        self._part(fragment).write(fragment.of(self.client.slot))

    def _part(self, fragment: Fragment) -> Replica:
        """This worker's own parameters of the fragment; made once, since each may have a GPU's stream and memory."""
        if self._whole is not self.replica:
            self._whole, self._parts = self.replica, [self.replica.part(each.tensors) for each in self._fragments]
        return self._parts[self._fragments.index(fragment)]

    def _room(self, fragment: Fragment) -> Tensor:
        """Memory for the fragment as it is sent."""
        self._keep_memory(max(each.size for each in self._fragments))
        return self._sent[: fragment.size]
