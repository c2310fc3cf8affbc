"""Mutual proof that both sides know the run's token, by a keyed challenge; the token itself never crosses the wire.

Without TLS the messages after the handshake are neither encrypted nor signed: across a network that others can reach,
use TLS or a tunnel.
"""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from fairseq_async.errors import ConfigurationError, option

_SHORTEST = 16  # characters of a token


def challenge() -> str:
    """Returns a random number of 128 bits, which was never used before."""
    return secrets.token_hex(16)


def proof(token: str, role: str, server_challenge: str, worker_challenge: str) -> str:
    """Returns the HMAC that only a holder of the token can compute; ``role`` keeps one side's proof from being used as
    the other's."""
    said = "\n".join((role, server_challenge, worker_challenge))
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()


def proves(given: object, token: str, role: str, server_challenge: str, worker_challenge: str) -> bool:
    """Whether ``given`` is the proof that :func:`proof` returns."""
    return hmac.compare_digest(str(given).encode(), proof(token, role, server_challenge, worker_challenge).encode())


def new_token() -> str:
    """Returns a random secret of 128 bits."""
    return secrets.token_hex(16)


def write_token(path: Path, token: str) -> None:
    """Writes the token to a new file that only its owner can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")


def read_token(path: Path) -> str:
    """Reads the token from a file.

    Raises:
        ConfigurationError: the file cannot be read, users other than its owner can read it, or the token is too short
            or has characters that cannot be printed.
    """
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{option('token_file')} {path}: cannot be read: {why}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigurationError(f"{option('token_file')} {path}: others can read it; run chmod 600 {path}")
    if len(token) < _SHORTEST or not token.isprintable():  # as a NUL, which no environment variable can have
        raise ConfigurationError(
            f"{option('token_file')} {path}: a token has at least {_SHORTEST} characters, which can be printed, "
            "in one line; make one with: openssl rand -hex 16"
        )
    return token
