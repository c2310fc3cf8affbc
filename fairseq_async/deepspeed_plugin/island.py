"""The ranks that train synchronously among themselves and are one worker to the server."""

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import deepspeed.comm
import torch
from torch import Tensor

from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.exchange import SharedMemory
from fairseq_async.server import Layout, ServerClient
from fairseq_async.worker.place import Place


def become_a_world(place: Place) -> None:
    """Makes the island a distributed world of its own, so that no collective call of DeepSpeed waits for another.

    Raises:
        ConfigurationError: torch.distributed runs already, with every rank in it.
    """
    if torch.distributed.is_initialized():
        raise ConfigurationError(
            "torch.distributed was initialised with all ranks; call fairseq_async.deepspeed_plugin.initialize before "
            "anything that does so (deepspeed.init_distributed, for one)"
        )
    host, port = "127.0.0.1", _free_port()
    if place.island_size > 1:
        key = f"island-{place.worker}"
        if place.rank == 0:
            place.tell(key, [socket.gethostname(), port])
        else:
            machine, port = place.ask(key, f"rank 0 of island {place.worker} did not start")
            if machine != socket.gethostname():
                raise ConfigurationError(f"island_size is {place.island_size}: an island must be on one machine")
    world = {"RANK": place.rank, "WORLD_SIZE": place.island_size, "MASTER_ADDR": host, "MASTER_PORT": port}
    os.environ.setdefault("LOCAL_RANK", "0")  # a worker that no launcher has started
    for name, value in (world | {"LOCAL_SIZE": place.island_size, "LOCAL_WORLD_SIZE": place.island_size}).items():
        os.environ[name] = str(value)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class IslandClient:
    """One connection for all ranks of an island: rank 0 speaks, and what it hears is told to the others.

    All ranks must make the same calls in the same order: each holds a collective call within the island. They share
    the slot, into which each writes its own part.
    """

    def __init__(self, client: ServerClient | None, place: Place) -> None:
        self.client, self.place, self.worker = client, place, place.worker
        self._slot: Tensor | None = None

    def join(self, layout: Layout, method: dict[str, Any]) -> dict[str, Any]:
        welcome = self._told(lambda client: client.join(layout, method) | {"slot": _shared_slot(client, layout)})
        if self.client is not None:
            self._slot = self.client.slot
        else:
            path, workers, publishes, index = welcome["slot"]
            self._memory = SharedMemory.attach(path, layout.size, workers, publishes)
            self._slot = self._memory.slot(index)
        return welcome

    def initialise(self, state: str | None) -> dict[str, Any]:
        self._barrier()
        return self._told(lambda client: client.initialise(state))

    def push(self, write: Callable[[Tensor], None], **message: Any) -> dict[str, Any]:
        write(self.slot)
        self._barrier()
        return self._told(lambda client: client.push(lambda slot: None, **message))

    def pull(self, copy: Callable[[Tensor], None]) -> int:
        version = self._told(lambda client: {"version": client.pull(lambda flat: None)})["version"]
        copy(self.slot)
        self._barrier()  # nobody writes before all have read
        return int(version)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        return self._told(lambda client: client.ask(message))

    def leave(self, finished: bool) -> None:
        if self.client is not None:
            self.client.leave(finished)

    @property
    def slot(self) -> Tensor:
        if self._slot is None:
            raise ExchangeError("this worker has not joined the run")
        return self._slot

    def _barrier(self) -> None:
        deepspeed.comm.barrier()

    def _told(self, speak: Callable[[ServerClient], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0's answer, on every rank; as JSON, since broadcasting objects would unpickle them."""
        device = deepspeed.get_accelerator().current_device_name()
        body = b""
        if self.client is not None:
            try:
                body = json.dumps(speak(self.client)).encode()
            except BaseException:
                deepspeed.comm.broadcast(torch.tensor([-1], device=device), 0)
                raise
        length = torch.tensor([len(body)], device=device)
        deepspeed.comm.broadcast(length, 0)
        if length.item() < 0:
            raise ExchangeError("rank 0 of this island could not exchange with the server; its own line says why")
        content = torch.frombuffer(bytearray(body or bytes(int(length))), dtype=torch.uint8).to(device)
        deepspeed.comm.broadcast(content, 0)
        answer: dict[str, Any] = json.loads(bytes(content.cpu().tolist()))
        return answer


def _shared_slot(client: ServerClient, layout: Layout) -> list[Any]:
    """Where the other ranks find the slot; one that came over the network is moved to shared memory first."""
    if client.memory is None:
        client.use(SharedMemory.create(layout.size, 1, publishes=False))
        assert client.memory is not None
        return [client.memory.path, 1, False, 0]
    return [client.memory.path, client.memory.workers, client.memory.publishes, client.worker]
