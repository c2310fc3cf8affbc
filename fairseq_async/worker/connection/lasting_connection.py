"""A worker's connection to the server, which is made again when it breaks or the server dies, and the worker's slot."""

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from fairseq_async import protocol
from fairseq_async.errors import AsyncError, ExchangeError, ProtocolError, RefusedError, option
from fairseq_async.exchange.tls import worker_context
from fairseq_async.protocol import Hello, Request, Welcome
from fairseq_async.protocol.client_connection import CONNECT_SECONDS, Connection, Endpoint
from fairseq_async.worker.connection.shard_lines import ShardLines

logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_Met = TypeVar("_Met", Connection, Welcome)

GONE = "the server at {} is gone; the run continues from its last checkpoint when started again"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts to connect
_SIGNS_OF_LIFE = 4  # signs of life within the time after which the server gives a worker up
_PAUSE = 0.5  # seconds between two attempts to connect while the worker computes
_ENDING = 2.0  # seconds to wait for the end of the thread that shows life


def never() -> bool:
    """Returns False: nothing shows yet that a server will not come back."""
    return False


class LastingConnection:
    """Connects one worker to the server of its run, and again when the connection breaks or the server dies.

    Every method raises :class:`ExchangeError` when the server stays away and :class:`RefusedError` when the server
    refuses the request.

    Args:
        worker: this worker's id; None for a worker that was not announced: the server assigns the attribute ``worker``.
        patience: seconds for which a worker waits for a server that is gone, or not there yet. A request without an
            answer is sent again; the server recognises the updates that it has settled already.
        on_loss: called in a second thread, with the reason, when the server stays away while this worker computes.
        tls: directory of certificates, if the server's connections are encrypted; None for plain connections.
        hopeless: returns whether the server will not come, so that it is not waited for.
        gone: the message for the case that the server stays away; ``{}`` stands for its address.

    Attributes:
        worker: this worker's id.
        workers: number of workers that were announced.
        channel: the connection as it is now.
        lines: those to shards on other machines; None where there are none.
        restored_version: version at which a server that was started again continues; None once this worker has pulled
            from it.
        initialised: whether the server has parameters.
        lock: guards the connection and the slot; held for a request and its answer, or for a sign of life.
        left: set when the worker has ended the connection.
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
        gone: str = GONE,
    ) -> None:
        self.address, self.patience, self._hopeless, self._gone = address, patience, hopeless, gone
        encryption = None if tls is None else worker_context(tls)
        self.endpoint = Endpoint(address, token, joins=worker is None, instance=uuid.uuid4().hex, encryption=encryption)
        self._joined: tuple[Hello, Callable[[Welcome], object]] | None = None
        self.left = threading.Event()
        self.initialised = False
        self.lines: ShardLines | None = None
        self.restored_version: int | None = None
        self.lock = threading.RLock()
        self.channel = self._try_again(partial(Connection, self.endpoint, worker))
        self.worker, self.workers = self.channel.worker, self.channel.workers
        self._server = self.channel.server  # the process with which this worker has joined
        self._showing_life: threading.Thread | None = None
        if on_loss is not None:
            self._showing_life = threading.Thread(target=self._stay_alive, args=(on_loss,), daemon=True)
            self._showing_life.start()

    def join(self, hello: Hello, welcomed: Callable[[Welcome], object]) -> Welcome:
        """Sends the message, now and to each server that comes back; ``welcomed`` is called with each answer."""
        self._joined = hello, welcomed  # last: from now on the second thread may join again
        with self.lock:
            try:
                return self.greet()
            except ExchangeError as error:
                return self.reconnect(error)

    def join_anew(self, hello: Hello, welcomed: Callable[[Welcome], object]) -> Welcome:
        """Joins as :meth:`join` does, after a join of which ``welcomed`` has failed."""
        with self.lock:
            self._joined = hello, welcomed
            return self._connect_again()

    def ask(
        self, request: Request, expected: type[_Answer], tensor: Callable[[], Tensor | None] = lambda: None
    ) -> _Answer:
        """Sends one request and waits for its answer; ``tensor`` is called at each attempt for the tensor behind it."""
        return self.repeat(lambda: self.channel.send(protocol.encode(request), tensor()), expected)

    def repeat(self, send: Callable[[], object], expected: type[_Answer]) -> _Answer:
        """Calls ``send`` and waits for the answer, again where the connection breaks."""
        with self.lock:
            while True:
                try:
                    send()
                    return self.channel.answer(expected)
                except ExchangeError as error:
                    self.reconnect(error)

    def leave(self, finished: bool) -> None:
        """Ends the connection, once; ``finished`` ends the run for every worker."""
        if self.left.is_set():
            return
        self.left.set()
        with self.lock:
            try:
                self.channel.send(protocol.encode(protocol.Leave(finished)))
                if self.channel.is_readable(CONNECT_SECONDS):  # a server that is stuck holds nobody back
                    self.channel.receive()
            except ExchangeError:
                pass  # the server had ended before this worker
            finally:
                self._close_connections()
        self._end()

    def close(self) -> None:
        """Closes the connection without a message: to the server, this worker has died and may come back."""
        self.left.set()
        with self.lock:
            self._close_connections()
        self._end()

    def _end(self) -> None:
        """Waits for the end of the thread that shows life.

        Hazard: the end of the thread may free the slot. If Python exits meanwhile, the thread is unwound through torch,
        which aborts the process: a worker that has done its work would seem to have failed.
        """
        if self._showing_life not in (None, threading.current_thread()):
            self._showing_life.join(_ENDING)

    def _close_connections(self) -> None:
        self.channel.close()
        if self.lines is not None:
            self.lines.close()

    def greet(self) -> Welcome:
        """Sends the first message that a server gets from this worker."""
        assert self._joined is not None
        hello, welcomed = self._joined
        self.channel.send(protocol.encode(hello))
        welcome = self.channel.answer(Welcome)
        self.channel.give_up_after(hello.spec.server.worker_timeout)
        self.initialised = welcome.initialised
        welcomed(welcome)
        return welcome

    def reconnect(self, error: ExchangeError) -> Welcome:
        """Connects and joins again, for as long as patience allows.

        Raises:
            ExchangeError: the server stays away.
            RefusedError: the server does not take this worker any more.
        """
        if self._joined is None or self.left.is_set():
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
        self.channel = Connection(self.endpoint, self.worker)
        begun = self.initialised
        welcome = self.greet()
        if begun and not welcome.initialised:
            raise RefusedError(f"the server at {self.address} came back without the run's state, see server.log")
        if self.lines is not None and welcome.initialised:  # here, and not at the next request, for pauses between
            self.lines.connect()  # the attempts
        if self.channel.server != self._server:
            self._server, self.restored_version = self.channel.server, welcome.version
        return welcome

    @property
    def loss(self) -> str:
        """The message for the case that the server stays away, or a shard on another machine."""
        if self.lines is not None and self.lines.missing:
            return (
                f"the server at {self.address} is there, and its shard at {self.lines.missing} "
                f"({option('server_shards')}) cannot be reached from this machine"
            )
        return self._gone.format(self.address)

    # Signs of life, from a second thread while this worker computes
    #
    # Hazard: two threads use the connection. Each holds the lock for a request with its answer. This thread skips its
    # turn when the lock is taken, since the other thread's request is a sign of life.

    def _stay_alive(self, on_loss: Callable[[AsyncError], None]) -> None:
        lost_at = None
        while not self.left.is_set():
            if lost_at is None:  # wait until the connection is lost, or the next sign is due
                self.channel.is_closed(self.channel.timeout / _SIGNS_OF_LIFE)
            if self.left.wait(_PAUSE) or not self.lock.acquire(blocking=False):
                lost_at = None  # the other thread's request is a sign of life, or that thread connects again itself
                continue
            try:
                self.show_life(lost_at is not None)
                lost_at = None
            except RefusedError as error:
                return on_loss(error)
            except ExchangeError:
                lost_at = lost_at or time.monotonic()
            finally:
                self.lock.release()
            if lost_at is not None and time.monotonic() - lost_at > self.patience and not self.left.is_set():
                return on_loss(ExchangeError(self.loss))

    def show_life(self, lost: bool) -> None:
        """Tells the server that this worker computes; connects again where the connection was ``lost``."""
        if self._joined is None:
            return
        if lost:
            self._connect_again()
        elif self.channel.is_closed():
            raise ExchangeError(self.loss)
        else:
            self.channel.send(protocol.encode(protocol.Alive()))
