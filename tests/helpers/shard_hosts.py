"""Shards of a server that processes on other machines hold; here they are processes of this machine."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairseq_async.exchange.authentication import write_token
from tests.helpers.commands import HELPERS, ROOT, Processes, command, free_port

TOKEN = "0123456789abcdef0123456789abcdef"


class ShardHosts:
    """Processes of ``fairseq-async shard``, which may be killed and started again."""

    def __init__(self, directory: Path, count: int, *flags: object) -> None:
        self.processes = Processes()
        self.token_file = directory / "token"
        write_token(self.token_file, TOKEN)
        self._flags = flags
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.running = [self._start(address) for address in self.addresses]

    @property
    def option(self) -> str:
        """The value of ``--shard-hosts``."""
        return ",".join(self.addresses)

    def kill(self, number: int) -> None:
        self.running[number].send_signal(signal.SIGKILL)
        self.running[number].wait(20)

    def start_again(self, number: int) -> None:
        self.running[number] = self._start(self.addresses[number])

    def _start(self, address: str):  # type: ignore[no-untyped-def]
        line = [command("fairseq-async"), "shard", address, "--token-file", self.token_file, *self._flags]
        return self.processes.start(line, PYTHONPATH=f"{HELPERS / 'without_fairseq'}:{ROOT}")


@contextmanager
def shard_hosts(directory: Path, count: int, *flags: object) -> Iterator[ShardHosts]:
    """So many hosts, whose token file is in the directory."""
    hosts = ShardHosts(directory, count, *flags)
    try:
        yield hosts
    finally:
        hosts.processes.end()
