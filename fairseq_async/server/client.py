"""A worker's side of the server."""

import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_async.errors import ExchangeError, RefusedError
from fairseq_async.exchange import Channel, SharedMemory
from fairseq_async.server.layout import Layout

LOOPBACK = "127.0.0.1"  # this machine
_CONNECT_SECONDS = 10.0
_REPORT_SECONDS = 5.0  # for the main thread to find out by itself


class ServerClient:
    """Connects one worker to the server of its run.

    On the same machine, which is what the address 127.0.0.1 says, tensors go through shared memory; to any other
    address they go behind the messages.

    Every method raises :class:`ExchangeError` when the server is gone and :class:`RefusedError` when it says no.

    Args:
        on_loss: called, with what happened, some seconds after the server's death if this worker has not left by
            then: it may be computing, and not ask the server for long.
    """

    def __init__(self, address: str, token: str, worker: int, on_loss: Callable[[str], None] | None = None) -> None:
        self.address, self.token, self.worker = address, token, worker
        self.remote = address.rpartition(":")[0] != LOOPBACK
        self._channel = Channel(_connect(address))
        self.memory: SharedMemory | None = None
        self._slot: Tensor | None = None
        self._leaving = False
        self._in_slot = -1  # an update that was accepted, and may not have been taken yet
        if on_loss is not None:
            threading.Thread(target=self._watch, args=(on_loss,), daemon=True).start()

    def join(self, layout: Layout, method: dict[str, Any]) -> dict[str, Any]:
        """Introduces the worker; waits until the server has parameters, unless this is worker 0, who brings them."""
        hello = {"kind": "hello", "token": self.token, "worker": self.worker, "method": method, "remote": self.remote}
        welcome = self.ask(hello | {"layout": layout.to_json()})
        if self.remote:
            self._slot = self._channel.room = torch.zeros(layout.size)
        else:
            shape = layout.size, welcome["workers"], welcome["publishes"]
            self.memory = SharedMemory.attach(welcome["memory"], *shape)
            self._slot = self.memory.slot(self.worker)
        return welcome

    def use(self, memory: SharedMemory) -> None:
        """Keeps the slot of a remote server in memory that other processes of this machine can open."""
        self.memory = memory
        self._slot = self._channel.room = memory.slot(0)

    def initialise(self, state: str | None) -> dict[str, Any]:
        """Worker 0 brings a new server the parameters in its slot, or all of a state in a file on the server's disk."""
        return self.ask({"kind": "initialise", "state": state}, self._sent)

    def push(self, write: Callable[[Tensor], None], **message: Any) -> dict[str, Any]:
        """Calls ``write(slot)`` with this worker's flat slot, then tells the server that it is ready.

        The answer comes when the update is applied; or at once, if it will be added to others without a step, and
        ``wait`` is not set. Then the slot is the server's for a moment longer, for which the next push waits.
        """
        if self.memory is not None and not self.remote:
            self.memory.wait_until_taken(self.worker, self._in_slot)
        write(self.slot)
        answer = self.ask({"kind": "push", **message}, self._sent)
        self._in_slot = message["sequence"] if answer["status"] == "accepted" else -1
        return answer

    @property
    def slot(self) -> Tensor:
        """What this worker and the server hand each other, flat. Where nothing is published, the parameters are in it
        after each answer."""
        if self._slot is None:
            raise ExchangeError("this worker has not joined the run")
        return self._slot

    @property
    def _sent(self) -> Tensor | None:
        return self._slot if self.remote else None

    def pull(self, copy: Callable[[Tensor], None]) -> int:
        """Calls ``copy(flat parameters)`` on one version and returns it; other workers may do so at the same time."""
        if self.memory is not None and self.memory.publishes:
            return self.memory.read(copy)
        version = int(self.ask({"kind": "pull"})["version"])
        copy(self.slot)
        return version

    def ask(self, message: dict[str, Any], tensor: Tensor | None = None) -> dict[str, Any]:
        """One question, one answer."""
        try:
            self._channel.send(message, tensor)
            answer = self._channel.receive()
        except ExchangeError as error:
            raise ExchangeError(self._lost()) from error
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer

    def leave(self, finished: bool) -> None:
        """Ends the connection; ``finished`` ends the run for every worker."""
        self._leaving = True
        try:
            self.ask({"kind": "leave", "finished": finished})
        except ExchangeError:
            pass  # it had ended before us
        finally:
            self._channel.close()

    def _lost(self) -> str:
        return f"the server at {self.address} is gone; the run continues from its last checkpoint when started again"

    def _watch(self, on_loss: Callable[[str], None]) -> None:
        poll = select.poll()
        poll.register(self._channel.connection, select.POLLRDHUP)
        poll.poll()
        time.sleep(_REPORT_SECONDS)
        if not self._leaving:
            on_loss(self._lost())


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise ExchangeError(f"no server at {address} (--server): {error}") from error
    connection.settimeout(None)
    return connection
