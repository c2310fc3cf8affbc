"""The server's handle on a shard that another machine holds."""

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from fairseq_async.algorithms import Fragment
from fairseq_async.errors import AsyncError, ExchangeError, HalfAppliedError, RefusedError, option
from fairseq_async.exchange.tls import worker_context
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.client_connection import Connection, Endpoint
from fairseq_async.protocol.division import at_hosts
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.shard_messages import (
    TAKEN,
    Begin,
    Bytes,
    Done,
    Failed,
    Fetch,
    Finish,
    Held,
    Load,
    Message,
    NotSaved,
    Save,
    Sized,
    Store,
    encode,
    parse,
)

_ARRIVAL_SECONDS = 600.0  # that a server waits for its hosts: someone may have to start one again
_GREETING_SECONDS = 5.0  # for a host's first message: meanwhile the server does nothing else, and does not end either
_PAUSE = 0.5  # seconds between two attempts to connect
_QUIET_SECONDS = 5.0  # of waiting for a host to come, after which the user is told
_SILENT_SECONDS = 60.0  # the same, of waiting for an answer; a host may write a large state meanwhile
_Answer = TypeVar("_Answer", bound=Message)


@dataclass(frozen=True)
class Reach:
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
                raise RefusedError(f"{option('shard_hosts')}: {lacks}") from cause
            if waited > _QUIET_SECONDS and not told:
                self.tell(f"the run waits: {lacks}")
                told = True
            time.sleep(_PAUSE)


def _missing(address: str, error: ExchangeError) -> str:
    """Says why there is no shard: nothing answers, or what answers is none, or does not speak as the server does."""
    cause = error.__cause__
    reason = cause.strerror or cause if isinstance(cause, OSError) else error
    return f"no shard at {address} ({reason}); start it there with: fairseq-async shard {address}"


class RemoteShard:
    """A shard that ``fairseq-async shard`` holds on another machine, with its part of each worker's updates.

    If its connection ends, or it fails at a command, the shards may be at different versions: a HalfAppliedError ends
    the server, and a new server goes on from the last snapshot, with all its shards.

    Attributes:
        place: the shard's place in the model.
        keeps_last_step: whether it keeps the parameters before the last step.
    """

    shares_memory = False
    keeps_last_step = False

    def __init__(
        self, address: str, number: int, place: Fragment, connection: Connection, tell: Callable[[str], object]
    ) -> None:
        self.address, self.number, self.place, self._channel, self._tell = address, number, place, connection, tell
        self._file: IO[bytes] | None = None  # for the state that was asked for
        connection.any_length = True

    def begin(self, program: str, spec: MethodSpec, layout: Layout, parameters: Tensor) -> None:
        """Lets the host build the shard, with its part of the parameters.

        Raises:
            RefusedError: it cannot.
            HalfAppliedError: it is gone.
        """
        self._send(Begin(program, spec, layout, self.number))
        if isinstance(answer := self._next(), Failed):
            raise RefusedError(f"{self._name} cannot begin: {answer.error}")
        self.keeps_last_step = spec.look_ahead != 0.0
        self.store("parameters", self.place.of(parameters))

    def check(self) -> None:
        """Raises a HalfAppliedError if the host is gone: of its own accord it sends nothing."""
        if self._channel.is_closed():
            raise HalfAppliedError(f"{self._name} is gone")

    def select(self, fragment: int) -> None:
        """Does nothing: there is one fragment, the whole model."""

    def send(self, command: Message, file: IO[bytes] | None = None) -> None:
        """Sends a command. The state that it asks for is written to ``file``, or is taken from there."""
        match command:
            case Save():
                self._file, command = file, Fetch("state")
            case Load():
                assert file is not None
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
                    self._send_bytes("state", torch.frombuffer(content, dtype=torch.uint8))
                return
        self._send(command)

    def receive(self) -> Message:
        """Returns the next answer; raises a HalfAppliedError if the host has failed or is gone."""
        answer = self._receive()
        if isinstance(answer, Sized):
            state, file = self._receive_bytes(answer), self._file
            assert file is not None
            return _written(state, file)
        return answer

    def ask(self, command: Message, expected: type[_Answer]) -> _Answer:
        """Sends a command and returns its answer."""
        self._send(command)
        return self._answer(expected)

    def _answer(self, expected: type[_Answer]) -> _Answer:
        answer = self._receive()
        if not isinstance(answer, expected):
            raise HalfAppliedError(f"{self._name} answers {answer.kind}")
        return answer

    def fetch(self, what: Held) -> Tensor:
        """Returns the shard's part of one of the server's vectors, in fp32."""
        return self._receive_bytes(self.ask(Fetch(what), Sized)).view(torch.float32)

    def store(self, what: Held, part: Tensor) -> None:
        """Replaces the shard's part of a vector."""
        self._send_bytes(what, part.contiguous().view(torch.uint8))
        self._answer(Done)

    def finish(self) -> None:
        """Tells the host that the run is finished."""
        self._send(Finish())

    def close(self) -> None:
        """Ends the connection. The host waits for a server that goes on with the run."""
        self._channel.close()

    @property
    def _name(self) -> str:
        return f"shard {self.number} of the server, at {self.address},"

    def _send_bytes(self, what: Held, content: Tensor) -> None:
        self._send(Store(what, content.numel()))
        self._send(Bytes(), content)

    def _send(self, command: Message, tensor: Tensor | None = None) -> None:
        try:
            self._channel.send(encode(command), tensor)
        except ExchangeError as error:
            raise self._gone(error) from error

    def _receive(self) -> Message:
        if isinstance(answer := self._next(), Failed):
            raise HalfAppliedError(f"{self._name} has failed: {answer.error}")
        return answer

    def _next(self) -> Message:
        try:
            if not self._channel.is_readable(_SILENT_SECONDS):  # it hangs, and its machine still answers for it
                self._tell(f"the run waits: {self._name} has not answered for {_SILENT_SECONDS:.0f} s")
            return parse(self._channel.receive())
        except (ExchangeError, ValidationError) as error:
            raise self._gone(error) from error

    def _receive_bytes(self, announced: Sized) -> Tensor:
        content = torch.empty(announced.size, dtype=torch.uint8, device="cpu")
        self._channel.room = content
        try:
            self._answer(Bytes)
        finally:
            self._channel.room = None
        return content

    def _gone(self, error: Exception) -> HalfAppliedError:
        return HalfAppliedError(f"{self._name} is gone: {error}")


def _written(state: Tensor, file: IO[bytes]) -> Message:
    try:
        file.write(state.numpy().data)
        file.flush()
    except OSError as error:
        return NotSaved(str(error)[:1000])
    return Done()


def connect_hosts(reach: Reach, spec: MethodSpec, layout: Layout, parameters: Tensor) -> list[RemoteShard]:
    """Connects to the hosts of a run's shards, and lets each one build its shard, with its part of the parameters.

    Raises:
        RefusedError: a host does not come, or refuses.
    """
    shards: list[RemoteShard] = []
    try:
        for number, (address, place) in enumerate(zip(spec.server.hosts, at_hosts(spec, layout), strict=True)):
            connection = reach.connect(address, spec.server.worker_timeout)
            shard = RemoteShard(address, spec.server.server_shards + number, place, connection, reach.tell)
            shards.append(shard)
            shard.begin(reach.program, spec, layout, parameters)
    except AsyncError:
        for shard in shards:
            shard.close()
        raise
    return shards
