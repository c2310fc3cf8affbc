"""A worker's connections to the shards of the server that are on other machines than the server."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fairseq_async.algorithms import Fragment
from fairseq_async.errors import ProtocolError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.channel import flush_all
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, PullReply, encode
from fairseq_async.protocol.client_connection import Connection, Endpoint
from fairseq_async.protocol.division import host_parts
from fairseq_async.protocol.parsing import parse_one
from fairseq_async.protocol.shard_messages import Given, Part, Placed


class ShardLines:
    """Carries the parts of a worker's tensors between its slot and the hosts of shards.

    A part of an update is at its shard before the server is told of the update. Parts of parameters come when the
    server has answered a pull. All connections to a run, these and the one to the server, are made again together.

    Args:
        endpoint: the worker's own, at the server.
        worker: the worker's id.

    Attributes:
        connections: those that are open, in the order of the hosts.
        missing: the address that could not be reached at the last attempt; empty where all could.
    """

    def __init__(self, endpoint: Endpoint, worker: int, spec: MethodSpec, layout: Layout) -> None:
        self._endpoints = [replace(endpoint, address=host, joins=False) for host in spec.server.hosts]
        self._worker, self._places, self._timeout = worker, host_parts(spec, layout), spec.server.worker_timeout
        self.connections: list[Connection] = []
        self.missing = ""

    def connect(self) -> None:
        """Makes the connections that are not there; raises an ExchangeError if a host cannot be reached."""
        for endpoint in self._endpoints[len(self.connections) :]:
            self.missing = endpoint.address
            connection = Connection(endpoint, self._worker)
            connection.give_up_after(self._timeout)
            self.connections.append(connection)
        self.missing = ""

    def send(self, sequence: int, slot: Tensor, server: Channel, push: bytes, own: Tensor | None) -> None:
        """Brings the shards their parts of the update in the slot, and then the server the message of the update.

        All parts travel at the same time: of the message with the server's own part, the last byte waits until the
        shards have theirs.

        Raises:
            ExchangeError: a connection cannot be made, or breaks.
        """
        lines = self._lines()
        for line, place in lines:
            part = encode(Part(sequence))
            line.queue(part)
            line.queue(part, place.of(slot))
        server.queue(push, own)
        complete = server.hold_back()
        flush_all([server, *(line for line, _ in lines)])
        for line, _ in lines:
            if parse_one(line.receive(), Placed).sequence != sequence:
                raise ProtocolError("a shard has another update than the one that was sent")
        complete()
        flush_all([server])

    def take(self, reply: PullReply, slot: Tensor) -> None:
        """Writes the shards' parts of the parameters into the slot, which the server's answer to a pull announces.

        Raises:
            ExchangeError: a connection cannot be made, or breaks.
        """
        for line in self.open(slot):
            while parse_one(line.receive(), Given).number != reply.number:
                pass  # the answer to a pull whose own answer was lost
            line.room = None  # from now on the slot may hold an update: nothing that is late must overwrite it

    def open(self, slot: Tensor) -> list[Connection]:
        """Makes room in the slot for parts of parameters; returns the connections, on which they come. To be called
        before a pull: a host sends nothing to a worker that is not there."""
        lines = self._lines()
        for line, place in lines:
            line.room = place.of(slot)
        return [line for line, _ in lines]

    def close(self) -> None:
        """Closes the connections; the next exchange makes them again."""
        for connection in self.connections:
            connection.close()
        self.connections, self.missing = [], ""

    def _lines(self) -> Sequence[tuple[Connection, Fragment]]:
        self.connect()
        return list(zip(self.connections, self._places, strict=True))
