"""The flags of ``fairseq-async launch``, checked against each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.options.addresses import IPV4_ONLY, LOOPBACK, is_ipv6, is_loopback


@dataclass(frozen=True)
class LaunchOptions:
    """The launcher's own flags.

    Attributes:
        ranks: number of ranks of each worker.
        slowdown: a slowdown factor for each worker, for experiments; empty for none.
        max_restarts: how often each worker may be started again.
        port: the server's port; 0 takes a free one.
        host: the address on which the server listens.
        token_file: file with the run's token, for workers that join from other machines; None makes a new token.
        tls: directory of the certificates with which connections are encrypted; None for none.
        resume: whether a script goes on with an interrupted run.
        asynchronous: names of the given flags that apply only to runs with a server.
    """

    workers: int
    max_restarts: int
    ranks: Sequence[int] = ()
    slowdown: Sequence[float] = ()
    port: int = 0
    host: str = LOOPBACK
    token_file: Path | None = None
    tls: Path | None = None
    resume: bool = False
    asynchronous: Sequence[str] = ()

    def check(self) -> None:
        """Checks the flags against each other.

        Raises:
            ConfigurationError: flags do not fit together, the host is no IPv4 host, or a slowdown is below 1.
        """
        if is_ipv6(self.host):
            raise ConfigurationError(f"--host {self.host}: {IPV4_ONLY}")
        if self.host != LOOPBACK and not self.token_file and not is_loopback(self.host):
            raise ConfigurationError(
                f"--host {self.host}: other machines can reach this address; give a secret with --token-file FILE, "
                "made with: (umask 077; openssl rand -hex 16 > FILE)"
            )
        if self.slowdown and len(self.slowdown) != self.workers:
            raise ConfigurationError(
                f"--slowdown has {len(self.slowdown)} factors for {self.workers} workers; give one for each"
            )
        if not all(1 <= factor < inf for factor in self.slowdown):
            raise ConfigurationError("--slowdown: a factor must be a number of at least 1")
