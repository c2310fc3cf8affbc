"""Feeds a hostile worker's messages to a server's service without a socket, as fast as it can handle them."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fairseq_async import protocol
from fairseq_async.errors import ProtocolError
from fairseq_async.exchange.authentication import challenge, proof
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout
from fairseq_async.server.network.connections import Peer
from fairseq_async.server.plan import Build
from fairseq_async.server.service import Service
from fairseq_async.worker.connection.compressor import Compressor
from scripts.faults.hostile import HostileWorker

TOKEN = "a token of sixteen or more"


class FakeChannel:
    """A channel without a connection, which keeps the server's answers in ``said``."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.room: Tensor | None = None
        self.largest = self.tensor_bytes = 0
        self.any_length = False
        self.closed = self.with_tensor = False
        self.unsent = 0

    def queue(self, body: bytes, tensor: Tensor | None = None) -> None:
        self.said.append(body)

    def flush(self) -> bool:
        return True

    def notice_death(self, seconds: float) -> None:
        """Does nothing, since no kernel watches a connection here."""

    def is_closed(self) -> bool:
        return self.closed

    def end(self) -> None:
        self.closed = True

    def receive(self, tensor: bytes) -> None:
        """Copies the tensor that follows a message into ``room``; raises a ProtocolError as a channel does."""
        self.with_tensor, self.tensor_bytes = bool(tensor), len(tensor)
        if not tensor or self.room is None:
            return
        room = self.room.view(torch.uint8)
        if len(tensor) > room.numel() or not (self.any_length or len(tensor) == room.numel()):
            raise ProtocolError("a tensor was announced that is not of the model's size")
        room[: len(tensor)] = torch.frombuffer(bytearray(tensor), dtype=torch.uint8)


@dataclass
class Member:
    """A worker that has joined the service."""

    service: Service
    worker: int
    spec: MethodSpec
    layout: Layout
    remote: bool
    closed: bool = False

    def __post_init__(self) -> None:
        self.channel = FakeChannel()
        self.peer = Peer(self.channel)  # type: ignore[arg-type]
        self.service.greet(self.peer)
        theirs, ours = protocol.parse_answer(self.channel.said[0], protocol.Greeting).challenge, challenge()
        own = proof(TOKEN, "worker", theirs, ours)
        name = f"process of {self.worker}"
        self.send(protocol.encode(protocol.Introduce(own, ours, self.worker, joins=False, instance=name)))
        self.send(protocol.encode(protocol.Hello(self.spec, self.layout, self.remote)))

    def send(self, body: bytes, tensor: bytes = b"") -> bytes:
        """Sends a message and returns the server's answer."""
        self.channel.said.clear()
        try:
            self.channel.receive(tensor)
            self.service.receive(self.peer, body)
        except ProtocolError:
            self.channel.closed = True
        if self.channel.closed and not self.closed:
            self.service.disconnected(self.peer)
            self.closed = True
        return b"".join(self.channel.said)


@dataclass
class DirectAttack:
    """An honest and a hostile worker of one service, in this thread.

    Attributes:
        seconds: duration of each update of the honest worker, with the service's tick before it.
    """

    run_dir: Path
    build: Build
    spec: MethodSpec
    layout: Layout
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.service = Service(TOKEN, 2, self.run_dir, self.build)
        self.honest = Member(self.service, 0, self.spec, self.layout, remote=False)
        self.service.described.slots.memory.slot(0).zero_()
        self.honest.send(protocol.encode(protocol.Initialise(False)))
        self._hostile = HostileWorker("", TOKEN, self.spec, self.layout, random.Random(self.seed))
        self._version = 0
        push = self.spec.compress.push
        self._compressor = None if push is None else Compressor(push, self.spec, self.layout, worker=0)

    def session(self, messages: int) -> None:
        """Lets the hostile worker join and send this number of messages, or fewer if the server disconnects it."""
        member = Member(self.service, 1, self.spec, self.layout, remote=True)
        self._hostile.learn(b"".join(member.channel.said))
        for _ in range(messages):
            self._hostile.learn(member.send(*self._hostile.message()))
            self.sent += 1
            if member.closed or member.peer.worker is None:
                break
        if not member.closed:
            self.service.disconnected(member.peer)
        self.outcomes = self._hostile.outcomes

    def step(self) -> None:
        """Sends an update of the honest worker, whose values depend only on the number of the update."""
        sequence = len(self.seconds)
        update = torch.randn(self.layout.size, generator=torch.Generator().manual_seed(sequence))
        report = protocol.Report(epochs=0.25, loss=1.0, position={"batch": sequence})
        push, payload = protocol.Push(sequence, self._version, 1.0, report), b""
        if self._compressor is None:
            self.service.described.slots.memory.slot(0).copy_(update)
        else:
            push, encoded = self._compressor.encode(push, update)
            payload = b"" if encoded is None else encoded.numpy().tobytes()
            self._compressor.settle(taken=True)
        began = time.perf_counter()
        self.service.tick()
        said = self.honest.send(protocol.encode(push), payload)
        self.seconds.append(time.perf_counter() - began)
        answer = protocol.parse_answer(said, protocol.PushReply)
        assert answer.status == "applied"
        self._version = answer.version

    def state(self) -> list[object]:
        """Returns the server's state of the honest worker, the rule's state and the parameters."""
        coordinator = self.service.described.coordinator
        server = coordinator.server
        own = [server.sequences[0], server.refused.get(0, 0), coordinator.positions[0]]
        return [server.parameters, server.rule.state_dict(), own]
