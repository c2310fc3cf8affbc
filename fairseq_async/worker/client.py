"""A worker's connection to its run: requests, and a new connection when the old one or the server is lost."""

import logging
import math
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment, in_turn
from fairseq_async.errors import ExchangeError, RefusedError
from fairseq_async.exchange import SharedMemory
from fairseq_async.exchange.addresses import LOOPBACK
from fairseq_async.exchange.tls import worker_context
from fairseq_async.method_spec import MethodSpec
from fairseq_async.server import Layout, Status, protocol
from fairseq_async.server.protocol import Push, PushReply, Request, Welcome
from fairseq_async.server.state_files import placed
from fairseq_async.worker.compressor import Compressor
from fairseq_async.worker.connection import CONNECT_SECONDS, Connection
from fairseq_async.worker.receiver import ParameterReceiver
from fairseq_async.worker.signs_of_life import SignsOfLife

logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts to connect
_SIGNS_OF_LIFE = 4  # in the time after which the server gives a worker up


class Client:
    """Connects one worker to the server of its run, and again when the connection breaks or the server dies.

    On the same machine, which is what the address 127.0.0.1 says, tensors go through shared memory; to any other
    address they go behind the messages.

    Every method raises :class:`ExchangeError` when the server stays away and :class:`RefusedError` when it says no.

    Args:
        worker: its id; None asks for one that was not announced, see ``worker`` then.
        patience: seconds for which a worker waits for a server that is gone. A request without an answer is sent
            again; the server knows the updates that it has settled.
        on_loss: called in a second thread, with the reason, when the server stays away while this worker computes.
        tls: directory of certificates, of a server whose connections are encrypted.

    Attributes:
        worker: this worker's id.
        workers: how many were announced.
        compressor: of its updates; None where they are sent in fp32, and before :meth:`join`.
    """

    def __init__(
        self,
        address: str,
        token: str,
        worker: int | None,
        patience: float = 0.0,
        on_loss: Callable[[str], None] | None = None,
        tls: Path | None = None,
    ) -> None:
        self.address, self.patience = address, patience
        self._encryption = None if tls is None else worker_context(tls)
        self.remote = address.rpartition(":")[0] != LOOPBACK
        self.memory: SharedMemory | None = None
        self._token, self._instance, self._joins = token, uuid.uuid4().hex, worker is None
        self._slot: Tensor | None = None
        self._joined_with: tuple[Layout, MethodSpec] | None = None
        self.left = threading.Event()
        self._initialised = False  # whether the server has parameters
        self._state_path = ""  # where worker 0 may bring it a state
        self._in_slot = -1  # sequence number of an update that was answered early: it may still be in the slot
        self._schedule_events, self._received = 0, 0  # the second: bytes of parameters, since the last push
        self.compressor: Compressor | None = None
        self._receiver: ParameterReceiver
        self._fragments: tuple[Fragment, ...]
        self._may_reject = False
        self._restored_version: int | None = None  # of a server that was started again, until this worker has pulled
        # of connection and slot, for a request and its answer, or for a sign of life
        self.lock = threading.RLock()
        self._channel = self._connect(worker)
        self.worker, self.workers = self._channel.worker, self._channel.workers
        self._server = self._channel.server  # the process with which this worker has joined
        self._signs_of_life = None if on_loss is None else SignsOfLife(self, on_loss)

    # Requests

    def join(self, layout: Layout, spec: MethodSpec) -> Welcome:
        """Introduces the worker; waits until the server has parameters, unless this is worker 0, who brings them."""
        self._joined_with = layout, spec
        codec = spec.compress.push
        self.compressor = None if codec is None else Compressor(codec, spec, layout, self.worker)
        self._receiver, self._fragments = ParameterReceiver(spec, layout), layout.fragments(spec.fragments)
        self._may_reject = spec.server.max_update_norm_ratio is not None or spec.staleness_limit is not None
        with self.lock:
            try:
                return self._hello()
            except ExchangeError as error:
                return self._reconnect(error)

    def use(self, memory: SharedMemory) -> None:
        """Keeps the slot of a remote server in memory that other processes of this machine can open."""
        self.memory = memory
        self._slot = memory.slot(0)
        self._receiver.open(self._channel, self._sent)

    def initialise(self, state: str | None) -> Welcome:
        """Worker 0 brings a new server the parameters in its slot, or all of a state in a file; a server on another
        machine has to see the same disk."""
        with nullcontext() if state is None else placed(Path(state), Path(self._state_path)):
            welcome = self._ask(protocol.Initialise(state is not None), Welcome, lambda: self._sent)
        self._initialised = True
        return welcome

    def push(self, write: Callable[[Tensor], object], push: Push) -> PushReply:
        """Calls ``write(slot)`` with this worker's flat slot, then tells the server that it is ready.

        The answer comes when the update is applied; or at once, if it will be added to others without a step, and
        ``push.wait`` is not set. Then the slot is the server's for a moment longer, for which the next push waits.
        """
        with self.lock:
            self.prepare(write)
            start = self._receiver.payload
            push = replace(push, report=replace(push.report, bytes_received=self._received, start_payload=start))
            compressor = self.compressor
            answer = self._push(push) if compressor is None else self._push_compressed(push, compressor)
            self._received = 0
            self._in_slot = push.sequence if answer.status is Status.ACCEPTED else -1
        return answer

    def _push(self, push: Push) -> PushReply:
        report = replace(push.report, bytes_sent=4 * self._part(push.sequence).numel())
        push = replace(push, report=report)
        return self._ask(push, PushReply, lambda: self._part(push.sequence) if self.remote else None)

    def _push_compressed(self, push: Push, compressor: Compressor) -> PushReply:
        """The payload goes behind the message, also to a server on this machine, which decodes it into the slot."""
        push, payload = compressor.encode(push, self.slot)
        if compressor.keeps_residual and self._may_reject:
            push = replace(push, wait=True)  # an early answer would not say what becomes of it
        answer = self._ask(push, PushReply, lambda: payload)
        compressor.settle_meanwhile(answer.taken)  # while the next batch is computed
        return answer

    def prepare(self, write: Callable[[Tensor], object]) -> float:
        """Calls ``write(slot)`` for a push to come, at which the slot may be another.

        Returns:
            Seconds for which the server had not taken the update before out of the slot.
        """
        with self.lock:
            began = time.perf_counter()
            self._wait_until_taken()
            waited = time.perf_counter() - began
            write(self.slot)
        return waited

    def hold_slot(self) -> AbstractContextManager[object]:
        """Within this the slot stays where it is: a server that comes back brings another one."""
        return self.lock

    @property
    def slot(self) -> Tensor:
        """What this worker and the server hand each other, flat: an update before a push, and where nothing is
        published the parameters after a pull."""
        if self._slot is None:
            raise ExchangeError("this worker has not joined the run")
        return self._slot

    def _part(self, sequence: int | None) -> Tensor:
        """What the slot has of the fragment of an update of this number; None for all of it."""
        return self.slot if sequence is None else in_turn(self._fragments, sequence).of(self.slot)

    def _make_room(self, fragment_of: int | None) -> None:
        """For what comes behind the next answer, with whose question nothing is sent; at each attempt to ask, since a
        server that comes back may bring another connection."""
        self._receiver.open(self._channel, self._part(fragment_of) if self.remote else None)

    @property
    def exchanged(self) -> dict[str, Tensor]:
        """The vectors through which this worker and the server hand each other numbers, by names for them."""
        published = {} if self.memory is None or not self.memory.publishes else {"published": self.memory.published}
        return {"slot": self.slot} | published

    @property
    def _sent(self) -> Tensor | None:
        """What goes behind a message that hands over the slot."""
        return self._slot if self.remote else None

    def pull(
        self,
        copy: Callable[[Tensor], object],
        look_ahead: float = 0.0,
        starts: bool = False,
        fragment_of: int | None = None,
    ) -> int:
        """Calls ``copy(flat parameters)`` on one version and returns it; other workers may do so at the same time.

        Args:
            look_ahead: versions ahead of it along the server's last step; only the server can compute these parameters.
            starts: work starts from them: they may be ahead of the server's own where its rule looks ahead, and
                compressed. Otherwise they are the server's own, in fp32.
            fragment_of: the number of an update of this worker, of whose fragment alone it asks. The fragment is in its
                place in the slot then; ``copy`` is called on all of the slot.
        """
        while (memory := self.memory) is not None and memory.publishes and not look_ahead:
            try:
                version = memory.read(copy, partial(self._is_gone, memory))
                with self.lock:
                    if memory is self.memory:  # and not that of a server that died meanwhile
                        self._restored_version = None
                        self._received += 4 * memory.parameters
                        return version
            except ExchangeError as error:  # the server died while it published
                with self.lock:
                    if memory is self.memory:
                        self._reconnect(error)
        with self.lock:
            request = protocol.Pull(look_ahead, starts, fragment_of)
            reply = self._ask(request, protocol.PullReply, lambda: self._make_room(fragment_of))
            self._restored_version = None
            self._received += self._receiver.take(self._channel, reply, self._part(fragment_of))
        copy(self.slot)
        return reply.version

    def schedule_event(
        self, event: Literal["begin_epoch", "end_epoch"], epoch: int, loss: float | None = None
    ) -> protocol.ScheduleReply:
        """Tells the server's learning-rate schedule of an epoch. It counts once, however often it has to be sent."""
        self._schedule_events += 1
        number = f"{self._instance}-{self._schedule_events}"
        return self._ask(protocol.ScheduleEvent(number, event, epoch, loss), protocol.ScheduleReply)

    def wait_for_work(self) -> protocol.WorkReply:
        """Waits until there is work for this worker again, or the run is finished."""
        return self._ask(protocol.WaitForWork(), protocol.WorkReply)

    def save_state(self, path: str) -> int:
        """Takes the server's whole state into a file; returns the version of the parameters. A server on another
        machine has to see the same disk."""
        saved = self._ask(protocol.SaveState(), protocol.StateSaved)
        try:
            shutil.move(saved.path, path)
        except OSError as error:
            raise RefusedError(f"the server's state cannot be written to {path}: {error}") from error
        return saved.version

    def _ask(
        self, request: Request, expected: type[_Answer], tensor: Callable[[], Tensor | None] = lambda: None
    ) -> _Answer:
        """Sends one request, with the tensor that is to go behind it at that time, and waits for its answer."""
        with self.lock:
            while True:
                try:
                    self._channel.send(protocol.encode(self._rebased(request)), tensor())
                    return self._outdated(self._channel.answer(expected))
                except ExchangeError as error:
                    self._reconnect(error)

    def _rebased(self, request: Request) -> Request:
        """A server that came back may be at a version before the one that an update started from."""
        if self._restored_version is None or not isinstance(request, Push):
            return request
        return replace(request, base_version=min(request.base_version, self._restored_version))

    def _outdated(self, answer: _Answer) -> _Answer:
        """Version n of a server that came back is not the version n that this worker has: it must pull."""
        if self._restored_version is None or not isinstance(answer, PushReply):
            return answer
        return replace(answer, version=-1)

    def leave(self, finished: bool) -> None:
        """Ends the connection, once; ``finished`` ends the run for every worker."""
        if self.left.is_set():
            return
        self.left.set()
        with self.lock:
            try:
                self._channel.send(protocol.encode(protocol.Leave(finished)))
                if self._channel.is_readable(CONNECT_SECONDS):  # a server that is stuck holds nobody back
                    self._channel.receive()
            except ExchangeError:
                pass  # it had ended before us
            finally:
                self._channel.close()
        self._end_signs()

    def _end_signs(self) -> None:
        if self._signs_of_life is not None:
            self._signs_of_life.end()

    def close(self) -> None:
        """Ends the connection without a word: to the server this worker has died, and may come back."""
        self.left.set()
        with self.lock:
            self._channel.close()
        self._end_signs()

    # The connection

    def _connect(self, worker: int | None) -> Connection:
        return Connection(self.address, self._token, worker, self._joins, self._instance, self._encryption)

    def _hello(self) -> Welcome:
        assert self._joined_with is not None
        layout, spec = self._joined_with
        self._channel.send(protocol.encode(protocol.Hello(spec, layout, self.remote)))
        welcome = self._channel.answer(Welcome)
        self._channel.give_up_after(spec.server.worker_timeout)
        self._initialised, self._state_path = welcome.initialised, welcome.state_path
        before = self._slot
        if self.remote:
            if before is None:
                self._slot = torch.zeros(layout.size)
        else:
            if self.memory is not None:
                self.memory.close()
            shape = layout.size, welcome.slots, welcome.publishes
            self.memory = SharedMemory.attach(welcome.memory, *shape)
            self._slot = self.memory.slot(self.worker)
            if before is not None and before.data_ptr() != self._slot.data_ptr():
                self._slot.copy_(before)  # of a server that is no more: an update, or where local steps started
            self._in_slot = -1
        self._receiver.open(self._channel, self._sent)
        return welcome

    def _reconnect(self, error: ExchangeError) -> Welcome:
        """Connects and joins again, for as long as patience allows.

        Raises:
            ExchangeError: it stays away.
            RefusedError: it does not take this worker any more.
        """
        if self._joined_with is None or self.left.is_set():
            raise error
        deadline, pause, said = time.monotonic() + self.patience, _FIRST_PAUSE, False
        while time.monotonic() < deadline:
            try:
                return self._connect_again()
            except ExchangeError:
                if not said and pause > 1:
                    limit = f" for {self.patience:.0f} s" if self.patience < math.inf else ""
                    logger.warning("%s; trying again%s", self.loss, limit)
                    said = True
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise ExchangeError(self.loss) from error

    def _connect_again(self) -> Welcome:
        self._channel.close()
        self._channel = self._connect(self.worker)
        begun = self._initialised
        welcome = self._hello()
        if begun and not welcome.initialised:
            raise RefusedError(f"the server at {self.address} came back without the run's state, see server.log")
        if self._channel.server != self._server:
            self._server, self._restored_version = self._channel.server, welcome.version
        return welcome

    def _wait_until_taken(self) -> None:
        if self.memory is None or self.remote:
            return
        try:
            self.memory.wait_until_taken(self.worker, self._in_slot, partial(self._is_gone, self.memory))
        except ExchangeError as error:
            self._reconnect(error)

    def _is_gone(self, memory: SharedMemory) -> bool:
        """Whether the server has ended, or another has come since."""
        return memory is not self.memory or self._channel.is_closed()

    @property
    def loss(self) -> str:
        """What to say when the server stays away."""
        return f"the server at {self.address} is gone; the run continues from its last checkpoint when started again"

    # Signs of life, from another thread

    def wait_for_loss(self) -> None:
        """Returns when the connection is lost, or the next sign of life is due."""
        self._channel.is_closed(self._channel.timeout / _SIGNS_OF_LIFE)

    def show_life(self, lost: bool) -> None:
        """Says that this worker computes; connects again where the connection was ``lost``."""
        if self._joined_with is None:
            return
        if lost:
            self._connect_again()
        elif self._channel.is_closed():
            raise ExchangeError(self.loss)
        else:
            self._channel.send(protocol.encode(protocol.Alive()))
