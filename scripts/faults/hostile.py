"""A hostile worker that knows the token: its sessions are valid except for messages that are changed at random."""

import multiprocessing
import random
import re
import socket
import struct
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from fairseq_async import protocol
from fairseq_async.errors import AsyncError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout
from scripts.faults.grammar import Grammar, to_json
from scripts.faults.tensors import HostileTensors

_HEADER = struct.Struct("!IQ")  # bytes of the body, bytes of the tensor behind it
_AT_ONCE = 64  # most messages of a batch, which is sent before answers are read
_BATCHES = 2  # batches that may be unanswered
_TELL_EVERY = 2.0  # seconds between two reports of the attack's process
_LIES = 0.02  # share of the batches that end with a false length, in the middle of a message
_REPLY = re.compile(rb'"status":"(\w+)","version":(\d+)')
_ERROR = re.compile(rb'"error":"([^"\\]{0,60})')
_NUMBER = re.compile(r"[-+]?\d[\w.+-]*")
_KINDS = ["push"] * 8 + ["pull", "pull", "wait", "schedule_event", "alive", "hello", "initialise", "save_state"]
_KINDS += ["introduce"]


@dataclass
class HostileWorker:
    """A hostile worker, which sends thousands of messages a second.

    Its updates are zeros, NaN or invalid payloads. None of them changes the parameters, so nothing that it sends may.

    Attributes:
        joins: whether it joins unannounced and takes a free number in place of ``worker``.
        only_nan: whether it never sends zeros, which in a real run would be gradients like any other.
        with_tensor: share of its updates that have a tensor; a real model's tensor is large.
        pause: seconds before each batch of messages.
        sent: number of messages that the server has read, without those of a flood.
        outcomes: number of answers by their content.
    """

    address: str
    token: str
    spec: MethodSpec
    layout: Layout
    rng: random.Random
    worker: int | None = 1
    joins: bool = False
    only_nan: bool = False
    with_tensor: float = 1.0
    pause: float = 0.0
    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._grammar = Grammar(self.rng)
        self._tensors = HostileTensors(self.spec, self.layout, self.rng)
        self._sequence = self._version = self._batch = 0
        self._given = {"spec": self.spec.to_json(), "layout": self.layout.to_json(), "remote": True}

    def run(self, messages: int, until: float = float("inf")) -> None:
        """Sends this number of messages, or stops at ``until``, a time of ``time.monotonic``."""
        end = self.sent + messages
        while self.sent < end and time.monotonic() < until:
            try:
                self._session(end, until)
            except (AsyncError, OSError) as error:
                self.outcomes[f"connection: {type(error).__name__}"] += 1
                time.sleep(self.pause)

    def _session(self, end: int, until: float) -> None:
        """Runs one session over a connection; stops when the server closes it."""
        with self._connect() as connection:
            channel, kind = Channel(connection), self.rng.random()
            if kind < 0.3:
                return self._as_stranger(channel)
            self._introduce(channel)
            if self.rng.random() < 0.95:
                channel.send(protocol.encode(protocol.Hello(self.spec, self.layout, remote=True)))
                self.learn(channel.receive())
            if kind < 0.31:
                return self._dribble(connection)
            if kind < 0.32:
                return self._flood(connection)
            unanswered: deque[bytes] = deque()
            said = bytearray()
            for _ in range(self.rng.choice((2, 50, 1000))):
                if self.sent >= end or time.monotonic() > until:
                    return
                time.sleep(self.pause)
                self._send_some(connection, unanswered, said)

    def _connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def _as_stranger(self, channel: Channel) -> None:
        """Sends a wrong introduction, or another message in its place."""
        channel.receive()
        given = {"worker": self.worker, "joins": self.joins}
        kind = self.rng.choice(["introduce", "introduce", *_KINDS])
        channel.send(self._grammar.wrong(self._grammar.valid(kind, **(given if kind == "introduce" else {}))))
        self.sent += 1
        self._note(channel.receive())

    def _introduce(self, channel: Channel) -> None:
        """Introduces itself."""
        theirs, ours = protocol.parse_answer(channel.receive(), protocol.Greeting).challenge, challenge()
        own = proof(self.token, "worker", theirs, ours)
        introduce = protocol.Introduce(own, ours, self.worker, self.joins, instance="hostile")
        channel.send(protocol.encode(introduce))
        self._note(channel.receive())
        self.sent += 1

    def _dribble(self, connection: socket.socket) -> None:
        """Sends the first bytes of a message, one by one."""
        for byte in self._frame()[: self.rng.randrange(1, 40)]:
            connection.sendall(bytes([byte]))
            time.sleep(0.01)
        self.outcomes["dribbled"] += 1

    def _flood(self, connection: socket.socket) -> None:
        """Sends 2,000 requests and reads no answer."""
        pull = protocol.encode(protocol.Pull())
        for _ in range(2000):
            connection.sendall(_HEADER.pack(len(pull), 0) + pull)
        self.outcomes["flooded"] += 1

    def _send_some(self, connection: socket.socket, unanswered: deque[bytes], said: bytearray) -> None:
        """Sends a batch of messages; then reads answers until at most ``_BATCHES`` batches are unanswered.

        The last message of a batch is a mark, which its answer quotes.

        Args:
            unanswered: marks of the unanswered batches; changed here.
            said: bytes that were read and not yet parsed; changed here.
        """
        frames = [self._frame() for _ in range(self.rng.randint(1, _AT_ONCE))]
        self._batch += 1
        mark = f"mark-{self._batch}-{len(frames)}".encode()
        last = b'{"kind":"%b"}' % mark
        if self.rng.random() < _LIES:
            connection.sendall(b"".join(frames) + self._lie(last))
            raise ConnectionError("left in the middle of a message")
        connection.sendall(b"".join(frames) + _HEADER.pack(len(last), 0) + last)
        unanswered.append(mark)
        while len(unanswered) > _BATCHES:
            self._read(connection, unanswered, said)

    def _read(self, connection: socket.socket, unanswered: deque[bytes], said: bytearray) -> None:
        while (end := said.find(unanswered[0])) < 0:
            more = connection.recv(1 << 16)
            if not more:
                self.learn(bytes(said))
                raise ConnectionError("closed by the server")
            said += more
        self.learn(bytes(said[:end]))
        del said[:end]
        self.sent += int(unanswered.popleft().rsplit(b"-", 1)[1]) + 1

    def _frame(self) -> bytes:
        body, tensor = self.message()
        return _HEADER.pack(len(body), len(tensor)) + body + tensor

    def message(self) -> tuple[bytes, bytes]:
        """Returns the next message of a worker that has said hello, and the tensor that follows it."""
        kind = "leave" if self.rng.random() < 0.002 else self.rng.choice(_KINDS)
        message = self._grammar.valid(kind, **self._plausible(kind))
        body = self._grammar.wrong(message) if self.rng.random() < 0.7 else to_json(message)
        if kind != "push" or self.rng.random() >= self.with_tensor:
            return body, b""
        return body, self._tensors.bad() if self.only_nan or self.rng.random() < 0.2 else self._tensors.zeros

    def _plausible(self, kind: str) -> dict[str, Any]:
        """Returns the values that make a message of this kind valid now."""
        if kind == "push":
            sequence = self._sequence + (self.rng.random() < 0.1)
            return {"sequence": sequence, "base_version": self._version, "weight": self.rng.choice((0.0, 1.0, 9.0))}
        if kind == "hello":
            return self._given
        return {"finished": False} if kind == "leave" else {}

    def _lie(self, body: bytes) -> bytes:
        """Returns a frame that is not as long as its header says."""
        length = self.rng.choice((0, 1, len(body) - 1, len(body) + 1, 1 << 18, 1 << 24, 1 << 31, (1 << 32) - 1))
        return _HEADER.pack(length, self.rng.choice((0, 0, 1, len(self._tensors.zeros), 1 << 40, (1 << 64) - 1))) + body

    def learn(self, said: bytes) -> None:
        """Reads the version and the number of its next update from the server's answers, and counts these."""
        for found in _REPLY.finditer(said):
            self.outcomes[f"push: {found[1].decode()}"] += 1
            self._version = int(found[2])
            self._sequence += found[1] in (b"applied", b"accepted", b"refused", b"outlier")
        if welcome := re.search(rb'"version":(\d+),"sequence":(\d+)', said):
            self._version, self._sequence = int(welcome[1]), int(welcome[2])
        self._note(said)

    def _note(self, said: bytes) -> None:
        for error in _ERROR.finditer(said):
            self.outcomes["refused: " + _NUMBER.sub("#", error[1].decode(errors="replace"))[:50]] += 1


@dataclass
class Attack:
    """A hostile worker in a process of its own, which ends after ``messages`` messages.

    Attributes:
        sent, outcomes: those of the hostile worker at its last report.
    """

    hostile: HostileWorker
    messages: int
    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_attack, args=(self.hostile, self.messages, writer), daemon=True)
        self._process.start()
        writer.close()

    def poll(self) -> bool:
        """Reads the reports of the process; returns whether it still runs."""
        try:
            while self._reader.poll():
                self.sent, self.outcomes = self._reader.recv()
        except EOFError:
            return False
        return True

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _attack(hostile: HostileWorker, messages: int, writer: Connection) -> None:
    while hostile.sent < messages:
        hostile.run(messages - hostile.sent, until=time.monotonic() + _TELL_EVERY)
        writer.send((hostile.sent, hostile.outcomes))
