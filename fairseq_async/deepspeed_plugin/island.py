"""The ranks that train synchronously among themselves and are one worker to the server."""

import json
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
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
        self._size = 0
        self._slot: Tensor | None = None
        self._where: list[Any] = []

    def join(self, layout: Layout, method: dict[str, Any]) -> dict[str, Any]:
        self._size = layout.size
        return self._told(lambda client: client.join(layout, method))

    def initialise(self, state: str | None) -> dict[str, Any]:
        self._barrier()
        return self._told(lambda client: client.initialise(state))

    def push(self, write: Callable[[Tensor], object], **message: Any) -> dict[str, Any]:
        with nullcontext() if self.client is None else self.client.hold_slot():
            self._told(lambda client: {})  # where the slot is: the server may have come back meanwhile
            write(self.slot)
            self._barrier()
            return self._told(lambda client: client.push(lambda slot: None, **message))

    def pull(self, copy: Callable[[Tensor], object]) -> int:
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
        if self.client is not None:
            return self.client.slot
        if self._slot is None:
            raise ExchangeError("this worker has not joined the run")
        return self._slot

    def _find_slot(self, where: list[Any]) -> None:
        """It moves with a server that comes back."""
        if self.client is None and where != self._where:
            self._where = where
            path, _, workers, publishes, index = where
            memory = SharedMemory.attach(path, self._size, workers, publishes)
            self._slot = memory.slot(index)
            memory.close()

    def _barrier(self) -> None:
        deepspeed.comm.barrier()

    def _told(self, speak: Callable[[ServerClient], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0's answer, on every rank; as JSON, since broadcasting objects would unpickle them."""
        device = deepspeed.get_accelerator().current_device_name()
        body = b""
        if self.client is not None:
            try:
                answer = speak(self.client)
                body = json.dumps([answer, _shared_slot(self.client, self._size)]).encode()
            except BaseException:
                deepspeed.comm.broadcast(torch.tensor([-1], device=device), 0)
                raise
        length = torch.tensor([len(body)], device=device)
        deepspeed.comm.broadcast(length, 0)
        if length.item() < 0:
            raise ExchangeError("rank 0 of this island could not exchange with the server; its own line says why")
        content = torch.frombuffer(bytearray(body or bytes(int(length))), dtype=torch.uint8).to(device)
        deepspeed.comm.broadcast(content, 0)
        told: dict[str, Any]
        told, where = json.loads(bytes(content.cpu().tolist()))
        self._find_slot(where)
        return told


def _shared_slot(client: ServerClient, size: int) -> list[Any]:
    """Where the other ranks find the slot; one that came over the network is moved to shared memory first."""
    if client.memory is None:
        client.use(SharedMemory.create(size, 1, publishes=False))
        assert client.memory is not None
        client.memory.open(0)
    memory, index = client.memory, 0 if client.remote else client.worker
    return [memory.path, memory.inode, memory.workers, memory.publishes, index]
