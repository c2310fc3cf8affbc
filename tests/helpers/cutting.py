"""A relay that cuts workers' connections to a shard, again and again, in the middle of what they send and receive."""

import random
import socket
import threading
from contextlib import suppress


class CuttingRelay:
    """Relays connections to a process of this machine; a worker's is cut after a random number of bytes.

    The server's connection stays: without it the server would have to go back to a snapshot.

    Args:
        most: largest number of bytes, of both directions together, after which a connection is cut.

    Attributes:
        cuts: how many connections were cut.
    """

    def __init__(self, target: str, most: int, seed: int) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._most, self._random = (host, int(port)), most, random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                outside, _ = self._listener.accept()
                inside = socket.create_connection(self._target)
                _Relayed(self, outside, inside, self._random.randrange(self._most)).start()


class _Relayed:
    """One connection, and how many bytes are left until it is cut."""

    def __init__(self, relay: CuttingRelay, outside: socket.socket, inside: socket.socket, left: int) -> None:
        self._relay, self._ends, self._left = relay, (outside, inside), left
        self._lock = threading.Lock()
        self._of_worker = False

    def start(self) -> None:
        for source, target in (self._ends, self._ends[::-1]):
            threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 12):
                if b'"introduce"' in data and b'"worker":null' not in data:
                    self._of_worker = True
                with self._lock:
                    passed = data[: max(0, self._left)] if self._of_worker else data
                    self._left -= len(passed) if self._of_worker else 0
                target.sendall(passed)
                if len(passed) < len(data):
                    self._relay.cuts += 1
                    break
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
