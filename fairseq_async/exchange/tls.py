"""TLS 1.3 on a connection, with a certificate on both sides, by Python's standard library.

A directory contains ``authority.pem`` and, for each side that runs on this machine, ``server.pem`` and ``server.key``,
or ``worker.pem`` and ``worker.key``.
"""

import errno
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import Buffer

from fairseq_async.errors import ConfigurationError, ExchangeError, RefusedError, option

AUTHORITY, SERVER, WORKER = "authority", "server", "worker"  # names of the files
_AT_A_TIME = 1 << 20  # bytes that one call moves at most, so that no peer holds the server up
_MAKE = "make it with: fairseq-async certificates"
CLOSED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""The errors of a handshake whose peer has gone: Python 3.11.2, as of Debian 12, raises the second."""


class TLSSocket(ssl.SSLSocket):
    """A TLS socket with the calls of a plain one: unlike ``ssl.SSLSocket``, it accepts ``MSG_DONTWAIT``.

    Hazard: OpenSSL wants a call that could not send all of its bytes to be repeated with the same bytes.
    :class:`~fairseq_async.exchange.Channel` does so, because it keeps what was not sent at the head of its queue.
    """

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Sends like a plain socket."""
        with self._at_once(flags):
            return super().send(memoryview(data)[:_AT_A_TIME])

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receives like a plain socket."""
        with self._at_once(flags):
            return super().recv(buflen)

    def recv_into(self, buffer: Buffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Receives like a plain socket; one call takes many records, which have up to 16 KiB each."""
        view, count = memoryview(buffer)[: nbytes or _AT_A_TIME][:_AT_A_TIME], 0
        with self._at_once(flags):
            while count < view.nbytes:
                try:
                    received = super().recv_into(view[count:])
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if not count:
                        raise
                    break
                if not received:
                    break
                count += received
        return count

    def shutdown(self, how: int) -> None:
        """Ends the connection. SSLSocket's own method would leave a socket that reads and writes in plain text."""
        socket.socket.shutdown(self, how)

    @contextmanager
    def _at_once(self, flags: int) -> Iterator[None]:
        patience = self.gettimeout()
        hurries = bool(flags & socket.MSG_DONTWAIT) and patience != 0
        if hurries:
            self.settimeout(0)
        try:
            yield
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError(errno.EAGAIN, "no whole record is there") from error
        finally:
            if hurries:
                self.settimeout(patience)


def server_context(directory: Path) -> ssl.SSLContext:
    """Returns the TLS context for the server's side of connections.

    Raises:
        ConfigurationError: a file is missing or broken, or others can read the private key.
    """
    context = _filled(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), directory, SERVER)
    context.num_tickets = 0  # nothing but messages may arrive at a worker
    return context


def worker_context(directory: Path) -> ssl.SSLContext:
    """Returns the TLS context for a worker's side, which also checks that the server's certificate is for its host.

    Raises:
        ConfigurationError: as :func:`server_context`.
    """
    return _filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), directory, WORKER)


def accepted(context: ssl.SSLContext, connection: socket.socket) -> ssl.SSLSocket:
    """Wraps a new connection for the server's side, non-blocking; :func:`handshake` makes its handshake."""
    connection.setblocking(False)
    return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


def handshake(connection: socket.socket) -> bool:
    """Continues a handshake with the bytes that have come; returns whether it is complete. Raises an OSError if it
    fails."""
    assert isinstance(connection, ssl.SSLSocket)
    try:
        connection.do_handshake()
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):  # what the server sends first fits into any send buffer
        return False
    return True


def connected(context: ssl.SSLContext, connection: socket.socket, address: str) -> ssl.SSLSocket:
    """Wraps a connection to ``address`` for the worker's side; the socket's own timeout applies to each step.

    Raises:
        RefusedError: the server has no TLS, or its certificate is not one of this authority for this host.
        ExchangeError: the connection was closed.
    """
    host = address.rpartition(":")[0]
    try:
        return context.wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(
            f"the certificate of the server at {address} is refused: {in_words(error)}; {_MAKE} DIR {host}"
        ) from error
    except CLOSED as error:
        raise ExchangeError(f"the server at {address} closed the connection") from error
    except ssl.SSLError as error:
        raise RefusedError(
            f"the server at {address} does not speak TLS 1.3 ({in_words(error)}): start it with {option('tls')} too, "
            f"or leave {option('tls')} out here"
        ) from error
    except OSError as error:
        raise ExchangeError(f"the server at {address} closed the connection: {error}") from error


def in_words(error: OSError) -> str:
    """Describes a failed handshake in a few words; a TLS alert is the other side's reason."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message).rstrip(".")
    reason = str(getattr(error, "reason", None) or error)
    return reason.rpartition("ALERT_")[2].replace("_", " ").lower()


def _filled(context: ssl.SSLContext, directory: Path, own: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = TLSSocket
    authority, certificate, key = (directory / name for name in (f"{AUTHORITY}.pem", f"{own}.pem", f"{own}.key"))
    _check_files(authority, certificate, key)
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key, password="")  # refuses a key with a password instead of asking for it
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{option('tls')} {directory}: {AUTHORITY}.pem, {own}.pem or {own}.key is no certificate or key: {error}"
        ) from error
    return context


def _check_files(authority: Path, certificate: Path, key: Path) -> None:
    for path in (authority, certificate, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigurationError(
                f"{option('tls')} {path.parent}: {path.name} cannot be read ({error.strerror}); {_MAKE} DIR HOST"
            ) from error
    if stat.S_IMODE(key.stat().st_mode) & 0o077:
        raise ConfigurationError(f"{option('tls')} {key.parent}: others can read {key.name}; run chmod 600 {key}")
