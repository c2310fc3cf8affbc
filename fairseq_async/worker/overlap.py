"""Exchanges of local SGD during which a worker goes on computing: overlapped, and in fragments."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment, in_turn
from fairseq_async.method.spec import JsonObject
from fairseq_async.options.config import AsyncLocalSGDOptions, LocalSGDOptions
from fairseq_async.protocol import Push, PushReply, Status, WorkReply
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.local_sgd import DirectExchange, LocalSGDWorker
from fairseq_async.worker.replica import Replica


def local_sgd_worker(client: ServerConnection, replica: Replica, options: LocalSGDOptions) -> LocalSGDWorker:
    """Returns the worker of local SGD that the options ask for: it exchanges directly, overlapped, or in fragments.

    Raises:
        ConfigurationError: the model has fewer tensors than the options have fragments.
    """
    worker = LocalSGDWorker(client, replica)
    if isinstance(options, AsyncLocalSGDOptions) and options.in_fragments:
        worker.exchanges = BackgroundExchange(worker, options.fragments, options.fragment_delay)
    elif isinstance(options, AsyncLocalSGDOptions) and options.overlap:
        worker.exchanges = BackgroundExchange(worker)
    return worker


class Exchanged(NamedTuple):
    """The result of an exchange.

    Attributes:
        version: of the parameters in the slot.
        whole: whether the worker goes on from the whole model in the slot, without its steps since.
    """

    answer: PushReply
    work: WorkReply
    version: int
    whole: bool


class BackgroundExchange(DirectExchange):
    """Sends local steps from another thread, and takes the answer some local steps later.

    ::

        θ_p ← Θ_p + (θ_p − θ_p when it was sent), with the server's new Θ_p

    Overlapped (``fragment_delay`` is None), p is the whole model, and the worker takes the answer at the end of the
    step during which it arrives, one round later at most. In fragments, p is the fragment whose turn it is: the worker
    sends it after H/P local steps, and takes the answer exactly τ steps later; it waits if the answer is not there by
    then. With τ = 0 it takes Θ_p as it is. See :mod:`fairseq_async.algorithms.fragments` for the papers.

    The steps that are computed meanwhile count for the next round. Their price: they start from parameters without the
    other workers' last updates. Their batches follow those of the round before, in the same shard. Needs memory for two
    more copies of the parameters, or of a fragment. The slot holds Θ, and Θ_p − θ_p while that is sent.

    Lost work: a worker that is killed loses the steps since each fragment was sent, H at most. So does a worker in
    fragments that takes the server's whole model, by :meth:`AsyncWorker.catch_up` or at the end of the run, except for
    the fragment that it sends then. A worker whose update of a fragment was refused takes the whole model too: its
    other fragments have NaN or Inf as well.

    Args:
        fragment_delay: τ; None takes each answer when it has come.
    """

    def __init__(self, worker: LocalSGDWorker, fragments: int = 1, fragment_delay: int | None = None) -> None:
        super().__init__(worker)
        self._delay, self._fragments = fragment_delay, worker.replica.layout.fragments(fragments)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._exchange: Future[Exchanged] | None = None
        self._sent = self._moved = torch.empty(0)
        self._parts: list[Replica] = []
        self._pulled: int | None = None  # number of the update whose fragment was pulled last; None: the whole model

    def after_step(self, position: JsonObject | None) -> bool:
        """Sends the round or takes an answer when it is time; True when an answer was taken."""
        worker = self.worker
        taken = self._exchange is not None and self._is_due(self._exchange)
        if taken:
            self.take_answer()
        waits = taken and self._delay is None  # overlapped, a step has one of the two
        if self._exchange is None and worker.done >= worker.local_steps and not (worker.finished or waits):
            self._send(position)
            if self._delay == 0:
                self.take_answer()
                taken = True
        return taken

    def _is_due(self, exchange: Future[Exchanged]) -> bool:
        if self._delay is None:
            return exchange.done() or self.worker.done >= self.worker.local_steps
        return self.worker.done >= self._delay

    def run(self, position: JsonObject | None) -> None:
        """Sends what is done, a fragment of it where the model has several, and takes the answer."""
        self._send(position)
        self.take_answer()

    def settle(self) -> None:
        """Waits for the answer that is on its way. Overlapped, it is taken; else it is taken at its own time."""
        if self._delay is None:
            self.take_answer()
        elif self._exchange is not None:
            wait([self._exchange])

    def take_answer(self) -> None:
        """Waits for the answer that is on its way, if there is one, and goes on from the parameters that it brings."""
        worker = self.worker
        if self._exchange is None:
            return
        started, in_flight = worker.clock(), worker.done
        (answer, work, worker.version, whole), self._exchange = self._exchange.result(), None
        waited = worker.clock() - started
        worker.take_work(work)
        by_hand = not in_flight and worker.changed_parameter() is not None  # since they were sent, by no step
        if whole:
            worker.replica.write(worker.client.slot)
        else:
            self._go_on_from(in_turn(self._fragments, worker.sequence - 1), own_steps=in_flight > 0 or by_hand)
        if work.finished:
            worker.restart_counts()
        if not by_hand:
            worker.note_parameters()
        worker.note_answer(answer, waited)
        worker.last["steps_in_flight"] = float(in_flight)

    def start_again(self) -> None:
        """Takes again the parameters of the last exchange: a replay gives them after the exchange."""
        worker = self.worker
        if self._exchange is None and self._pulled is None:
            return worker.start()
        self.settle()
        version = self._pull(self._pulled)
        if self._exchange is None:
            worker.version = version
            self._go_on_from(in_turn(self._fragments, worker.sequence - 1), own_steps=False)
        else:
            before, self._exchange = self._exchange.result(), Future()
            self._exchange.set_result(before._replace(version=version))

    def _send(self, position: JsonObject | None) -> None:
        worker = self.worker
        fragment = in_turn(self._fragments, worker.sequence)
        self._replica_of(fragment).read(self._room(fragment))
        worker.note_parameters()
        self._exchange = self._thread.submit(self._exchange_in_thread, fragment, worker.message(position))
        worker.sequence += 1
        worker.count_as_sent()

    def _exchange_in_thread(self, fragment: Fragment, push: Push) -> Exchanged:
        """Pushes and pulls in the other thread, which has connection and slot to itself until the future is done."""
        worker, sent = self.worker, self._sent[: fragment.size]
        answer = worker.client.push(lambda slot: fragment.of(slot).sub_(sent), push)
        work = worker.wait_while_idle(answer)
        lost = answer.refused > worker.refusals.total  # DUPLICATE, where the answer that said REFUSED was lost
        refused = self._delay is not None and (answer.status is Status.REFUSED or lost)
        whole = work.finished or refused
        self._pulled = None if whole or self._delay is None else push.sequence
        return Exchanged(answer, work, self._pull(self._pulled, starts=not work.finished), whole)

    def _pull(self, fragment_of: int | None, starts: bool = True) -> int:
        return self.worker.client.pull(lambda flat: None, starts=starts, fragment_of=fragment_of)

    def _go_on_from(self, fragment: Fragment, own_steps: bool) -> None:
        """Takes the fragment in the slot, with the local steps that were done since it was sent."""
        replica, slot = self._replica_of(fragment), fragment.of(self.worker.client.slot)
        if not own_steps:
            return replica.write(slot)
        sent, moved = self._room(fragment), self._moved[: fragment.size]
        replica.read(moved)
        replica.write(moved.sub_(sent).add_(slot))

    def _replica_of(self, fragment: Fragment) -> Replica:
        """The replica of one fragment of this worker's parameters; made once, as each may hold a GPU's stream and
        memory."""
        if len(self._fragments) == 1:
            return self.worker.replica
        if not self._parts:  # at the first exchange, since the attribute replica may be set again before the run begins
            self._parts = [self.worker.replica.part(each.tensors) for each in self._fragments]
        return self._parts[self._fragments.index(fragment)]

    def _room(self, fragment: Fragment) -> Tensor:
        """Memory for the fragment's parameters at the time when it is sent."""
        if not self._sent.numel():
            size = max(each.size for each in self._fragments)
            self._sent, self._moved = (torch.zeros(size, dtype=torch.float32, device="cpu") for _ in range(2))
            self.worker.replica.device.pin("sent", self._sent)
            self.worker.replica.device.pin("moved", self._moved)
        return self._sent[: fragment.size]
