"""The requests of a worker to the server of its run: updates, parameters, and what goes with them."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from fairseq_async import protocol
from fairseq_async.algorithms import Fragment, in_turn
from fairseq_async.errors import AsyncError, ExchangeError, RefusedError
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, Push, PushReply, Status, Welcome
from fairseq_async.protocol.division import exchanged
from fairseq_async.records.state_files import placed
from fairseq_async.worker.connection.compressor import Compressor
from fairseq_async.worker.connection.lasting_connection import LastingConnection, never


class Client(LastingConnection):
    """The requests of one worker to the server of its run, on a
    :class:`~fairseq_async.worker.connection.lasting_connection.LastingConnection`, which documents the arguments.

    Every method raises :class:`ExchangeError` when the server stays away and :class:`RefusedError` when the server
    refuses the request.

    Attributes:
        compressor: encodes this worker's updates; None where they are sent in fp32, and before :meth:`join`.
    """

    def __init__(
        self,
        address: str,
        token: str,
        worker: int | None,
        patience: float = 0.0,
        on_loss: Callable[[AsyncError], None] | None = None,
        tls: Path | None = None,
        hopeless: Callable[[], bool] = never,
    ) -> None:
        self._schedule_events, self._received = 0, 0  # _received: bytes of parameters since the last push
        # the pull that the parameters behind the last answer to a push fulfil, and their version
        self._brought: tuple[protocol.Pull, int] | None = None
        self.compressor: Compressor | None = None
        self._fragments: tuple[Fragment, ...]
        super().__init__(address, token, worker, patience, on_loss, tls, hopeless)

    def join(self, layout: Layout, spec: MethodSpec) -> Welcome:
        """Introduces the worker; waits until the server has parameters, unless this is worker 0, which brings them.

        Raises:
            RefusedError: the server does not take this worker, or has other moments than its optimizers bring.
        """
        codec = spec.compress.push
        self._fragments = exchanged(spec, layout)
        self.compressor = None if codec is None else Compressor(codec, spec, layout, self.worker)
        welcome = super().join(layout, spec)
        if self.moments and welcome.moments not in (None, self.moments):
            raise RefusedError(
                f"the optimizer of worker {self.worker} has stepped before this run, but not as that of worker 0, "
                "whose moments the run has: load the same state in every worker, or in worker 0 alone"
            )
        return welcome

    def initialise(self, state: str | None, from_checkpoint: bool = False) -> Welcome:
        """Gives a new server the parameters in worker 0's slot, or a whole state in a file; a server on another machine
        must see the same disk. ``from_checkpoint`` says that worker 0 has begun from a checkpoint, which the other
        workers are to read too."""
        with nullcontext() if state is None else placed(Path(state), Path(self._state_path)):
            request = protocol.Initialise(state is not None, from_checkpoint, self.moments)
            welcome = self._ask(request, Welcome, lambda: self._sent)
        self._initialised = True
        return welcome

    def push(self, write: Callable[[Tensor], object], push: Push) -> PushReply:
        """Calls ``write(slot)`` with this worker's flat slot, then tells the server that the update is there.

        The answer comes when the update is applied.
        """
        with self.lock:
            self.prepare(write)
            start = self._receiver.payload
            push = replace(push, report=replace(push.report, bytes_received=self._received, start_payload=start))
            compressor = self.compressor
            answer = self._push(push) if compressor is None else self._push_compressed(push, compressor)
            self._received, self._brought = 0, None
            if answer.with_parameters:
                self._receive_behind_answer(push, answer)
        return answer

    def _push(self, push: Push) -> PushReply:
        sent = self._part(push.sequence) if self._lines is None else self.slot
        push = replace(push, report=replace(push.report, bytes_sent=4 * sent.numel()))
        return self._ask(push, PushReply, lambda: self._part(push.sequence) if self.remote else None)

    def _push_compressed(self, push: Push, compressor: Compressor) -> PushReply:
        """Sends the payload behind the message, also to a server on this machine, which decodes it into the slot."""
        push, payload = compressor.encode(push, self._part(push.sequence))
        answer = self._ask(push, PushReply, lambda: payload)
        if answer.status is Status.FINISHED:
            compressor.withdraw()
        else:
            compressor.settle_meanwhile(answer.taken)  # while the next batch is computed
        return answer

    def prepare(self, write: Callable[[Tensor], object]) -> None:
        """Calls ``write(slot)`` ahead of a push; by that push, the slot may have been replaced by another."""
        with self.lock:
            if not self.remote and self._channel.is_closed():
                # Hazard: after a long pause of this process its successor may have the same slot, and may use it.
                self._reconnect(ExchangeError(self.loss))
            write(self.slot)

    def _part(self, sequence: int | None) -> Tensor:
        """The slot's view of the fragment that the update of this number is of, or for None of all fragments, without
        the parts of shards on other machines."""
        if sequence is None:
            return self.slot if self._lines is None else self._fragments[0].of(self.slot)
        return in_turn(self._fragments, sequence).of(self.slot)

    def _make_room(self, fragment_of: int | None) -> None:
        """Sets where the tensor behind the next answer is received. Runs at each attempt to send a request, since the
        connection may be another after the server has come back; returns None: no tensor goes with the request."""
        if self._lines is not None:
            self._channel.companions = self._lines.open(self.slot)
        self._receiver.open(self._channel, self._part(fragment_of) if self.remote else None)

    def pull(
        self,
        copy: Callable[[Tensor], object],
        look_ahead: float = 0.0,
        starts: bool = False,
        fragment_of: int | None = None,
    ) -> int:
        """Calls ``copy(flat parameters)`` on one version, and returns the version; several workers may pull at once.

        Args:
            look_ahead: number of versions ahead of it, along the server's last step; only the server can compute these
                parameters.
            starts: work starts from these parameters: they may be ahead of the server's own where its rule looks ahead,
                and compressed. Otherwise they are the server's own, in fp32.
            fragment_of: number of an update of this worker: pulls only the fragment that this update is of, into its
                place in the slot. ``copy`` is still called on the whole slot.
        """
        while (memory := self.memory) is not None and memory.publishes and not look_ahead:
            try:
                version = memory.read(copy, partial(self._is_gone, memory))
                with self.lock:
                    if memory is self.memory:  # not if it is the memory of a server that died meanwhile
                        self._restored_version = None
                        self._received += 4 * memory.parameters
                        return version
            except ExchangeError as error:  # the server died while it published
                with self.lock:
                    if memory is self.memory:
                        self._reconnect(error)
        with self.lock:
            request = protocol.Pull(look_ahead, starts, fragment_of)
            brought, self._brought = self._brought, None
            if brought is not None and brought[0] == request and self._restored_version is None:
                version = brought[1]
            else:
                version = self._pull(request)
        copy(self.slot)
        return version

    def _pull(self, request: protocol.Pull) -> int:
        while True:
            reply = self._ask(request, protocol.PullReply, lambda: self._make_room(request.fragment_of))
            try:
                self._write_parts(reply)
            except ExchangeError as error:
                self._reconnect(error)
            else:
                return self._write_received(reply, request)

    def _write_parts(self, reply: protocol.PullReply) -> None:
        """Writes the parts from shards on other machines into the slot."""
        if self._lines is not None:
            self._lines.take(reply, self.slot)
            self._channel.companions = ()  # until the next pull there is no room for what comes

    def _receive_behind_answer(self, push: Push, answer: PushReply) -> None:
        """Takes the parameters behind an answer to a push, for the next :meth:`pull`, which otherwise requests them."""
        fragment_of = push.sequence if len(self._fragments) > 1 else None
        request = protocol.Pull(answer.assignment.look_ahead, starts=True, fragment_of=fragment_of)
        try:
            self._make_room(fragment_of)
            reply = self._channel.answer(protocol.PullReply)
            self._write_parts(reply)
            self._brought = request, self._write_received(reply, request)
        except ExchangeError as error:
            self._reconnect(error)

    def _write_received(self, reply: protocol.PullReply, request: protocol.Pull) -> int:
        """Writes received parameters into the slot; returns their version."""
        self._restored_version = None
        self._received += self._receiver.take(self._channel, reply, self.slot, request)
        return reply.version

    def schedule_event(
        self, event: Literal["begin_epoch", "end_epoch"], epoch: int, loss: float | None = None
    ) -> protocol.ScheduleReply:
        """Tells the server's learning-rate schedule that an epoch begins or ends. The server counts the event once,
        however often it is sent."""
        self._schedule_events += 1
        number = f"{self._instance}-{self._schedule_events}"
        return self._ask(protocol.ScheduleEvent(number, event, epoch, loss), protocol.ScheduleReply)

    def wait_for_work(self, for_end: bool = False) -> protocol.WorkReply:
        """Waits until there is work for this worker again, or the run is finished; with ``for_end`` for the latter
        alone, which it also is when no other worker is at work any more."""
        return self._ask(protocol.WaitForWork(for_end), protocol.WorkReply)

    def on_any_rank(self, flag: bool) -> bool:
        """Returns the flag: here the worker is one process."""
        return flag

    def save_state(self, path: str) -> int:
        """Saves the server's whole state in a file; returns the version of the parameters. A server on another machine
        must see the same disk."""
        saved = self._ask(protocol.SaveState(), protocol.StateSaved)
        try:
            shutil.move(saved.path, path)
        except OSError as error:
            raise RefusedError(f"the server's state cannot be written to {path}: {error}") from error
        return saved.version
