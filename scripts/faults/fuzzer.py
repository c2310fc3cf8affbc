"""Sends random bytes and corrupted messages to a server, with the token (as a worker) and without it."""

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

from fairseq_async import protocol
from fairseq_async.errors import AsyncError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof
from scripts.faults.adder import LAYOUT, adder_spec
from scripts.faults.digest import digest
from scripts.faults.thread_server import ThreadServer

CORPUS = Path(__file__).parents[2] / "tests" / "server" / "corpus"
_HEADER = struct.Struct("!IQ")  # bytes of the body, bytes of the tensor behind it
_TENSOR = 4 * LAYOUT.size
_VALUES: list[Any] = [None, True, -1, 10**400, 1e308, "", "\x00", "9" * 300, [], [[]], {}, {"a": {}}, [1] * 100, 0.5]
_VERSION = 10**6  # no server here reaches this version, so a corrupted push that starts there changes nothing
_HELLO = protocol.Hello(adder_spec(), LAYOUT, remote=True)
# messages of a worker, and messages of a peer without the token
_SEEDS: dict[str, dict[str, Any]] = {
    request.kind: json.loads(protocol.encode(request))
    for request in (
        protocol.Introduce("0" * 64, "y", worker=1, joins=False, instance="x"),
        _HELLO,
        protocol.Push(0, _VERSION, 1.0),
        protocol.ScheduleEvent("x-1", "begin_epoch", 1),
        protocol.Pull(),
        protocol.Initialise(False),
        protocol.SaveState(),
        protocol.Leave(finished=False),
        protocol.Alive(),
    )
}
_FIXED = ("kind", "base_version", "finished", "path")  # a random value of these could be valid


def frame(body: bytes, tensor: bytes = b"") -> bytes:
    """Returns a message as it crosses the wire, with its header."""
    return _HEADER.pack(len(body), len(tensor)) + body + tensor


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Returns the data with a few bytes changed, deleted, doubled or inserted, or with other lengths in the header."""
    corrupted = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(corrupted) + 1)
        match rng.randrange(5):
            case 0 if place < len(corrupted):
                corrupted[place] ^= 1 << rng.randrange(8)
            case 1:
                del corrupted[place : place + rng.choice((1, 4, 100))]
            case 2:
                corrupted[place:place] = rng.randbytes(rng.choice((1, 4, 100)))
            case 3:
                corrupted[place:place] = corrupted[place : place + 40]
            case _:
                body = rng.choice((0, 1, len(corrupted), 1 << 10, 1 << 24, 1 << 31, (1 << 32) - 1))
                corrupted[: _HEADER.size] = _HEADER.pack(body, rng.choice((0, 0, 1, _TENSOR, 1 << 40, (1 << 64) - 1)))
    return bytes(corrupted)


def misvalued(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns the message with one value wrong, or with one key missing or too many."""
    keys = [key for key in message if key not in _FIXED]
    key = rng.choice([*keys, "kinds"])
    if key in message and rng.random() < 0.3:
        return {name: value for name, value in message.items() if name != key}
    return message | {key: rng.choice(_VALUES)}


@dataclass
class Fuzzer:
    """Attacks one server, which worker 0 uses at the same time.

    Attributes:
        tried: number of messages by sender and outcome.
        found: one message for each sender and outcome.
    """

    server: ThreadServer
    rng: random.Random
    corpus: list[bytes] = field(default_factory=list)
    tried: Counter[str] = field(default_factory=Counter)
    found: dict[str, bytes] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        """Sends messages for this number of seconds; the server must survive."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            (self._stranger if self.rng.random() < 0.5 else self._member)()

    def state(self) -> str:
        """Returns the digest of the server's state on which training depends."""
        coordinator = self.server.service.described.coordinator
        return digest(coordinator.server.state_dict() | {"plan": coordinator.plan.state_dict()})

    def _stranger(self) -> None:
        with self._connect() as connection:
            connection.recv(1 << 10)  # the challenge
            self._send(connection, "stranger", self._next(["introduce", "hello", "push", "leave"]))

    def _member(self) -> None:
        """Sends as worker 1, with the token, until the server closes the connection."""
        with self._connect() as connection:
            channel = Channel(connection)
            try:
                theirs, ours = protocol.parse_answer(channel.receive(), protocol.Greeting).challenge, challenge()
                own = proof(self.server.token, "worker", theirs, ours)
                channel.send(protocol.encode(protocol.Introduce(own, ours, worker=1, joins=False, instance="mad")))
                if self.rng.random() < 0.9:
                    channel.receive()
                    channel.send(protocol.encode(_HELLO))
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
            tensor = b"\x7f" * _TENSOR if message["kind"] == "push" and self.rng.random() < 0.5 else b""
            return mutated(frame(json.dumps(message).encode(), tensor), self.rng)
        return frame(json.dumps(misvalued(message, self.rng)).encode())

    def _connect(self) -> socket.socket:
        host, _, port = self.server.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def _send(self, connection: socket.socket, who: str, data: bytes) -> bool:
        """Sends a message and waits 2 ms for the answer; returns whether to use the connection further."""
        connection.settimeout(0.002)
        try:
            connection.sendall(data)
            said = connection.recv(1 << 16)
        except TimeoutError:
            self._note(who, "no answer", data)
            return self.rng.random() < 0.5  # the server may still wait for the rest of a message
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
    """Returns the kind of an answer: its text without what is specific to one message."""
    if not said:
        return "closed"
    error = re.search(rb'"error": ?"([a-z ]{4,30})', said)
    return error[1].decode().strip() if error else "answered"


def read_corpus() -> list[bytes]:
    return [path.read_bytes() for path in sorted(CORPUS.glob("*.bin"))]


def write_corpus(found: dict[str, bytes]) -> None:
    CORPUS.mkdir(exist_ok=True)
    for outcome, data in found.items():
        (CORPUS / (re.sub(r"[^a-z]+", "-", outcome) + ".bin")).write_bytes(data[:8192])
