"""A worker's connection to the server of its run."""

import logging
import os
import select
import socket
import ssl
import time
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakSet

from fairseq_async.errors import ExchangeError, ProtocolError, RefusedError, option
from fairseq_async.exchange import Channel, tls
from fairseq_async.exchange.authentication import challenge, proof, proves
from fairseq_async.protocol import Greeting, Introduce, Introduced, encode, parse_answer

logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

CONNECT_SECONDS = 10.0  # for a connection, and for each message of the handshake but the first
_GREETING_SECONDS = 300.0  # for the first message: the server may still import its modules, or write a large state
_SILENCE = 60.0  # seconds after which a worker says that it still waits for an answer


@dataclass(frozen=True)
class Endpoint:
    """A run's server, and how a process of a worker introduces itself there.

    Attributes:
        address: HOST:PORT of the server.
        token: the run's secret.
        joins: whether the worker was not announced.
        instance: identifies the worker's process, which may connect again.
        encryption: TLS context of the connections; None for no encryption.
        patience: seconds for the first message; None for what a server may need that has just been started.
    """

    address: str
    token: str
    joins: bool
    instance: str
    encryption: ssl.SSLContext | None = None
    patience: float | None = None


_open_here: WeakSet["Connection"] = WeakSet()


def _close_in_child() -> None:
    """Closes this process's connections in a process that it has forked, such as a data loader's. If a worker is
    killed, its connections must end with it: the loader lives on for seconds, and the server would take the worker
    that is started again for a second one."""
    for connection in list(_open_here):
        connection.connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class Connection(Channel):
    """A channel on which both sides have proved that they know the token, which does not cross the wire.

    Args:
        worker: id of this worker, or None for a worker that was not announced and takes a free id.

    Attributes:
        worker: id of this worker.
        workers: number of workers that were announced.
        server: identifies the server's process: a server that was started again has another value.
        timeout: seconds without a message after which one side gives the other up.

    Raises:
        ExchangeError: there is no server, or it does not answer.
        RefusedError: the server refuses this worker or does not know the token, or one side's certificate is refused.
    """

    def __init__(self, endpoint: Endpoint, worker: int | None) -> None:
        patience = _GREETING_SECONDS if endpoint.patience is None else endpoint.patience
        super().__init__(_open(endpoint.address, endpoint.encryption, patience))
        _open_here.add(self)  # now that it has a connection: another thread may fork at any time
        try:
            self._introduce(endpoint, worker, patience)
        except BaseException:
            self.close()
            raise

    def _introduce(self, endpoint: Endpoint, worker: int | None, patience: float) -> None:
        """Proves to the server that this side knows the token, and hears its proof."""
        address, token = endpoint.address, endpoint.token
        theirs = self._greeting(address, patience).challenge
        self.connection.settimeout(max(CONNECT_SECONDS, patience))  # the server may be in a long step now
        ours = challenge()
        own = proof(token, "worker", theirs, ours)
        self.send(encode(Introduce(own, ours, worker, endpoint.joins, endpoint.instance)))
        introduced = parse_answer(self.receive(), Introduced)
        if not proves(introduced.proof, token, "server", theirs, ours):
            raise RefusedError(f"the server at {address} does not know this run's token: it is another's")
        self.connection.settimeout(None)
        self.worker, self.workers, self.server = introduced.worker, introduced.workers, introduced.server
        self.give_up_after(introduced.timeout)  # also a machine that fails before it answers the next request

    def _greeting(self, address: str, seconds: float) -> Greeting:
        """Receives the first message. A server that refuses this side's certificate says so after the handshake."""
        deadline = time.monotonic() + seconds
        while not self.is_readable(min(_SILENCE, seconds)) and time.monotonic() < deadline:
            logger.warning("the server at %s says nothing yet; still waiting", address)
        self.connection.settimeout(max(min(CONNECT_SECONDS, seconds), deadline - time.monotonic()))
        try:
            return parse_answer(self.receive(), Greeting)
        except ExchangeError as error:
            if isinstance(error.__cause__, ssl.SSLError):
                raise RefusedError(
                    f"the server at {address} refuses this worker's certificate: {tls.in_words(error.__cause__)}; give "
                    f"{option('tls')} with one of its authority, of which fairseq-async certificates makes more"
                ) from error
            if isinstance(self.connection, ssl.SSLSocket) or isinstance(error, ProtocolError):
                raise
            raise ExchangeError(
                f"the server at {address} says nothing; does it need {option('tls')}? {error}"
            ) from error

    def give_up_after(self, seconds: float) -> None:
        self.timeout = seconds
        self.notice_death(seconds)

    def answer(self, expected: type[_Answer]) -> _Answer:
        """Waits for the answer to the last request, and logs from time to time that it still waits.

        Raises:
            RefusedError: the server has refused the request.
        """
        asked_at = time.monotonic()
        while not self.is_readable(_SILENCE):
            logger.warning("no answer from the server since %.0f s; still waiting", time.monotonic() - asked_at)
        return parse_answer(self.receive(), expected)

    def is_readable(self, seconds: float) -> bool:
        """Whether data is there or arrives within this time, or the connection ends."""
        return self.has_message or self.happens(select.POLLIN, seconds)


def _open(address: str, encryption: ssl.SSLContext | None, patience: float) -> socket.socket:
    """Returns a new connection, with the timeout for the server's first message."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    except (OSError, ValueError, OverflowError) as error:
        raise ExchangeError(f"no server at {address}: {error}") from error
    connection.settimeout(patience)
    return connection if encryption is None else tls.connected(encryption, connection, address)
