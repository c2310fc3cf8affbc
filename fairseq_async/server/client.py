"""A worker's side of the server."""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fairseq_async.errors import ExchangeError, RefusedError
from fairseq_async.exchange import SharedMemory
from fairseq_async.server.connection import CONNECT_SECONDS, LOOPBACK, Connection
from fairseq_async.server.layout import Layout

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _PAUSE, _LONGEST_PAUSE = 0.1, 0.5, 5.0  # seconds between two attempts to connect
_BEATS = 4  # signs of life in the time after which the server gives a worker up


class ServerClient:
    """Connects one worker to the server of its run, and again when the connection breaks or the server dies.

    On the same machine, which is what the address 127.0.0.1 says, tensors go through shared memory; to any other
    address they go behind the messages.

    Every method raises :class:`ExchangeError` when the server stays away and :class:`RefusedError` when it says no.

    Args:
        worker: its id; None asks for one that was not announced, see ``worker`` then.
        patience: seconds for which a server that has gone is waited for. A question that was not answered is asked
            again; the server knows what it has heard before.
        on_loss: called in a thread, with what happened, when the server stays away while this worker computes.

    Attributes:
        worker: this worker's id.
        workers: how many were announced.
    """

    def __init__(
        self,
        address: str,
        token: str,
        worker: int | None,
        patience: float = 0.0,
        on_loss: Callable[[str], None] | None = None,
    ) -> None:
        self.address, self.patience = address, patience
        self.remote = address.rpartition(":")[0] != LOOPBACK
        self.memory: SharedMemory | None = None
        self._token, self._instance, self._joins = token, uuid.uuid4().hex, worker is None
        self._slot: Tensor | None = None
        self._introduction: tuple[Layout, dict[str, Any]] | None = None  # with which this worker has joined
        self._left = threading.Event()
        self._has_begun = False  # the server has said that it has parameters
        self._in_slot = -1  # an update that was accepted, and may not have been taken yet
        self._plans = 0
        self._back_at: int | None = None  # the version of a server that came back, until this worker has pulled
        self._lock = threading.RLock()  # of connection and slot: a question with its answer, or a sign of life
        self._channel = self._connect(worker)
        self.worker, self.workers = self._channel.worker, self._channel.workers
        self._server = self._channel.server  # with which this worker has joined
        if on_loss is not None:
            threading.Thread(target=self._stay_alive, args=(on_loss,), daemon=True).start()

    # What a worker says

    def join(self, layout: Layout, method: dict[str, Any]) -> dict[str, Any]:
        """Introduces the worker; waits until the server has parameters, unless this is worker 0, who brings them."""
        self._introduction = layout, method
        with self._lock:
            try:
                return self._hello()
            except ExchangeError as error:
                return self._come_back(error)

    def use(self, memory: SharedMemory) -> None:
        """Keeps the slot of a remote server in memory that other processes of this machine can open."""
        self.memory = memory
        self._slot = self._channel.room = memory.slot(0)

    def initialise(self, state: str | None) -> dict[str, Any]:
        """Worker 0 brings a new server the parameters in its slot, or all of a state in a file on the server's disk."""
        welcome = self.ask({"kind": "initialise", "state": state}, self._sent)
        self._has_begun = True
        return welcome

    def push(self, write: Callable[[Tensor], object], **message: Any) -> dict[str, Any]:
        """Calls ``write(slot)`` with this worker's flat slot, then tells the server that it is ready.

        The answer comes when the update is applied; or at once, if it will be added to others without a step, and
        ``wait`` is not set. Then the slot is the server's for a moment longer, for which the next push waits.
        """
        with self._lock:
            self.prepare(write)
            answer = self.ask({"kind": "push", **message}, self._sent)
            self._in_slot = message["sequence"] if answer["status"] == "accepted" else -1
        return answer

    def prepare(self, write: Callable[[Tensor], object]) -> float:
        """Calls ``write(slot)`` for a push to come, at which the slot may be another.

        Returns:
            Seconds for which the server had not taken the update before out of the slot.
        """
        with self._lock:
            began = time.perf_counter()
            self._wait_until_taken()
            waited = time.perf_counter() - began
            write(self.slot)
        return waited

    def hold_slot(self) -> AbstractContextManager[object]:
        """Within this the slot stays where it is: a server that comes back brings another one."""
        return self._lock

    @property
    def slot(self) -> Tensor:
        """What this worker and the server hand each other, flat: an update before a push, and where nothing is
        published the parameters after a pull."""
        if self._slot is None:
            raise ExchangeError("this worker has not joined the run")
        return self._slot

    @property
    def _sent(self) -> Tensor | None:
        return self._slot if self.remote else None

    def pull(self, copy: Callable[[Tensor], object]) -> int:
        """Calls ``copy(flat parameters)`` on one version and returns it; other workers may do so at the same time."""
        while (memory := self.memory) is not None and memory.publishes:
            try:
                version = memory.read(copy, partial(self._has_lost, memory))
                with self._lock:
                    if memory is self.memory:  # and not that of a server that died meanwhile
                        self._back_at = None
                        return version
            except ExchangeError as error:  # the server died while it published
                with self._lock:
                    if memory is self.memory:
                        self._come_back(error)
        version, self._back_at = int(self.ask({"kind": "pull"})["version"]), None
        copy(self.slot)
        return version

    def plan(self, **message: Any) -> dict[str, Any]:
        """A message of the method's own, which counts once however often it has to be sent."""
        self._plans += 1
        return self.ask({"kind": "plan", "number": f"{self._instance}-{self._plans}", **message})

    def ask(self, message: dict[str, Any], tensor: Tensor | None = None) -> dict[str, Any]:
        """One question, one answer."""
        with self._lock:
            while True:
                try:
                    self._channel.send(self._dated(message), tensor)
                    return self._undated(message, self._channel.answer())
                except ExchangeError as error:
                    self._come_back(error)
                tensor = None if tensor is None else self._slot

    def _dated(self, message: dict[str, Any]) -> dict[str, Any]:
        """A server that came back may be at a version before the one that an update started from."""
        if self._back_at is None or "base_version" not in message:
            return message
        return message | {"base_version": min(message["base_version"], self._back_at)}

    def _undated(self, message: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Version n of a server that came back is not the version n that this worker has: it must pull."""
        if self._back_at is None or message["kind"] != "push":
            return answer
        return answer | {"version": -1}

    def leave(self, finished: bool) -> None:
        """Ends the connection; ``finished`` ends the run for every worker."""
        self._left.set()
        with self._lock:
            try:
                self._channel.send({"kind": "leave", "finished": finished})
                if self._channel.is_readable(CONNECT_SECONDS):  # a server that is stuck holds nobody back
                    self._channel.receive()
            except ExchangeError:
                pass  # it had ended before us
            finally:
                self._channel.close()

    # The connection

    def _connect(self, worker: int | None) -> Connection:
        return Connection(self.address, self._token, worker, self._joins, self._instance)

    def _hello(self) -> dict[str, Any]:
        assert self._introduction is not None
        layout, method = self._introduction
        self._channel.send({"kind": "hello", "method": method, "remote": self.remote, "layout": layout.to_json()})
        welcome = self._channel.answer()
        self._channel.give_up_after(float(method.get("worker_timeout", self._channel.timeout)))
        self._has_begun = bool(welcome["initialised"])
        before = self._slot
        if self.remote:
            if before is None:
                self._slot = torch.zeros(layout.size)
            self._channel.room = self._slot
        else:
            if self.memory is not None:
                self.memory.close()
            shape = layout.size, welcome["slots"], welcome["publishes"]
            self.memory = SharedMemory.attach(welcome["memory"], *shape)
            self._slot = self.memory.slot(self.worker)
            if before is not None and before.data_ptr() != self._slot.data_ptr():
                self._slot.copy_(before)  # of a server that is no more: an update, or where local steps started
            self._in_slot = -1
        return welcome

    def _come_back(self, error: ExchangeError) -> dict[str, Any]:
        """Connects again, for as long as patience allows; returns what the server says then.

        Raises:
            ExchangeError: it stays away.
            RefusedError: it does not take this worker any more.
        """
        if self._introduction is None or self._left.is_set():
            raise error
        deadline, pause, said = time.monotonic() + self.patience, _FIRST_PAUSE, False
        while time.monotonic() < deadline:
            try:
                return self._try_again()
            except ExchangeError:
                if not said and pause > 1:
                    logger.warning("%s; trying again for %.0f s", self._lost(), self.patience)
                    said = True
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise ExchangeError(self._lost()) from error

    def _try_again(self) -> dict[str, Any]:
        self._channel.close()
        self._channel = self._connect(self.worker)
        begun = self._has_begun
        welcome = self._hello()
        if begun and not welcome["initialised"]:
            raise RefusedError(f"the server at {self.address} came back without the run's state, see server.log")
        if self._channel.server != self._server:
            self._server, self._back_at = self._channel.server, int(welcome.get("version", 0))
        return welcome

    def _wait_until_taken(self) -> None:
        if self.memory is None or self.remote:
            return
        try:
            self.memory.wait_until_taken(self.worker, self._in_slot, partial(self._has_lost, self.memory))
        except ExchangeError as error:
            self._come_back(error)

    def _has_lost(self, memory: SharedMemory) -> bool:
        """Whether the server has ended, or another has come since."""
        return memory is not self.memory or self._channel.is_closed()

    def _lost(self) -> str:
        return f"the server at {self.address} is gone; the run continues from its last checkpoint when started again"

    def _stay_alive(self, on_loss: Callable[[str], None]) -> None:
        """In a thread: signs of life while this worker computes, and a new connection when it has lost the old one."""
        lost_at: float | None = None
        while not self._left.is_set():
            if lost_at is None:
                self._channel.is_closed(self._channel.timeout / _BEATS)
            if self._left.wait(_PAUSE) or not self._lock.acquire(blocking=False):
                lost_at = None  # a question is being asked, which is a sign of life, or looks for the server itself
                continue
            try:
                lost_at = self._beat(lost_at)
            except RefusedError as error:
                return on_loss(str(error))
            finally:
                self._lock.release()
            if lost_at is not None and time.monotonic() - lost_at > self.patience and not self._left.is_set():
                return on_loss(self._lost())

    def _beat(self, lost_at: float | None) -> float | None:
        """Since when the server has been away; None when it is there."""
        if self._introduction is None:
            return None
        try:
            if lost_at is None:
                if self._channel.is_closed():
                    raise ExchangeError(self._lost())
                self._channel.send({"kind": "alive"})
            else:
                self._try_again()
            return None
        except ExchangeError:
            return lost_at or time.monotonic()
