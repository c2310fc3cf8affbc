"""A worker's connection to the server of its run."""

import ipaddress
import logging
import select
import socket
import time
from typing import Any

from fairseq_async.errors import ExchangeError, RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof, proves

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"  # this machine
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
        theirs = str(self.receive().get("challenge", ""))
        self.connection.settimeout(CONNECT_SECONDS)
        ours = challenge()
        words = {"worker": worker, "joins": joins, "instance": instance, "challenge": ours}
        self.send({"kind": "introduce", "proof": proof(token, "worker", theirs, ours), **words})
        answer = _accepted(self.receive())
        if not proves(answer.get("proof"), token, "server", theirs, ours):
            raise RefusedError(f"the server at {address} does not know this run's token: it is another's")
        self.connection.settimeout(None)
        self.worker, self.workers = int(answer["worker"]), int(answer["workers"])
        self.server = str(answer["server"])
        self.give_up_after(float(answer["timeout"]))  # also a machine that goes before it answers the next words

    def give_up_after(self, seconds: float) -> None:
        self.timeout = seconds
        self.notice_death(seconds)

    def answer(self) -> dict[str, Any]:
        """Waits for it, and says so from time to time."""
        asked_at = time.monotonic()
        while not self.is_readable(_SILENCE):
            logger.warning("no answer from the server since %.0f s; still waiting", time.monotonic() - asked_at)
        return _accepted(self.receive())

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


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine can reach this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _accepted(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise RefusedError(answer["error"])
    return answer


def _open(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    except (OSError, ValueError, OverflowError) as error:
        raise ExchangeError(f"no server at {address} (--server): {error}") from error
    return connection
