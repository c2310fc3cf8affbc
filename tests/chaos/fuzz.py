"""Random bytes and spoilt messages at a server, of strangers and of a worker that has gone mad."""

import json
import random
import re
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_async.errors import AsyncError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof
from tests.chaos.runs import ADDER, LAYOUT, digest
from tests.servers import ThreadServer

CORPUS = Path(__file__).parent / "corpus"
_LENGTH = struct.Struct("!I")
_PAYLOAD = 4 * LAYOUT.size
_VALUES: list[Any] = [None, True, -1, 10**400, 1e308, "", "\x00", "9" * 300, [], [[]], {}, {"a": {}}, [1] * 100, 0.5]
_VERSION = 10**6  # no server here comes to it: a push that starts there changes nothing, however it is spoilt
# what a worker says, and what a stranger may
_SEEDS: dict[str, dict[str, Any]] = {
    "introduce": {
        "kind": "introduce",
        "proof": "0" * 64,
        "worker": 1,
        "joins": False,
        "instance": "x",
        "challenge": "y",
    },
    "hello": {"kind": "hello", "layout": LAYOUT.to_json(), "method": ADDER, "remote": True},
    "push": {"kind": "push", "sequence": 0, "base_version": _VERSION, "weight": 1.0, "report": {}, "wait": False},
    "plan": {"kind": "plan", "number": "x-1", "event": "begin_epoch", "epoch": 1},
    "pull": {"kind": "pull"},
    "initialise": {"kind": "initialise", "state": None},
    "snapshot": {"kind": "snapshot", "path": "/nonexistent/x"},
    "leave": {"kind": "leave", "finished": False},
    "alive": {"kind": "alive"},
}
_FIXED = ("kind", "base_version", "finished", "path")  # in these a chance value could be right


def frame(message: Any, payload: bytes = b"") -> bytes:
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body + payload


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled or put in; or another length before it."""
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(spoilt) + 1)
        match rng.randrange(5):
            case 0 if place < len(spoilt):
                spoilt[place] ^= 1 << rng.randrange(8)
            case 1:
                del spoilt[place : place + rng.choice((1, 4, 100))]
            case 2:
                spoilt[place:place] = rng.randbytes(rng.choice((1, 4, 100)))
            case 3:
                spoilt[place:place] = spoilt[place : place + 40]
            case _:
                spoilt[:4] = _LENGTH.pack(rng.choice((0, 1, len(spoilt), 1 << 10, 1 << 24, 1 << 31, (1 << 32) - 1)))
    return bytes(spoilt)


def misvalued(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """JSON of the right form with a wrong value, a key too few or one too many."""
    keys = [key for key in message if key not in _FIXED]
    key = rng.choice([*keys, "kinds", "payload"])
    if key in message and rng.random() < 0.3:
        return {name: value for name, value in message.items() if name != key}
    return message | {key: rng.choice(_VALUES)}


@dataclass
class Fuzzer:
    """Attacks one server, which worker 0 uses at the same time.

    Attributes:
        tried: messages by who sent them and what came of it.
        found: one message for each answer that had not been seen before.
    """

    server: ThreadServer
    rng: random.Random
    corpus: list[bytes] = field(default_factory=list)
    tried: Counter[str] = field(default_factory=Counter)
    found: dict[str, bytes] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        """Sends for so long; the server must still be there."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            (self._stranger if self.rng.random() < 0.5 else self._member)()

    def state(self) -> str:
        """The digest of all that training depends on."""
        server = self.server.service.server
        return digest(server.state_dict() | {"plan": self.server.service.run.plan.state_dict()})

    def _stranger(self) -> None:
        with self._connect() as connection:
            connection.recv(1 << 10)  # the challenge
            self._send(connection, "stranger", self._next(["introduce", "hello", "push", "leave"]))

    def _member(self) -> None:
        """As worker 1, with the token, until the server has had enough of it."""
        with self._connect() as connection:
            channel = Channel(connection)
            try:
                theirs, ours = channel.receive()["challenge"], challenge()
                given = {"proof": proof(self.server.token, "worker", theirs, ours), "challenge": ours, "worker": 1}
                channel.send(_SEEDS["introduce"] | given | {"instance": "mad"})
                if self.rng.random() < 0.9:
                    channel.receive()
                    channel.send(_SEEDS["hello"])
                    channel.receive()
            except AsyncError:
                return
            for _ in range(self.rng.choice((1, 20, 200))):
                if not self._send(connection, "worker", self._next(list(_SEEDS))):
                    return

    def _next(self, kinds: list[str]) -> bytes:
        draw = self.rng.random()
        if draw < 0.1:
            return self.rng.randbytes(self.rng.choice((1, 4, 50, 5000)))
        if draw < 0.2 and self.corpus:
            return mutated(self.rng.choice(self.corpus), self.rng)
        message = _SEEDS[self.rng.choice(kinds)]
        if draw < 0.6:
            payload = b"\x7f" * _PAYLOAD if message["kind"] == "push" and self.rng.random() < 0.5 else b""
            return mutated(frame(message | ({"payload": _PAYLOAD} if payload else {}), payload), self.rng)
        return frame(misvalued(message, self.rng))

    def _connect(self) -> socket.socket:
        host, _, port = self.server.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def _send(self, connection: socket.socket, who: str, data: bytes) -> bool:
        """Whether the connection is still of use; what the server said is not waited for long."""
        connection.settimeout(0.002)
        try:
            connection.sendall(data)
            said = connection.recv(1 << 16)
        except TimeoutError:
            self._note(who, "no answer", data)
            return self.rng.random() < 0.5  # it may wait for the rest of a message, and take all that follows for it
        except OSError:
            said = b""
        self._note(who, _kind(said), data)
        return bool(said)

    def _note(self, who: str, outcome: str, data: bytes) -> None:
        self.tried[f"{who}: {outcome}"] += 1
        if f"{who}: {outcome}" not in self.found:
            self.found[f"{who}: {outcome}"] = data
            self.corpus.append(data)


def _kind(said: bytes) -> str:
    """The answer without what is peculiar to one message."""
    if not said:
        return "closed"
    error = re.search(rb'"error": "([a-z ]{4,30})', said)
    return error[1].decode().strip() if error else "answered"


def read_corpus() -> list[bytes]:
    return [path.read_bytes() for path in sorted(CORPUS.glob("*.bin"))]


def write_corpus(found: dict[str, bytes]) -> None:
    CORPUS.mkdir(exist_ok=True)
    for outcome, data in found.items():
        (CORPUS / (re.sub(r"[^a-z]+", "-", outcome) + ".bin")).write_bytes(data[:8192])
