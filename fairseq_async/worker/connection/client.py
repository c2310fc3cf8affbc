"""The requests of a worker to the server of its run: updates, parameters, and what goes with them."""

import logging
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
from fairseq_async.errors import ExchangeError, RefusedError, why_not_written
from fairseq_async.exchange import GpuMemory, SharedMemory
from fairseq_async.exchange.gpu_memory import UnmappedError
from fairseq_async.method.spec import MethodSpec
from fairseq_async.options.addresses import LOOPBACK
from fairseq_async.protocol import Layout, Push, PushReply, Status, Welcome
from fairseq_async.protocol.division import exchanged
from fairseq_async.records.state_files import placed
from fairseq_async.worker.connection.compressor import Compressor
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.connection.receiver import ParameterReceiver
from fairseq_async.worker.connection.server_connection import JoinDetails
from fairseq_async.worker.connection.shard_lines import ShardLines
from fairseq_async.worker.connection.worker_memory import WorkerMemory

logger = logging.getLogger(__name__)


class Client:
    """The requests of one worker to the server of its run, as :class:`ServerConnection` documents them.

    At the address 127.0.0.1 the server is on the same machine, and tensors go through shared memory; to any other
    address they go behind the messages.

    Args:
        connection: carries the requests, and outlasts a server that is started again.

    Attributes:
        memory: where the slot is.
    """

    def __init__(self, connection: LastingConnection) -> None:
        self._schedule_events, self._received = 0, 0  # _received: bytes of parameters since the last push
        # the pull that the parameters behind the last answer to a push fulfil, and their version
        self._brought: tuple[protocol.Pull, int] | None = None
        self.compressor: Compressor | None = None
        self._fragments: tuple[Fragment, ...]
        self.receiver: ParameterReceiver
        self._details, self._state_path = JoinDetails(), ""  # the file in which worker 0 may give a whole state
        self.memory = WorkerMemory(remote=connection.address.rpartition(":")[0] != LOOPBACK)
        self.connection, self.worker, self.workers = connection, connection.worker, connection.workers

    @property
    def slot(self) -> Tensor:
        return self.memory.slot

    @property
    def exchanged(self) -> dict[str, Tensor]:
        published = self.memory.published
        return {"slot": self.slot} if published is None else {"slot": self.slot, "published": published.published}

    def join(self, layout: Layout, spec: MethodSpec, details: JoinDetails | None = None) -> Welcome:
        """See :meth:`ServerConnection.join`.

        Raises:
            RefusedError: the server does not take this worker, or has other moments than its optimizers bring.
        """
        self._details = details = details or JoinDetails()
        codec = spec.compress.push
        self._fragments = exchanged(spec, layout)
        self.compressor = None if codec is None else Compressor(codec, spec, layout, self.worker)
        self.receiver = ParameterReceiver(spec, layout)
        if spec.server.hosts:
            self.connection.lines = ShardLines(self.connection.endpoint, self.worker, spec, layout)
        told = {name: value for name, value in vars(details).items() if name != "moments"}
        hello = protocol.Hello(spec, layout, self.memory.remote, **told)
        find_slot = partial(self._find_slot, layout.size)
        try:
            welcome = self.connection.join(hello, find_slot)
        except UnmappedError as error:
            logger.warning("the server's memory on the GPU is out of reach (%s): tensors go through TCP", error)
            self.memory.remote = True
            welcome = self.connection.join_anew(replace(hello, remote=True), find_slot)
        if details.moments and welcome.moments not in (None, details.moments):
            raise RefusedError(
                f"the optimizer of worker {self.worker} has stepped before this run, and has other moments than worker "
                "0's, which the run has: load the same state in every worker, or in worker 0 alone"
            )
        return welcome

    def _find_slot(self, size: int, welcome: Welcome) -> None:
        """Finds the slot of a server, the first one or one that came back."""
        self._state_path = welcome.state_path
        self.memory.place(welcome, self.worker, size)
        self.receiver.open(self.connection.channel, self.slot if self.memory.remote else None)

    def share(self, memory: SharedMemory) -> None:
        """Places the slot, where the server is remote, in memory that other processes of this machine can open."""
        self.memory.share(memory)
        self.receiver.open(self.connection.channel, self.slot if self.memory.remote else None)

    def initialise(self, state: str | None, from_checkpoint: bool = False) -> Welcome:
        with nullcontext() if state is None else placed(Path(state), Path(self._state_path)):
            request = protocol.Initialise(state is not None, from_checkpoint, self._details.moments)
            welcome = self.connection.ask(request, Welcome, lambda: self.memory.send(self.slot))
        self.connection.initialised = True
        return welcome

    def push(self, write: Callable[[Tensor], object], push: Push) -> PushReply:
        with self.connection.lock:
            self.prepare(write)
            start = self.receiver.payload
            push = replace(push, report=replace(push.report, bytes_received=self._received, start_payload=start))
            compressor = self.compressor
            answer = self._push(push) if compressor is None else self._push_compressed(push, compressor)
            self._received, self._brought = 0, None
            if answer.with_parameters:
                self._receive_behind_answer(push, answer)
        return answer

    def _push(self, push: Push) -> PushReply:
        sent = self._part(push.sequence) if self.connection.lines is None else self.slot
        push = replace(push, report=replace(push.report, bytes_sent=4 * sent.numel()))
        return self._ask_push(push, lambda: self.memory.send(self._part(push.sequence)))

    def _push_compressed(self, push: Push, compressor: Compressor) -> PushReply:
        """Sends the payload behind the message, also to a server on this machine, which decodes it into the slot."""
        push, payload = compressor.encode(push, self._part(push.sequence))
        answer = self._ask_push(push, lambda: payload)
        if answer.status is Status.FINISHED:
            compressor.withdraw()
        else:
            compressor.settle_meanwhile(answer.taken)  # while the next batch is computed
        return answer

    def _ask_push(self, push: Push, tensor: Callable[[], Tensor | None]) -> PushReply:
        """Sends a push, and the parts of shards on other machines to these; makes the worker pull if the server came
        back, whose version n is not the version n of this worker."""
        connection = self.connection

        def send() -> None:
            body, lines = protocol.encode(self._rebased(push)), connection.lines
            if lines is None:
                connection.channel.send(body, tensor())
            else:
                lines.send(push.sequence, self.slot, connection.channel, body, tensor())

        answer = connection.repeat(send, PushReply)
        return answer if connection.restored_version is None else replace(answer, version=-1)

    def _rebased(self, push: Push) -> Push:
        """Lowers a push's base version to that of a server that came back, which may be at an earlier version."""
        restored = self.connection.restored_version
        return push if restored is None else replace(push, base_version=min(push.base_version, restored))

    def prepare(self, write: Callable[[Tensor], object]) -> None:
        with self.connection.lock:
            if not self.memory.remote and self.connection.channel.is_closed():
                # Hazard: after a long pause of this process its successor may have the same slot, and may use it.
                self.connection.reconnect(ExchangeError(self.connection.loss))
            write(self.slot)

    def _part(self, sequence: int | None) -> Tensor:
        """The slot's view of the fragment that the update of this number is of, or for None of all fragments, without
        the parts of shards on other machines."""
        if sequence is None:
            return self.slot if self.connection.lines is None else self._fragments[0].of(self.slot)
        return in_turn(self._fragments, sequence).of(self.slot)

    def _make_room(self, fragment_of: int | None) -> None:
        """Sets where the tensor behind the next answer is received. Runs at each attempt to send a request, since the
        connection may be another after the server has come back; returns None: no tensor goes with the request."""
        if self.connection.lines is not None:
            self.connection.channel.companions = self.connection.lines.open(self.slot)
        self.receiver.open(self.connection.channel, self._part(fragment_of) if self.memory.remote else None)

    def pull(
        self,
        copy: Callable[[Tensor], object],
        look_ahead: float = 0.0,
        starts: bool = False,
        fragment_of: int | None = None,
    ) -> int:
        connection = self.connection
        while (memory := self.memory.published) is not None and not look_ahead:
            try:
                version = memory.read(copy, partial(self._is_gone, memory))
                with connection.lock:
                    if memory is self.memory.shared:  # not if it is the memory of a server that died meanwhile
                        connection.restored_version = None
                        self._received += 4 * memory.parameters
                        return version
            except ExchangeError as error:  # the server died while it published
                with connection.lock:
                    if memory is self.memory.shared:
                        connection.reconnect(error)
        with connection.lock:
            request = protocol.Pull(look_ahead, starts, fragment_of)
            brought, self._brought = self._brought, None
            if brought is not None and brought[0] == request and connection.restored_version is None:
                version = brought[1]
            else:
                version = self._pull(request)
        copy(self.slot)
        return version

    def _is_gone(self, memory: SharedMemory | GpuMemory) -> bool:
        """Whether the server of this memory has ended, or another server has replaced it."""
        return memory is not self.memory.shared or self.connection.channel.is_closed()

    def _pull(self, request: protocol.Pull) -> int:
        while True:
            reply = self.connection.ask(request, protocol.PullReply, lambda: self._make_room(request.fragment_of))
            try:
                self._write_parts(reply)
            except ExchangeError as error:
                self.connection.reconnect(error)
            else:
                return self._write_received(reply, request)

    def _write_parts(self, reply: protocol.PullReply) -> None:
        """Writes the parts from shards on other machines into the slot."""
        if self.connection.lines is not None:
            self.connection.lines.take(reply, self.slot)
            self.connection.channel.companions = ()  # until the next pull there is no room for what comes

    def _receive_behind_answer(self, push: Push, answer: PushReply) -> None:
        """Takes the parameters behind an answer to a push, for the next :meth:`pull`, which otherwise requests them."""
        fragment_of = push.sequence if len(self._fragments) > 1 else None
        request = protocol.Pull(answer.assignment.look_ahead, starts=True, fragment_of=fragment_of)
        try:
            self._make_room(fragment_of)
            reply = self.connection.channel.answer(protocol.PullReply)
            self._write_parts(reply)
            self._brought = request, self._write_received(reply, request)
        except ExchangeError as error:
            self.connection.reconnect(error)

    def _write_received(self, reply: protocol.PullReply, request: protocol.Pull) -> int:
        """Writes received parameters into the slot; returns their version."""
        self.connection.restored_version = None
        if not self.memory.remote and not reply.compressed:
            self.memory.receive(self._part(request.fragment_of))
        self._received += self.receiver.take(self.connection.channel, reply, self.slot, request)
        return reply.version

    def schedule_event(
        self, event: Literal["begin_epoch", "end_epoch"], epoch: int, loss: float | None = None
    ) -> protocol.ScheduleReply:
        """Tells the server's learning-rate schedule that an epoch begins or ends. The server counts the event once,
        however often it is sent."""
        self._schedule_events += 1
        number = f"{self.connection.endpoint.instance}-{self._schedule_events}"
        return self.connection.ask(protocol.ScheduleEvent(number, event, epoch, loss), protocol.ScheduleReply)

    def wait_for_work(self, for_end: bool = False) -> protocol.WorkReply:
        return self.connection.ask(protocol.WaitForWork(for_end), protocol.WorkReply)

    def on_any_rank(self, flag: bool) -> bool:
        return flag

    def save_state(self, path: str) -> int:
        saved = self.connection.ask(protocol.SaveState(), protocol.StateSaved)
        try:
            shutil.move(saved.path, path)
        except OSError as error:
            why = why_not_written(error, Path(path).parent)
            raise RefusedError(f"the server's state cannot be written to {path}: {why}") from error
        return saved.version

    def leave(self, finished: bool) -> None:
        self.connection.leave(finished)
        self.memory.close()

    def close(self) -> None:
        self.connection.close()
        self.memory.close()
