"""A worker's connection to the server, which is made again when it breaks or the server dies, and the worker's slot."""

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fairseq_async import protocol
from fairseq_async.errors import AsyncError, ExchangeError, ProtocolError, RefusedError, option
from fairseq_async.exchange import SharedMemory
from fairseq_async.exchange.tls import worker_context
from fairseq_async.method.spec import MethodSpec
from fairseq_async.options.addresses import LOOPBACK
from fairseq_async.protocol import Layout, Push, PushReply, Request, Welcome
from fairseq_async.protocol.client_connection import CONNECT_SECONDS, Connection, Endpoint
from fairseq_async.worker.connection.receiver import ParameterReceiver
from fairseq_async.worker.connection.shard_lines import ShardLines
from fairseq_async.worker.connection.signs_of_life import SignsOfLife

logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_Met = TypeVar("_Met", Connection, Welcome)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts to connect
_SIGNS_OF_LIFE = 4  # signs of life within the time after which the server gives a worker up


def never() -> bool:
    """Returns False: nothing shows yet that a server will not come back."""
    return False


class LastingConnection:
    """Connects one worker to the server of its run, and again when the connection breaks or the server dies.

    At the address 127.0.0.1 the server is on the same machine, and tensors go through shared memory; to any other
    address they go behind the messages.

    Every method raises :class:`ExchangeError` when the server stays away and :class:`RefusedError` when the server
    refuses the request.

    Args:
        worker: this worker's id; None for a worker that was not announced: the server assigns the attribute ``worker``.
        patience: seconds for which a worker waits for a server that is gone, or not there yet. A request without an
            answer is sent again; the server recognises the updates that it has settled already.
        on_loss: called in a second thread, with the reason, when the server stays away while this worker computes.
        tls: directory of certificates, if the server's connections are encrypted; None for plain connections.
        hopeless: returns whether the server will not come, so that it is not waited for.

    Attributes:
        worker: this worker's id.
        workers: number of workers that were announced.
        untrained: checksum of the model's parameters that are not trained; to be set before :meth:`join`.
        moments: checksum of the moments that this worker's optimizers have from steps before the run; likewise.
        any_length: whether the run's number of steps is worker 0's, if this worker's is another; likewise.
        by_script: whether the script divides the data, and the same first batch of two is an error; likewise.
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
        self.address, self.patience, self._hopeless = address, patience, hopeless
        self.remote = address.rpartition(":")[0] != LOOPBACK
        self.memory: SharedMemory | None = None
        self.untrained = self.moments = ""
        self.any_length = self.by_script = False
        encryption = None if tls is None else worker_context(tls)
        self._instance = uuid.uuid4().hex
        self._endpoint = Endpoint(address, token, joins=worker is None, instance=self._instance, encryption=encryption)
        self._slot: Tensor | None = None
        self._joined_with: tuple[Layout, MethodSpec] | None = None
        self.left = threading.Event()
        self._initialised = False  # whether the server has parameters
        self._state_path = ""  # the file in which worker 0 may give the server a whole state
        self._receiver: ParameterReceiver
        self._lines: ShardLines | None = None  # to shards on other machines; None where there are none
        # version at which a server that was started again continues; None once this worker has pulled from it
        self._restored_version: int | None = None
        # guards connection and slot; held for a request and its answer, or for a sign of life
        self.lock = threading.RLock()
        self._channel = self._try_again(partial(self._connect, worker))
        self.worker, self.workers = self._channel.worker, self._channel.workers
        self._server = self._channel.server  # the process with which this worker has joined
        self._signs_of_life = None if on_loss is None else SignsOfLife(self, on_loss)

    def join(self, layout: Layout, spec: MethodSpec) -> Welcome:
        """Introduces the worker; waits until the server has parameters, unless this is worker 0, which brings them."""
        self._receiver = ParameterReceiver(spec, layout)
        if spec.server.hosts:
            self._lines = ShardLines(self._endpoint, self.worker, spec, layout)
        self._joined_with = layout, spec  # last: from now on the second thread may join again
        with self.lock:
            try:
                return self._hello()
            except ExchangeError as error:
                return self._reconnect(error)

    # The slot

    def use(self, memory: SharedMemory) -> None:
        """Places the slot, where the server is remote, in memory that other processes of this machine can open."""
        self.memory = memory
        self._slot = memory.slot(0)
        self._receiver.open(self._channel, self._sent)

    def hold_slot(self) -> AbstractContextManager[object]:
        """A context in which the slot stays where it is, although a server that comes back has another one."""
        return self.lock

    @property
    def slot(self) -> Tensor:
        """The flat tensor through which worker and server exchange: holds the update for a push, and the parameters
        after a pull where the server publishes none in shared memory."""
        if self._slot is None:
            raise ExchangeError("this worker has not joined the run")
        return self._slot

    @property
    def exchanged(self) -> dict[str, Tensor]:
        """The flat vectors through which worker and server exchange, by name: the slot, and published parameters."""
        published = {} if self.memory is None or not self.memory.publishes else {"published": self.memory.published}
        return {"slot": self.slot} | published

    @property
    def _sent(self) -> Tensor | None:
        """The slot, to send behind a message, where the server is remote; None where the slot is shared memory."""
        return self._slot if self.remote else None

    # Requests

    def _ask(
        self, request: Request, expected: type[_Answer], tensor: Callable[[], Tensor | None] = lambda: None
    ) -> _Answer:
        """Sends one request and waits for its answer; ``tensor`` is called at each attempt for the tensor behind it."""
        with self.lock:
            while True:
                try:
                    self._send(protocol.encode(self._rebased(request)), tensor(), request)
                    return self._outdated(self._channel.answer(expected))
                except ExchangeError as error:
                    self._reconnect(error)

    def _send(self, body: bytes, tensor: Tensor | None, request: Request) -> None:
        if self._lines is not None and isinstance(request, Push):
            self._lines.send(request.sequence, self.slot, self._channel, body, tensor)
        else:
            self._channel.send(body, tensor)

    def _rebased(self, request: Request) -> Request:
        """Lowers a push's base version to that of a server that came back, which may be at an earlier version."""
        if self._restored_version is None or not isinstance(request, Push):
            return request
        return replace(request, base_version=min(request.base_version, self._restored_version))

    def _outdated(self, answer: _Answer) -> _Answer:
        """Makes the worker pull after the server came back, whose version n is not the version n of this worker."""
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
                pass  # the server had ended before this worker
            finally:
                self._close_connections()
        self._end()

    def _end(self) -> None:
        if self._signs_of_life is not None:
            self._signs_of_life.end()
        if self.memory is not None:
            self.memory.close()  # a process that lives on would keep the memory of a server that has ended

    def close(self) -> None:
        """Closes the connection without a message: to the server, this worker has died and may come back."""
        self.left.set()
        with self.lock:
            self._close_connections()
        self._end()

    def _close_connections(self) -> None:
        self._channel.close()
        if self._lines is not None:
            self._lines.close()

    # The connection

    def _connect(self, worker: int | None) -> Connection:
        return Connection(self._endpoint, worker)

    def _hello(self) -> Welcome:
        assert self._joined_with is not None
        layout, spec = self._joined_with
        hello = protocol.Hello(spec, layout, self.remote, self.untrained, self.any_length, self.by_script)
        self._channel.send(protocol.encode(hello))
        welcome = self._channel.answer(Welcome)
        self._channel.give_up_after(spec.server.worker_timeout)
        self._initialised, self._state_path = welcome.initialised, welcome.state_path
        before = self._slot
        if self.remote:
            if before is None:
                self._slot = torch.zeros(layout.size, dtype=torch.float32, device="cpu")
        else:
            shape, old = (layout.size, welcome.slots, welcome.publishes), self.memory
            self.memory = SharedMemory.attach(welcome.memory, *shape)
            if old is not None:
                old.close()
            slot = self.memory.slot(self.worker)
            if before is not None and before.data_ptr() != slot.data_ptr():
                slot.copy_(before)  # the dead server's slot: an update, or the start of the local steps
            self._slot = slot  # only now: another thread may look at it without the lock
        self._receiver.open(self._channel, self._sent)
        return welcome

    def _reconnect(self, error: ExchangeError) -> Welcome:
        """Connects and joins again, for as long as patience allows.

        Raises:
            ExchangeError: the server stays away.
            RefusedError: the server does not take this worker any more.
        """
        if self._joined_with is None or self.left.is_set():
            raise error
        if self.patience > 0:
            try:
                return self._try_again(self._connect_again, self.loss)
            except ExchangeError as last:
                error = last
        raise ExchangeError(self.loss) from error

    def _try_again(self, meet: Callable[[], _Met], loss: str = "") -> _Met:
        """Calls ``meet`` until it meets the server, for as long as patience allows.

        Args:
            loss: what to log meanwhile; by default the error itself, which a server that never was there explains.

        Raises:
            ExchangeError: the server stays away, is hopeless, or, at a first connection, is none of ours.
            RefusedError: the server does not take this worker.
        """
        deadline, pause, said = time.monotonic() + self.patience, _FIRST_PAUSE, False
        while True:
            try:
                return meet()
            except ExchangeError as error:
                stranger = isinstance(error, ProtocolError) and not loss
                if stranger or time.monotonic() >= deadline or self._hopeless():
                    raise
                if not said and pause > 1:
                    limit = f" for {self.patience:.0f} s" if self.patience < math.inf else ""
                    logger.warning("%s; trying again%s", loss or error, limit)
                    said = True
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _connect_again(self) -> Welcome:
        self._close_connections()
        self._channel = self._connect(self.worker)
        begun = self._initialised
        welcome = self._hello()
        if begun and not welcome.initialised:
            raise RefusedError(f"the server at {self.address} came back without the run's state, see server.log")
        if self._lines is not None and welcome.initialised:  # here, and not at the next request, for pauses between
            self._lines.connect()  # the attempts
        if self._channel.server != self._server:
            self._server, self._restored_version = self._channel.server, welcome.version
        return welcome

    def _is_gone(self, memory: SharedMemory) -> bool:
        """Whether the server of this memory has ended, or another server has replaced it."""
        return memory is not self.memory or self._channel.is_closed()

    @property
    def loss(self) -> str:
        """The message for the case that the server stays away, or a shard on another machine."""
        if self._lines is not None and self._lines.missing:
            return (
                f"the server at {self.address} is there, and its shard at {self._lines.missing} "
                f"({option('shard_hosts')}) cannot be reached from this machine"
            )
        return f"the server at {self.address} is gone; the run continues from its last checkpoint when started again"

    # Signs of life, from another thread

    def wait_for_loss(self) -> None:
        """Returns when the connection is lost, or the next sign of life is due."""
        self._channel.is_closed(self._channel.timeout / _SIGNS_OF_LIFE)

    def show_life(self, lost: bool) -> None:
        """Tells the server that this worker computes; connects again where the connection was ``lost``."""
        if self._joined_with is None:
            return
        if lost:
            self._connect_again()
        elif self._channel.is_closed():
            raise ExchangeError(self.loss)
        else:
            self._channel.send(protocol.encode(protocol.Alive()))
