"""An island: ranks that train synchronously among themselves and are one worker to the server."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor, distributed

from fairseq_async.errors import ExchangeError
from fairseq_async.exchange import SharedMemory, copy
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, Push, PushReply, ScheduleReply, Welcome, WorkReply
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.compressor import Compressor
from fairseq_async.worker.connection.server_connection import JoinDetails
from fairseq_async.worker.start.context import WorkerContext

_Answer = TypeVar("_Answer")


class _SlotLocation(NamedTuple):
    """Where the other ranks of an island find the worker's slot: the shared memory, its shape, the slot's number.

    The inode tells two memories apart that had the same path, one after the other.
    """

    path: str
    inode: int
    workers: int
    publishes: bool
    slot: int


class IslandClient:
    """A :class:`ServerConnection` for all ranks of an island: rank 0 has the connection and broadcasts the answers.

    The ranks share the worker's slot, into which each writes its own part.

    Hazard: every method but ``leave`` and ``close`` makes collective calls within the island. All ranks must call the
    same methods in the same order, from the thread in which training makes its own collective calls, or the island
    hangs, or one rank takes the answer to another question. Rank 0's request may fail; it then broadcasts that before
    it raises, so that no rank waits for an answer that never comes.

    Args:
        client: rank 0's connection; None on the other ranks.
        context: which rank of which worker this process is.
        device: of the tensors with which the ranks tell each other answers.
    """

    def __init__(self, client: Client | None, context: WorkerContext, device: torch.device | str = "cpu") -> None:
        self.client, self.worker, self.workers = client, context.worker, context.workers
        self._device, self._ranks = device, context.island_size
        self._size = 0
        self._slot: Tensor | None = None
        self._memory: SharedMemory | None = None  # where the slot is, and what the server publishes
        self._location: _SlotLocation | None = None

    def join(self, layout: Layout, spec: MethodSpec, details: JoinDetails) -> Welcome:
        self._size = layout.size
        own = replace(details, gpu="")  # all ranks open the slot, which a server's memory on a GPU is not made for
        return self._broadcast_answer(lambda client: client.join(layout, spec, own), Welcome)

    def initialise(self, state: str | None, from_checkpoint: bool = False) -> Welcome:
        """Each rank has written its part of the parameters before."""
        self._barrier()  # all parts are in the slot before rank 0 says so
        return self._broadcast_answer(lambda client: client.initialise(state, from_checkpoint), Welcome)

    def push(self, write: Callable[[Tensor], object], push: Push) -> PushReply:
        """``write`` writes this rank's part."""
        push = replace(push, report=replace(push.report, ranks=self._ranks))
        with nullcontext() if self.client is None else self.client.connection.lock:
            # The slot's location first: it is another one if the server has come back since the last exchange. Rank 0
            # holds the slot until the push, since its background thread may reconnect, too.
            self._broadcast_answer(lambda client: None, type(None))
            write(self.slot)
            self._barrier()  # all parts are in the slot before rank 0 pushes
            return self._broadcast_answer(lambda client: client.push(lambda slot: None, push), PushReply)

    def prepare(self, write: Callable[[Tensor], object]) -> None:
        """``write`` writes this rank's part."""
        write(self.slot)

    def pull(
        self,
        copy: Callable[[Tensor], object],
        look_ahead: float = 0.0,
        starts: bool = False,
        fragment_of: int | None = None,
    ) -> int:
        """Every rank copies what the server has published in this machine's memory. If it publishes nothing there, or
        another version while they copy, every rank copies from the slot, into which rank 0 copies one version."""
        wanted = look_ahead, starts, fragment_of
        version = self._broadcast_answer(lambda client: client.pull(lambda flat: None, *wanted), int)
        if self._location is not None and self._location.publishes and not look_ahead:
            if not self.on_any_rank(self._copy_published(copy) != version):
                return version
            version = self._broadcast_answer(lambda client: client.pull(partial(_place, client), *wanted), int)
        copy(self.slot)
        self._barrier()  # nobody writes before all have read
        return version

    def wait_for_work(self, for_end: bool = False) -> WorkReply:
        return self._broadcast_answer(lambda client: client.wait_for_work(for_end), WorkReply)

    def schedule_event(
        self, event: Literal["begin_epoch", "end_epoch"], epoch: int, loss: float | None = None
    ) -> ScheduleReply:
        return self._broadcast_answer(lambda client: client.schedule_event(event, epoch, loss), ScheduleReply)

    def on_any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on a rank of the island."""
        flags = torch.tensor([int(flag)], device=self._device)
        distributed.all_reduce(flags)
        return bool(flags.item())

    def save_state(self, path: str) -> int:
        return self._broadcast_answer(lambda client: client.save_state(path), int)

    def leave(self, finished: bool) -> None:
        """Ends rank 0's connection; no collective call, since it runs when a process ends."""
        if self.client is not None:
            self.client.leave(finished)

    def close(self) -> None:
        """No collective call either."""
        if self.client is not None:
            self.client.close()

    @property
    def compressor(self) -> Compressor | None:
        """Rank 0's, which encodes what all ranks have written into the slot."""
        return None if self.client is None else self.client.compressor

    @property
    def slot(self) -> Tensor:
        """The worker's slot, flat, in memory that all ranks of the island share.

        Raises:
            ExchangeError: the worker has not joined the run.
        """
        if self.client is not None:
            return self.client.slot
        if self._slot is None:
            raise ExchangeError("this worker has not joined the run")
        return self._slot

    @property
    def exchanged(self) -> dict[str, Tensor]:
        if self._memory is None or not self._memory.publishes:
            return {"slot": self.slot}
        return {"slot": self.slot, "published": self._memory.published}

    def _attach_slot(self, location: _SlotLocation) -> None:
        """Opens rank 0's slot on the other ranks; opens it again when a server that came back has brought another."""
        if location == self._location:
            return
        self._location = location
        if self.client is not None:
            shared = self.client.memory.shared
            self._memory = None  # if the server has come back once more
            if isinstance(shared, SharedMemory) and (shared.path, shared.inode) == (location.path, location.inode):
                self._memory = shared
            return
        self._memory = SharedMemory.attach(location.path, self._size, location.workers, location.publishes)
        self._slot = self._memory.slot(location.slot)
        self._memory.close()  # what is mapped stays

    def _copy_published(self, copy: Callable[[Tensor], object]) -> int:
        """Copies what the server has published; returns its version, -1 where that was no whole one.

        Hazard: every rank calls ``copy`` once, whatever it finds, because that of ZeRO 3 makes collective calls: a rank
        that copied again by itself would wait for the others for ever.
        """
        if self._memory is None:  # of rank 0, whose server has just come back once more
            copy(self.slot)
            return -1
        return self._memory.read_once(copy)

    def _barrier(self) -> None:
        distributed.barrier()

    def _broadcast_answer(self, request: Callable[[Client], _Answer], kind: Any) -> _Answer:
        """Makes the request on rank 0 and returns its answer on every rank.

        Two broadcasts, on every rank in this order: the answer's length, −1 for a request that failed; then the answer
        with the slot's location. They go as JSON, because broadcasting objects would unpickle them.

        Raises:
            AsyncError: on rank 0, the request's own error.
            ExchangeError: on the other ranks, if rank 0's request failed.
        """
        body = b""
        if self.client is not None:
            try:
                answer = request(self.client)
                body = _adapter(kind).dump_json((answer, _share_slot(self.client, self._size)))
            except BaseException:
                # whatever it was, KeyboardInterrupt too: the other ranks are in the broadcast below already
                distributed.broadcast(torch.tensor([-1], device=self._device), 0)
                raise
        length = torch.tensor([len(body)], device=self._device)
        distributed.broadcast(length, 0)
        if length.item() < 0:
            raise ExchangeError("rank 0 of this island could not exchange with the server; its own line says why")
        content = torch.frombuffer(bytearray(body or bytes(int(length))), dtype=torch.uint8).to(self._device)
        distributed.broadcast(content, 0)
        received: _Answer
        received, location = _adapter(kind).validate_json(bytes(content.cpu().tolist()))
        self._attach_slot(location)
        return received


def _place(client: Client, flat: Tensor) -> None:
    if flat.data_ptr() != client.slot.data_ptr():
        copy(client.slot, flat)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Returns the parser of an answer of this type with the slot's location; made once, since making it takes
    milliseconds."""
    return TypeAdapter(tuple[kind, _SlotLocation])


def _share_slot(client: Client, size: int) -> _SlotLocation:
    """Returns where the other ranks find the slot; a slot that goes over the network first moves to shared memory."""
    memory = client.memory.shared
    if memory is None:
        memory = SharedMemory.create(size, 1, publishes=False)
        client.share(memory)
        memory.allocate_slot(0)
    slot = 0 if client.memory.remote else client.worker
    return _SlotLocation(memory.path, memory.inode, memory.workers, memory.publishes, slot)
