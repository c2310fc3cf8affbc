"""The server's service without a socket, a thread or a clock that goes by itself."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fairseq_async.exchange.authentication import challenge, proof
from fairseq_async.protocol import Greeting, Introduce, Introduced, Request, encode, parse_answer
from fairseq_async.server.kept_state import KeptState
from fairseq_async.server.network.connections import Peer
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.plan import Build
from fairseq_async.server.service import Service
from scripts.faults.direct import TOKEN, FakeChannel
from scripts.faults.thread_server import close_files
from tests.helpers.mortal import InlineSnapshots

_Answer = TypeVar("_Answer")


class Connection:
    """One peer's talk with the service."""

    def __init__(self, service: Service) -> None:
        self.service, self.channel = service, FakeChannel()
        self.peer = Peer(self.channel)  # type: ignore[arg-type]
        service.greet(self.peer)

    @property
    def last(self) -> dict[str, Any]:
        """What the server said last."""
        said: dict[str, Any] = json.loads(self.channel.said[-1])
        return said

    def send(self, message: Request | Mapping[str, Any]) -> bool:
        """Whether there was an answer at once; a message may be any JSON."""
        before = len(self.channel.said)
        self.service.receive(
            self.peer, json.dumps(message).encode() if isinstance(message, Mapping) else encode(message)
        )
        return len(self.channel.said) > before

    def ask(self, request: Request, expected: type[_Answer]) -> _Answer:
        """The answer, which must come at once.

        Raises:
            RefusedError: the server has refused the request.
        """
        assert self.send(request), "the answer is to come later"
        return self.answer(expected)

    def answer(self, expected: type[_Answer]) -> _Answer:
        """The last answer."""
        return parse_answer(self.channel.said[-1], expected)

    def introduce(self, worker: int | None, instance: str = "x", joins: bool = False) -> Introduced:
        theirs, ours = parse_answer(self.channel.said[0], Greeting).challenge, challenge()
        own = proof(TOKEN, "worker", theirs, ours)
        return self.ask(Introduce(own, ours, worker, joins, instance), Introduced)

    def close(self) -> None:
        self.service.disconnected(self.peer)


def new_service(
    workers: int, run_dir: Path, build: Build, clock: Callable[[], float], kind: type[Service] = Service
) -> Service:
    service = kind(TOKEN, workers, run_dir, build, clock)
    service.snapshots = InlineSnapshots(run_dir, clock)
    service.state = KeptState(service.snapshots)
    return service


def server(service: Service) -> ParameterServer:
    return service.described.coordinator.server


def slot(service: Service, worker: int) -> Tensor:
    """The worker's slot in the memory that it shares with the server."""
    return service.described.slots.memory.slot(worker)


def take_snapshot(service: Service) -> None:
    """Writes one now."""
    service.snapshots.take(service.described.snapshot(), server(service).version)


def end(service: Service) -> None:
    """What the end of a process does."""
    close_files(service)
