"""A process that holds one shard of a run's server on another machine, with its own part of the workers' traffic."""

import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from pydantic import FailFast, JsonValue
from torch import Tensor

from fairseq_async import protocol
from fairseq_async.algorithms.threads import forget_threads
from fairseq_async.errors import AsyncError, ExchangeError, ProtocolError, RefusedError
from fairseq_async.exchange.channel import LARGEST
from fairseq_async.method.spec import JsonObject, MethodSpec
from fairseq_async.protocol.division import host_parts
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.notices import Tell, tell_log
from fairseq_async.protocol.parsing import parse_one
from fairseq_async.protocol.shard_messages import TAKEN, Given, Part, Placed
from fairseq_async.server.membership import JOINERS, Membership
from fairseq_async.server.network.connection_loop import ConnectionLoop
from fairseq_async.server.network.connections import Handshake, Peer, RefusalLog
from fairseq_async.server.plan import Build
from fairseq_async.server.shards.calls import Answer, Call, Methods, ask, encode, failure
from fairseq_async.server.shards.held_part import Held, HeldPart
from fairseq_async.server.shards.part import CALLED, part_of

_SERVER = -1  # the peer whose calls are carried out; workers have ids from 0
_UNREAD = 8  # messages that a worker may leave unread; it waits for one at a time
_SMALL = 1 << 12  # bytes of a worker's message


class ShardHost:
    """Holds a shard: carries out the calls of the run's server, and exchanges its part of the tensors with the workers.

    A worker sends its part of an update here before it tells the server of the update. The server then lets all shards
    apply it. When a worker asks the server for parameters, the server lets all hosts send theirs: calls arrive in one
    order at every shard, so the parts are of one version.

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
        self._placed: dict[Peer, int] = {}  # number of the update of which a worker's next bytes are

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
        if peer is not self._server:
            return self._take(peer, parse_one(body, Part).sequence)
        call = parse_one(body, Call)
        try:
            self._carry_out(peer, call)
        except Exception as error:  # whatever it is, the server is to know
            if isinstance(error, ExchangeError) and not isinstance(error, ProtocolError):
                raise  # the server is gone
            self._answer(peer, failure(error))
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
        self._server, peer.channel.largest, peer.channel.makes_room = peer, LARGEST, True

    def _connect_worker(self, peer: Peer, worker: int, instance: str) -> None:
        peer.channel.largest = _SMALL
        if (before := self._workers.get(worker)) is not None:
            before.channel.end()
        self._workers[worker], self._instances[worker] = peer, instance

    # The server's calls

    def _carry_out(self, server: Peer, call: Call) -> None:
        value = METHODS.carry_out(call, [self] if self._held is None else [self, self._held, self._held.rule])
        if isinstance(value, Tensor):
            self._answer(server, encode(Answer()), value)
        elif call.answered:
            self._answer(server, encode(Answer(value)))

    def begin(self, program: str, spec: JsonObject, layout: Annotated[list[JsonValue], FailFast()], shard: int) -> None:
        """Builds this shard of a model, with the rule of the server's program; its parameters come with this call."""
        assert (server := self._server) is not None
        self._drop_workers()
        method, whole = MethodSpec.from_json(spec), Layout.from_json(layout)
        place = host_parts(method, whole)[shard - method.server.server_shards]
        parameters = torch.empty(place.size, dtype=torch.float32, device="cpu").copy_(self._come().view(torch.float32))
        rule, _ = self._load_build(program)(*part_of(method, whole, place.tensors), parameters)
        self._held = HeldPart(rule, parameters, place.tensors, keeps_last_step=method.look_ahead != 0.0)
        self._held.clip_by(partial(ask, server.channel))
        self._timeout, self._room_for = method.server.worker_timeout, method.workers + JOINERS
        server.channel.notice_death(self._timeout)
        self.tell(f"shard {shard} of {method.server.shards}, {place.size:,} of {whole.size:,} parameters")

    def store(self, what: Held) -> None:
        """Goes on from what comes with this call: a vector's bytes, or a state's."""
        assert self._held is not None
        self._held.replace(what, self._come())

    def give(self, worker: int, number: int, look_ahead: float, starts: bool) -> None:
        """Sends a worker its part of the parameters, as the pull of this number asks for them. A worker that is not
        connected asks the server again when it is."""
        assert self._held is not None
        if (peer := self._workers.get(worker)) is not None:
            self._answer(peer, protocol.encode(Given(number)), self._held.start(look_ahead, starts))

    def finish(self) -> None:
        """Ends this process when its answers are sent: the run is finished."""
        self.finished = True

    def _come(self) -> Tensor:
        """Takes what has come with the server's present call."""
        assert self._server is not None
        content, self._server.channel.room = self._server.channel.room, None
        if content is None:
            raise ProtocolError("nothing has come with the call")
        return content

    def _drop(self) -> None:
        self._server = self._held = None
        self._drop_workers()

    def _drop_workers(self) -> None:
        for peer in self._workers.values():
            peer.channel.end()
        self._workers.clear()

    # Workers

    def _take(self, peer: Peer, sequence: int) -> None:
        """Makes room for a worker's part of an update, or takes it, when it is behind the message."""
        held, channel = self._held, peer.channel
        if held is None or self._workers.get(peer.id) is not peer:
            raise ExchangeError("the server is gone, or the worker has another connection")
        if not channel.with_tensor:
            self._placed[peer], channel.room = sequence, held.place_for(peer.id)
        elif self._placed.pop(peer, None) == sequence:
            channel.room = None
            held.note_placed(peer.id, sequence)
            self._answer(peer, protocol.encode(Placed(sequence)))
        else:
            raise ProtocolError(f"a part of update {sequence}, which was not announced")

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


METHODS = Methods(
    *CALLED,
    HeldPart.measure,
    HeldPart.digest,
    HeldPart.fetch,
    ShardHost.begin,
    ShardHost.store,
    ShardHost.give,
    ShardHost.finish,
)


def hold_shard(listener: socket.socket, host: ShardHost, encryption: ssl.SSLContext | None) -> None:
    """Serves until the run is finished."""
    forget_threads()  # torch's own threads would change the sums of norms: passes over memory have others
    loop = ConnectionLoop(listener, host, encryption)
    while not (host.finished and not any(peer.channel.unsent for peer in loop.peers)):
        loop.serve_once(0.0 if loop.has_turns else 1.0)
