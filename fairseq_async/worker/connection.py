"""A worker's connection to the server of its run."""

import logging
import select
import socket
import time
from typing import TypeVar

from fairseq_async.errors import ExchangeError, RefusedError, option
from fairseq_async.exchange import Channel
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

    Attributes:
        worker: its id.
        workers: how many were announced.
        server: which process it is: one that was started again is another.
        timeout: seconds without a word after which one side gives the other up.

    Raises:
        ExchangeError: there is no server, or it does not answer.
        RefusedError: it does not want this worker, or does not know the token.
    """

    def __init__(self, address: str, token: str, worker: int | None, joins: bool, instance: str) -> None:
        super().__init__(_open(address))
        self.connection.settimeout(_GREETING_SECONDS)
        theirs = parse_answer(self.receive(), Greeting).challenge
        self.connection.settimeout(CONNECT_SECONDS)
        ours = challenge()
        own = proof(token, "worker", theirs, ours)
        self.send(encode(Introduce(own, ours, worker, joins, instance)))
        introduced = parse_answer(self.receive(), Introduced)
        if not proves(introduced.proof, token, "server", theirs, ours):
            raise RefusedError(f"the server at {address} does not know this run's token: it is another's")
        self.connection.settimeout(None)
        self.worker, self.workers, self.server = introduced.worker, introduced.workers, introduced.server
        self.give_up_after(introduced.timeout)  # also a machine that goes before it answers the next words

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
        """Whether something arrives within this time, or the connection ends."""
        return self._happens(select.POLLIN, seconds)

    def _happens(self, event: int, seconds: float) -> bool:
        poll = select.poll()
        if self.connection.fileno() < 0:
            return True
        poll.register(self.connection, event)
        return bool(poll.poll(1000 * seconds))


def _open(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    except (OSError, ValueError, OverflowError) as error:
        raise ExchangeError(f"no server at {address} ({option('server')}): {error}") from error
    return connection
