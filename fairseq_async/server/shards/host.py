"""A process that holds one shard of a run's server on another machine, with its own part of the workers' traffic."""

import select
import socket
import ssl
import time
import zlib
from collections.abc import Callable
from functools import partial

import torch
from pydantic import ValidationError
from torch import Tensor

from fairseq_async import protocol
from fairseq_async.algorithms.threads import forget_threads
from fairseq_async.errors import AsyncError, ExchangeError, ProtocolError, RefusedError
from fairseq_async.exchange.channel import LARGEST
from fairseq_async.protocol.division import at_hosts
from fairseq_async.protocol.notices import Tell, tell_log
from fairseq_async.protocol.shard_messages import (
    TAKEN,
    Begin,
    Bytes,
    Digest,
    Digested,
    Done,
    Failed,
    Fetch,
    Finish,
    Give,
    Given,
    Measure,
    Measured,
    Message,
    Norm,
    NormOfAll,
    Place,
    Placed,
    Sized,
    Store,
    encode,
    parse,
)
from fairseq_async.server.membership import JOINERS, Membership
from fairseq_async.server.network.connection_loop import ConnectionLoop
from fairseq_async.server.network.peers import Handshake, Peer, RefusalLog
from fairseq_async.server.plan import Build
from fairseq_async.server.shards.build import part_of
from fairseq_async.server.shards.held_part import HeldPart

_SERVER = -1  # the peer that gives commands; workers have ids from 0
_UNREAD = 8  # messages that a worker may leave unread; it waits for one at a time
_SMALL = 1 << 12  # bytes of a worker's message


