"""A worker's connection to the server of its run."""

import logging
import select
import socket
import ssl
import time
from typing import TypeVar

from fairseq_async.errors import ExchangeError, ProtocolError, RefusedError, option
from fairseq_async.exchange import Channel, tls
from fairseq_async.exchange.authentication import challenge, proof, proves
from fairseq_async.server.protocol import Greeting, Introduce, Introduced, encode, parse_answer

logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

CONNECT_SECONDS = 10.0  # for a connection, and for each word of the handshake but the first
_GREETING_SECONDS = 60.0  # for that one: the server's process may still be importing what it needs
_SILENCE = 60.0  # seconds after which a worker says that it still waits for an answer


class Connection(Channel):
    """Both sides have proved that they know the token, which does not cross the wire.

    Args:
        worker: its id, or None for one that was not announced and takes what is free.
        joins: it was not announced.
        instance: this process, which may connect again.
        encryption: of the connection; None for none.
        streams: how many connections are made, each of which carries a piece of every large tensor.
        stream_of: the server's challenge on the connection whose tensors this one carries pieces of.

    Attributes:
        worker: its id.
        workers: how many were announced.
        server: which process it is: one that was started again is another.
        timeout: seconds without a word after which one side gives the other up.

    Raises:
        ExchangeError: there is no server, or it does not answer.
        RefusedError: it does not want this worker, does not know the token, or one side's certificate is refused.
    """

    def __init__(
        self,
        address: str,
        token: str,
        worker: int | None,
        joins: bool,
        instance: str,
        encryption: ssl.SSLContext | None = None,
        streams: int = 1,
        stream_of: str | None = None,
    ) -> None:
        super().__init__(_open(address, encryption))
        theirs = self._greeting(address).challenge
        self.connection.settimeout(CONNECT_SECONDS)
        ours = challenge()
        own = proof(token, "worker", theirs, ours)
        self.send(encode(Introduce(own, ours, worker, joins, instance, stream_of)))
        introduced = parse_answer(self.receive(), Introduced)
        if not proves(introduced.proof, token, "server", theirs, ours):
            raise RefusedError(f"the server at {address} does not know this run's token: it is another's")
        self.connection.settimeout(None)
        self.worker, self.workers, self.server = introduced.worker, introduced.workers, introduced.server
        for _ in range(streams - 1):
            self._add_stream(address, token, joins, instance, encryption, theirs)
        self.give_up_after(introduced.timeout)  # also a machine that goes before it answers the next words

    def _add_stream(
        self, address: str, token: str, joins: bool, instance: str, encryption: ssl.SSLContext | None, theirs: str
    ) -> None:
        """
        Raises:
            ExchangeError: it cannot be made, or the server has lost the first connection meanwhile.
        """
        try:
            self.add(Connection(address, token, self.worker, joins, instance, encryption, stream_of=theirs))
        except (ExchangeError, RefusedError) as error:
            self.close()
            raise ExchangeError(f"not all connections to the server at {address} could be made: {error}") from error

    def _greeting(self, address: str) -> Greeting:
        """The first message. A server that refuses this side's certificate says so after the handshake."""
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
        """Waits for the answer to the last request, and says so from time to time.

        Raises:
            RefusedError: the server has refused the request.
        """
        asked_at = time.monotonic()
        while not self.is_readable(_SILENCE):
            logger.warning("no answer from the server since %.0f s; still waiting", time.monotonic() - asked_at)
        return parse_answer(self.receive(), expected)

    def is_closed(self, seconds: float = 0.0) -> bool:
        """Whether the connection ends within this time."""
        return self._happens(select.POLLRDHUP, seconds)

    def is_readable(self, seconds: float) -> bool:
        """Whether something is there, arrives within this time, or the connection ends."""
        return self.has_message or self._happens(select.POLLIN, seconds)

    def _happens(self, event: int, seconds: float) -> bool:
        poll = select.poll()
        if self.connection.fileno() < 0:
            return True
        poll.register(self.connection, event)
        return bool(poll.poll(1000 * seconds))


def _open(address: str, encryption: ssl.SSLContext | None) -> socket.socket:
    """A connection whose time for the server's first message runs."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    except (OSError, ValueError, OverflowError) as error:
        raise ExchangeError(f"no server at {address} ({option('server')}): {error}") from error
    connection.settimeout(_GREETING_SECONDS)
    return connection if encryption is None else tls.connected(encryption, connection, address)
