"""The server's handle on a shard that another machine holds."""

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment
from fairseq_async.errors import AsyncError, ExchangeError, RefusedError, option
from fairseq_async.exchange.tls import worker_context
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.client_connection import Connection, Endpoint
from fairseq_async.protocol.division import host_parts
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.shard_messages import TAKEN
from fairseq_async.server.shards.calls import Answer, OtherShard
from fairseq_async.server.shards.held_part import Held, HeldPart
from fairseq_async.server.shards.host import ShardHost

_ARRIVAL_SECONDS = 600.0  # that a server waits for its hosts: someone may have to start one again
_GREETING_SECONDS = 5.0  # for a host's first message: meanwhile the server does nothing else, and does not end either
_PAUSE = 0.5  # seconds between two attempts to connect
_QUIET_SECONDS = 5.0  # of waiting for a host to come, after which the user is told
_SILENT_SECONDS = 60.0  # the same, of waiting for an answer; a host may write a large state meanwhile


@dataclass(frozen=True)
class HostConnector:
    """What a server needs to command shards on other machines.

    Attributes:
        token: the run's secret, which the hosts know.
        program: the module that is the server's program; the hosts build their rules with it.
        tls: directory of certificates; None for plain connections.
        tell: passes a line to the user.
        abandoned: returns whether nobody waits for the run any more.
    """

    token: str
    program: str
    tls: Path | None
    tell: Callable[[str], object]
    abandoned: Callable[[], bool] = lambda: False

    def connect(self, address: str, seconds: float) -> Connection:
        """Connects to a host, which may not have been started yet.

        Args:
            seconds: time of silence after which one side gives the other up.

        Raises:
            RefusedError: the host refuses the server, or does not come.
        """
        encryption = None if self.tls is None else worker_context(self.tls)
        endpoint = Endpoint(address, self.token, False, "server", encryption, _GREETING_SECONDS)
        began, told, cause = time.monotonic(), False, AsyncError()
        while True:
            try:
                connection = Connection(endpoint, None)
                connection.give_up_after(seconds)
                return connection
            except RefusedError as error:
                lacks, cause, patience = f"the shard at {address}: {error}", error, 0.0
                if TAKEN in str(error):  # by the server before this one, until the host finds that it is gone
                    patience = 2 * seconds
            except ExchangeError as error:
                lacks, cause, patience = _missing(address, error), error, _ARRIVAL_SECONDS
            waited = time.monotonic() - began
            if waited > patience or self.abandoned():
                raise RefusedError(f"{option('server_shards')}: {lacks}") from cause
            if waited > _QUIET_SECONDS and not told:
                self.tell(f"the run waits: {lacks}")
                told = True
            time.sleep(_PAUSE)


def _missing(address: str, error: ExchangeError) -> str:
    """Says why there is no shard: nothing answers, or what answers is none, or does not speak as the server does."""
    cause = error.__cause__
    reason = cause.strerror or cause if isinstance(cause, OSError) else error
    return f"no shard at {address} ({reason}); start it there with: fairseq-async shard {address}"


class RemoteShard(OtherShard):
    """A shard that ``fairseq-async shard`` holds on another machine, with its part of each worker's updates.

    If its connection ends, or it fails at a call, the shards may be at different versions: a HalfAppliedError ends the
    server, and a new server goes on from the last snapshot, with all its shards.

    Attributes:
        place: the shard's place in the model.
    """

    channel: Connection

    def __init__(self, name: str, place: Fragment, connection: Connection, tell: Callable[[str], object]) -> None:
        self.name, self.place, self.channel, self._tell = name, place, connection, tell
        connection.makes_room = True

    def begin(self, program: str, spec: MethodSpec, layout: Layout, number: int, parameters: Tensor) -> None:
        """Lets the host build the shard of this number, with its part of the parameters.

        Raises:
            RefusedError: it cannot.
        """
        part = self.place.of(parameters).contiguous()
        self.call(ShardHost.begin, program, spec.to_json(), layout.to_json(), number, tensor=part)
        if (answer := self.answer()).error:
            raise RefusedError(f"{self.name} cannot begin: {answer.error}")

    def answer(self) -> Answer:
        if not self.channel.is_readable(_SILENT_SECONDS):  # it hangs, and its machine still answers for it
            self._tell(f"the run waits: {self.name} has not answered for {_SILENT_SECONDS:.0f} s")
        return super().answer()

    def fetch(self, what: Held) -> Tensor:
        """Returns the shard's part of one of the server's vectors, in fp32."""
        self.call(HeldPart.fetch, what)
        return self._bytes().view(torch.float32)

    def store(self, what: Held, content: Tensor) -> Callable[[], None]:
        """Replaces the shard's part of a vector, or its state by these bytes; returns what waits until it is done."""
        self.call(ShardHost.store, what, tensor=content)
        return partial(self.result, ShardHost.store)

    def save(self, fragment: int, file: IO[bytes]) -> Callable[[], str]:
        self.call(HeldPart.fetch, "state")
        return lambda: _written(self._bytes(), file)

    def load(self, fragment: int, file: IO[bytes]) -> Callable[[], None]:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
            return self.store("state", torch.frombuffer(content, dtype=torch.uint8))

    def close(self) -> None:
        """Ends the connection. The host waits for a server that goes on with the run."""
        self.channel.close()

    def _bytes(self) -> Tensor:
        """Waits for an answer with bytes behind it; returns these."""
        self.value()
        content, self.channel.room = self.channel.room, None
        assert content is not None
        return content


def _written(state: Tensor, file: IO[bytes]) -> str:
    """Writes a state into the file; returns why it could not be written, or an empty string."""
    try:
        file.write(state.numpy().data)
        file.flush()
    except OSError as error:
        return str(error)[:1000]
    return ""


def connect_hosts(
    reach: HostConnector | None, spec: MethodSpec, layout: Layout, parameters: Tensor
) -> list[RemoteShard]:
    """Connects to the hosts of a run's shards, and lets each one build its shard, with its part of the parameters.

    Raises:
        RefusedError: a host does not come, or refuses; or ``reach`` is None, and there are hosts.
    """
    if not spec.server.hosts:
        return []
    if reach is None:
        raise RefusedError(f"{option('server_shards')}: this server reaches no shards on other machines")
    shards: list[RemoteShard] = []
    try:
        placed = zip(spec.server.hosts, host_parts(spec, layout), strict=True)
        for number, (address, place) in enumerate(placed, spec.server.server_shards):
            connection = reach.connect(address, spec.server.worker_timeout)
            name = f"shard {number} of the server, at {address},"
            shards.append(RemoteShard(name, place, connection, reach.tell))
            shards[-1].begin(reach.program, spec, layout, number, parameters)
    except AsyncError:
        for shard in shards:
            shard.close()
        raise
    return shards
