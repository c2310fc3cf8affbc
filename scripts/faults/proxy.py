"""A proxy between workers and server that injects network faults, message by message."""

import json
import selectors
import socket
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.faults.schedule import Fault

_HEADER = struct.Struct("!IQ")  # bytes of the body, bytes of the tensor behind it
_HANDSHAKE = ("introduce", "hello")  # faults that wait for a message spare these
_MUTE = "alive"  # the one message that has no reply


class Frames:
    """Cuts a stream of bytes into messages; each includes the tensor that follows it."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        self._bytes += data
        whole = []
        while (frame := self._next()) is not None:
            whole.append(frame)
        return whole

    def _next(self) -> tuple[dict[str, Any], bytes] | None:
        if len(self._bytes) < _HEADER.size:
            return None
        body, tensor = _HEADER.unpack_from(self._bytes)
        end = _HEADER.size + body + tensor
        if len(self._bytes) < end:
            return None
        message = json.loads(self._bytes[_HEADER.size : _HEADER.size + body])
        frame = bytes(self._bytes[:end])
        del self._bytes[:end]
        return message, frame


@dataclass
class _Connection:
    worker: int | None = None
    replies: deque[Fault | None] = field(default_factory=deque)  # faults for the replies that are still to come


class _Cut(Exception):
    """Raised to close a relayed connection on both sides."""


class Proxy:
    """Listens on ``host`` for workers, connects each to the server, and injects faults into their messages.

    Args:
        server: HOST:PORT.
        host: the address for workers. As usual, the address decides whether workers use shared memory.
        latency: seconds by which every message is delayed, in each direction.

    Attributes:
        address: HOST:PORT for the workers.
        struck: number of faults of each kind that have happened.
    """

    def __init__(self, server: str, host: str = "127.0.0.1", latency: float = 0.0) -> None:
        self.server, self.latency = server, latency
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.struck: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._planned: dict[int, list[Fault]] = defaultdict(list)
        self._next: dict[int, deque[Fault]] = defaultdict(deque)
        self._asked: Counter[int] = Counter()
        self._healed_at: dict[int, float] = defaultdict(float)
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def plan(self, fault: Fault) -> None:
        """Schedules the fault for the worker's request with the number ``fault.message``."""
        assert isinstance(fault.target, int)
        self._planned[fault.target].append(fault)

    def strike(self, fault: Fault) -> None:
        """Injects the fault now, or into the worker's next message."""
        assert isinstance(fault.target, int)
        if fault.kind == "partition":
            self._partition(fault)
        else:
            self._next[fault.target].append(fault)

    def close(self) -> None:
        self._closing.set()
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        self._listener.settimeout(0.1)
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        host, _, port = self.server.rpartition(":")
        with client:
            try:
                with socket.create_connection((host, int(port)), timeout=5) as server:
                    for connection in (client, server):
                        connection.settimeout(60)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._relay(client, server)
            except (OSError, _Cut):
                pass  # both sides see a closed connection

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        here = _Connection()
        frames = {client: Frames(), server: Frames()}
        passes: dict[socket.socket, Callable[..., None]] = {client: self._request, server: self._reply}
        other = {client: server, server: client}
        with selectors.DefaultSelector() as ready:
            for side in (client, server):
                ready.register(side, selectors.EVENT_READ, side)
            while not self._closing.is_set():
                for key, _ in ready.select(0.1):
                    side = key.data
                    data = side.recv(1 << 20)
                    if not data:
                        return
                    for message, frame in frames[side].feed(data):
                        passes[side](here, other[side], message, frame)

    def _request(self, here: _Connection, server: socket.socket, message: dict[str, Any], frame: bytes) -> None:
        kind = message.get("kind")
        if kind == "introduce":
            here.worker = message["worker"]
        self._hold(here)
        fault = None
        if kind != _MUTE:
            fault = None if kind in _HANDSHAKE or here.worker is None else self._due(here.worker)
            here.replies.append(fault if fault is not None and fault.of == "reply" else None)
        if fault is None or fault.of == "reply":
            return server.sendall(frame)
        self._harm(fault, server, frame)
        if fault.kind == "duplicate":
            here.replies.append(fault)
            server.sendall(frame)

    def _reply(self, here: _Connection, client: socket.socket, message: dict[str, Any], frame: bytes) -> None:
        if here.worker is None and "proof" in message:
            here.worker = message["worker"]
        self._hold(here)
        fault = here.replies.popleft() if here.replies else None
        if fault is None:
            client.sendall(frame)
        elif fault.kind != "duplicate":  # the worker has sent one request, so the duplicate's reply is dropped
            self._harm(fault, client, frame)

    def _harm(self, fault: Fault, to: socket.socket, frame: bytes) -> None:
        self.struck[fault.kind] += 1
        if fault.kind == "drop":
            raise _Cut
        if fault.kind == "corrupt":
            frame = frame[: _HEADER.size] + bytes([frame[_HEADER.size] ^ 0xFF]) + frame[_HEADER.size + 1 :]
        if fault.kind == "delay":
            assert fault.seconds is not None
            self._closing.wait(fault.seconds)
        to.sendall(frame)

    def _due(self, worker: int) -> Fault | None:
        with self._lock:
            self._asked[worker] += 1
            for fault in self._planned[worker]:
                if fault.message == self._asked[worker]:
                    self._planned[worker].remove(fault)
                    if fault.kind != "partition":
                        return fault
                    self._partition(fault)
            return self._next[worker].popleft() if self._next[worker] else None

    def _partition(self, fault: Fault) -> None:
        assert isinstance(fault.target, int) and fault.seconds is not None
        self.struck["partition"] += 1
        self._healed_at[fault.target] = time.monotonic() + fault.seconds

    def _hold(self, here: _Connection) -> None:
        if self.latency:
            time.sleep(self.latency)
        while here.worker is not None and time.monotonic() < self._healed_at[here.worker]:
            if self._closing.wait(0.05):
                raise _Cut
