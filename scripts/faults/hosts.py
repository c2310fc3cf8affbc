"""Simulates another host on this machine: a network namespace at the other end of a cable, good or bad."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fairseq_async.errors import ConfigurationError
from scripts.faults.wire import OWN


@dataclass(frozen=True)
class Cable:
    """The quality of a cable.

    Attributes:
        seconds: latency from one end to the other.
        loss: share of packets that are lost.
        bytes_per_second: bandwidth; None for what the kernel can do.
    """

    seconds: float = 0.0
    loss: float = 0.0
    bytes_per_second: float | None = None

    @property
    def good(self) -> bool:
        return self == Cable()


@dataclass(frozen=True)
class Host:
    """Another host.

    Attributes:
        prefix: words before a command that is to run there.
        near: this host's address, as the other host sees it.
        far: the other host's address, as this host sees it.
    """

    prefix: tuple[str, ...]
    near: str
    far: str


LOOPBACK = Host((), "127.0.0.2", "127.0.0.3")  # a worker there sends tensors over TCP


@contextmanager
def other_host(cable: Cable) -> Iterator[Host]:
    """Makes a network namespace, removed at the end; if none can be created, yields this host under another address.

    Raises:
        ConfigurationError: the cable is to be bad, but this machine does not allow one to be created.
    """
    name = f"fairseq-async-{os.getpid()}"
    near, far = (f"10.213.{80 + os.getpid() % 150}.{number}" for number in (1, 2))
    with ExitStack() as stack:
        try:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
            if cable.good:
                _plug_in(name, near, far)
                # Hazard: with the namespace alone the kernel removes it some time later, and the next one of this
                # process has the same name
                stack.callback(_ip, "link", "delete", f"near{os.getpid()}")
            else:
                stack.enter_context(bad_cable(name, near, far, cable))
        except (OSError, subprocess.CalledProcessError) as error:
            if not cable.good:
                raise ConfigurationError(f"no network namespace with a TUN device can be made here: {error}") from error
            yield LOOPBACK
            return
        yield Host((shutil.which("ip") or "ip", "netns", "exec", name), near, far)


def _plug_in(name: str, near: str, far: str) -> None:
    """Connects the namespace by a virtual cable of the kernel."""
    here, there = f"near{os.getpid()}", f"far{os.getpid()}"
    _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
    _ip("addr", "add", f"{near}/24", "dev", here)
    _ip("link", "set", here, "up")
    _ip("-n", name, "addr", "add", f"{far}/24", "dev", there)
    _ip("-n", name, "link", "set", there, "up")


def set_cable(state: str) -> None:
    """Pulls out a good cable at this end (``state`` "down"), or plugs it in again ("up")."""
    _ip("link", "set", f"near{os.getpid()}", state)


@contextmanager
def bad_cable(name: str, near: str, far: str, cable: Cable) -> Iterator["subprocess.Popen[str]"]:
    """Runs a cable from this host to a namespace, in a process that reports the lost packets at the end."""
    quality = ["--seconds", cable.seconds, "--loss", cable.loss, "--bytes-per-second", cable.bytes_per_second or 1e9]
    line = [sys.executable, "-m", "scripts.faults.wire", OWN, near, name, far, *map(str, quality)]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as wire:
        try:
            assert wire.stdout is not None
            if wire.stdout.readline() != "up\n":
                raise OSError("the cable ended: " + wire.communicate()[1].strip().rpartition("\n")[2])
            yield wire
        finally:
            wire.kill()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