class ShardHost:
    """Holds a shard: takes the commands of the run's server, and exchanges its part of the tensors with the workers.

    A worker sends its part of an update here before it tells the server of the update. The server then lets all shards
    apply it. When a worker asks the server for parameters, the server lets all hosts send theirs: commands arrive in
    one order at every shard, so the parts are of one version.

    If the server ends before the run does, the shard is dropped: the next server builds it again, from its snapshot.

    Args:
        token: what the server and the workers must know.
        load_build: returns what builds a rule, given the name of the server's program; raises a RefusedError for a
            program that has none.

    Attributes:
        finished: whether the run is finished.
    """

    def __init__(self, token: str, load_build: Callable[[str], Build], tell: Tell = tell_log) -> None:
        self.handshake, self.refusals = Handshake(token), RefusalLog()
        self._load_build, self.tell = load_build, tell
        self.finished = False
        self._server: Peer | None = None
        self._workers: dict[int, Peer] = {}
        self._instances: dict[int, str] = {}  # of each worker's last process that was connected
        self._held: HeldPart | None = None
        self._timeout, self._room_for = 60.0, 0  # seconds, and workers, as the run's server has them
        self._stored: tuple[Store, Tensor] | None = None  # what the next bytes from the server are
        self._placed: dict[Peer, int] = {}  # number of the update of which the next bytes from a worker are

    def clock(self) -> float:
        """Returns seconds that do not go back."""
        return time.monotonic()

    def greet(self, peer: Peer) -> None:
        """Answers a new connection with a challenge."""
        self._answer(peer, protocol.encode(self.handshake.greet(peer)))

    def note_message(self, peer: Peer) -> None:
        """Does nothing: the server knows which workers are alive."""

    def disconnected(self, peer: Peer) -> None:
        """Forgets a worker's connection; drops the shard if it was the server's."""
        self._placed.pop(peer, None)
        if peer is self._server:
            self._drop()
            if not self.finished:
                self.tell("the server is gone: its shard is dropped, and waits for a server that goes on")
        elif peer.worker is not None and self._workers.get(peer.worker) is peer:
            del self._workers[peer.worker]

    def receive(self, peer: Peer, body: bytes) -> None:
        """Handles the bytes of one message.

        Raises:
            ProtocolError: they are no message that this peer may send.
        """
        if peer.worker is None:
            return self._introduce(peer, body)
        try:
            message = parse(body)
        except ValidationError as error:
            raise ProtocolError(f"no message of a shard: {error.error_count()} mistakes") from error
        if peer is not self._server:
            return self._serve_worker(peer, message)
        try:
            self._command(peer, message)
        except Exception as error:  # whatever it is, the server is to know
            if isinstance(error, ExchangeError) and not isinstance(error, ProtocolError):
                raise  # the server is gone
            self._send(peer, Failed(f"{type(error).__name__}: {error}"[:1000]))
            self._held = None

    # Coming in

    def _introduce(self, peer: Peer, body: bytes) -> None:
        try:
            introduce = self._checked(peer, body)
        except RefusedError as error:
            self.refusals.count("introduction", peer.name, error)
            self._answer(peer, protocol.encode(protocol.ErrorReply(str(error))))
            return peer.channel.end()
        if introduce.worker is not None and (self._held is None or self._is_another(introduce)):
            return peer.channel.end()  # it tries again: the server is still to come, or the other connection to end
        worker = _SERVER if introduce.worker is None else introduce.worker
        membership = Membership(0, self.clock(), self._timeout)
        self._answer(peer, protocol.encode(self.handshake.complete(peer, introduce, worker, membership)))
        peer.channel.notice_death(self._timeout)
        if worker == _SERVER:
            self._connect_server(peer)
        else:
            self._connect_worker(peer, worker, introduce.instance)

    def _is_another(self, introduce: protocol.Introduce) -> bool:
        """Whether another process is connected as this worker; the same one connects again where its line broke."""
        before = None if introduce.worker is None else self._workers.get(introduce.worker)
        if before is None or introduce.worker is None or before.channel.is_closed():
            return False
        return self._instances[introduce.worker] != introduce.instance

    def _checked(self, peer: Peer, body: bytes) -> protocol.Introduce:
        introduce = self.handshake.checked(peer, protocol.parse_request(body))
        worker = introduce.worker
        if introduce.joins:
            raise RefusedError("this is a shard of a run's server: join at the address of the server itself")
        if worker is None and self._server is not None and not self._server.channel.is_closed():
            raise RefusedError(TAKEN)
        if worker is not None and self._held is not None and not 0 <= worker < self._room_for:
            raise RefusedError(f"worker {worker}: the workers of this run have numbers from 0 to {self._room_for - 1}")
        return introduce

    def _connect_server(self, peer: Peer) -> None:
        if self._server is not None:
            self.disconnected(self._server)
        self._server, peer.channel.largest, peer.channel.any_length = peer, LARGEST, True

    def _connect_worker(self, peer: Peer, worker: int, instance: str) -> None:
        peer.channel.largest = _SMALL
        if (before := self._workers.get(worker)) is not None:
            before.channel.end()
        self._workers[worker], self._instances[worker] = peer, instance

    # The server's commands

    def _command(self, server: Peer, command: Message) -> None:
        match command:
            case Begin():
                self._begin(server, command)
                return self._send(server, Done())
            case Finish():
                self.finished = True
                return None
        held = self._held
        if held is None:
            raise RefusedError("the server gives a command before it has begun")
        match command:
            case Store():
                room = held.room(command)
                self._stored, server.channel.room = (command, room), room
            case Bytes():
                self._restore_stored(server, held)
            case Fetch():
                content = held.content(command.what)
                self._send(server, Sized(content.numel()))
                self._send(server, Bytes(), content)
            case Measure():
                self._send(server, Measured(held.measure(command)))
            case Digest():
                self._send(server, Digested(zlib.crc32(held.parameters.numpy().data, command.before)))
            case Give():
                self._give(held, command)
            case _:
                self._send(server, held.carry_out(command))

    def _begin(self, server: Peer, begin: Begin) -> None:
        self._drop_workers()
        spec, layout = begin.spec, begin.layout
        place = at_hosts(spec, layout)[begin.shard - spec.server.server_shards]
        parameters = torch.zeros(place.size, dtype=torch.float32, device="cpu")
        build = self._load_build(begin.program)
        rule, _ = build(*part_of(spec, layout, place.tensors), parameters)
        looks_ahead, norm_of_all = spec.look_ahead != 0.0, partial(self._norm_of_all, server)
        self._held = HeldPart(rule, parameters, place.tensors, looks_ahead, norm_of_all)
        self._timeout, self._room_for = spec.server.worker_timeout, spec.workers + JOINERS
        server.channel.notice_death(self._timeout)
        self.tell(f"shard {begin.shard} of {spec.server.shards}, {place.size:,} of {layout.size:,} parameters")

    def _restore_stored(self, server: Peer, held: HeldPart) -> None:
        if self._stored is None or not server.channel.with_tensor:
            raise ProtocolError("bytes that were not announced")
        (store, content), self._stored, server.channel.room = self._stored, None, None
        held.restore(store, content)
        self._send(server, Done())

    def _give(self, held: HeldPart, give: Give) -> None:
        """Sends a worker its part. One that is not connected asks the server again when it is."""
        if (peer := self._workers.get(give.worker)) is not None:
            self._send(peer, Given(give.number), held.start(give))

    def _norm_of_all(self, server: Peer, norm: Tensor) -> float:
        """Returns the squared norm over all shards, in the middle of a step; meanwhile nobody else is served."""
        channel = server.channel
        channel.queue(encode(Norm(float(norm) ** 2)))
        while not channel.flush():
            channel.happens(select.POLLOUT, 1.0)
        while not (bodies := channel.messages(most=1)):
            channel.happens(select.POLLIN, 1.0)
        answer = parse(bodies[0])
        assert isinstance(answer, NormOfAll)
        return answer.squared

    def _drop(self) -> None:
        self._server = self._held = self._stored = None
        self._drop_workers()

    def _drop_workers(self) -> None:
        for peer in self._workers.values():
            peer.channel.end()
        self._workers.clear()

    # Workers

    def _serve_worker(self, peer: Peer, message: Message) -> None:
        held = self._held
        if held is None or self._workers.get(peer.id) is not peer:
            raise ExchangeError("the server is gone, or the worker has another connection")
        if isinstance(message, Place):
            self._placed[peer] = message.sequence
            peer.channel.room = held.place_for(peer.id, message.sequence)
        elif isinstance(message, Bytes) and peer.channel.with_tensor and peer in self._placed:
            peer.channel.room = None
            self._send(peer, Placed(held.note_placed(peer.id, self._placed.pop(peer))))
        else:
            raise ProtocolError(f"a worker sends no message {message.kind!r} here")

    def _send(self, peer: Peer, message: Message, tensor: Tensor | None = None) -> None:
        self._answer(peer, encode(message), tensor)

    def _answer(self, peer: Peer, body: bytes, tensor: Tensor | None = None) -> None:
        """Sends a message, or leaves it to the loop if the connection does not take it at once."""
        peer.channel.queue(body, tensor)
        if peer.channel.unsent > _UNREAD and peer is not self._server:
            peer.channel.drop()
            return
        try:
            peer.channel.flush()
        except AsyncError:
            peer.channel.end()  # the loop finds its connection closed


def hold_shard(listener: socket.socket, host: ShardHost, encryption: ssl.SSLContext | None) -> None:
    """Serves until the run is finished."""
    forget_threads()  # torch's own threads would change the sums of norms: passes over memory have others
    loop = ConnectionLoop(listener, host, encryption)
    while not (host.finished and not any(peer.channel.unsent for peer in loop.peers)):
        loop.serve_once(0.0 if loop.has_turns else 1.0)
