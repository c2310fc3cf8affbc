"""The server behind its door without a socket, a thread or a clock that goes by itself."""

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_async.exchange.authentication import challenge, proof
from fairseq_async.server.members import Peer
from fairseq_async.server.run import Build
from fairseq_async.server.service import Service
from tests.chaos.mortal import InlineSnapshots

TOKEN = "a token of sixteen or more"


class FakeChannel:
    """Keeps what the server says."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.room: Tensor | None = None
        self.largest = 0
        self.closed = False

    def queue(self, message: dict[str, Any], tensor: Tensor | None = None) -> None:
        self.said.append(message)

    def flush(self) -> bool:
        return True

    def notice_death(self, seconds: float) -> None:
        """There is no kernel."""

    def end(self) -> None:
        self.closed = True


class Connection:
    """One peer's talk with the service."""

    def __init__(self, service: Service) -> None:
        self.service, self.channel = service, FakeChannel()
        self.peer = Peer(self.channel)  # type: ignore[arg-type]
        service.greet(self.peer)

    def ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None if it comes later."""
        before = len(self.channel.said)
        self.service.receive(self.peer, message)
        return self.channel.said[-1] if len(self.channel.said) > before else None

    def introduce(self, worker: int, instance: str = "x") -> dict[str, Any] | None:
        theirs, ours = self.channel.said[0]["challenge"], challenge()
        words = {"worker": worker, "joins": False, "instance": instance, "challenge": ours}
        return self.ask({"kind": "introduce", "proof": proof(TOKEN, "worker", theirs, ours), **words})

    def close(self) -> None:
        if self.service.members.peers.get(self.peer.worker or 0) is self.peer:
            self.service.forget(self.peer)


def new_service(workers: int, run_dir: Path, build: Build, clock: Any) -> Service:
    service = Service(TOKEN, workers, run_dir, build, clock)
    service.job.snapshots = InlineSnapshots(run_dir, clock)
    return service


def end(service: Service) -> None:
    """What the end of a process does."""
    if service.job.described:
        service.job.memory.close()
    if service.job.begun:
        os.close(service.run.events._file)
