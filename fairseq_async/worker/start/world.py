"""torch.distributed's world of a worker: its own ranks alone, whatever the launcher has started."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import torch

from fairseq_async.environment import RANKS
from fairseq_async.errors import ConfigurationError, ExchangeError, option
from fairseq_async.options.addresses import free_port
from fairseq_async.options.config import ServerOptions
from fairseq_async.worker.connection.island import IslandClient
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.start import store
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.process import end_process
from fairseq_async.worker.start.server_process import ServerProcess


def check_not_started(remedy: str) -> None:
    """Checks that nothing has initialised torch.distributed yet.

    Raises:
        ConfigurationError: torch.distributed is initialised already, with every rank in it.
    """
    if torch.distributed.is_initialized():
        raise ConfigurationError(f"torch.distributed was initialised with all ranks; {remedy}")


def start_world(context: WorkerContext) -> None:
    """Sets torch.distributed's variables so that the island is a distributed world of its own.

    No collective call then waits for another island. Rank 0 chooses the port and tells it to the other
    ranks of the island through the launcher's store.

    Raises:
        ConfigurationError: the island is not on one machine.
        ExchangeError: rank 0 of the island did not tell its port.
    """
    if RANKS in os.environ:  # our launcher has set them
        return
    if context.has_store:
        store.open_store(context.global_rank)  # before its address, in the variables that are set below, is overwritten
    host, port = "127.0.0.1", free_port()
    if context.island_size > 1:
        key = f"island-{context.worker}"
        if context.rank == 0:
            store.tell(context.global_rank, key, [socket.gethostname(), port])
        else:
            machine, port = store.ask(context.global_rank, key, f"rank 0 of island {context.worker} did not start")
            if machine != socket.gethostname():
                raise ConfigurationError(
                    f"{option('island_size')} is {context.island_size}: an island must be on one machine"
                )
    world = {"RANK": context.rank, "WORLD_SIZE": context.island_size, "MASTER_ADDR": host, "MASTER_PORT": port}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # torchrun keeps no store at the new address
    os.environ.setdefault("LOCAL_RANK", "0")  # a worker that no launcher has started
    for name, value in (world | {"LOCAL_SIZE": context.island_size, "LOCAL_WORLD_SIZE": context.island_size}).items():
        os.environ[name] = str(value)


def enter_world(island_size: int) -> WorkerContext:
    """Finds which worker this process is and sets its world, for scripts in which others initialise torch.distributed.

    A second call returns the same worker, since the launcher's variables are not there any more. Raises what
    :meth:`WorkerContext.find` and :func:`start_world` raise.
    """
    if not _entered:
        context = WorkerContext.find(island_size)
        start_world(context)
        _entered.append(context)
    return _entered[0]


def entered_world() -> WorkerContext | None:
    """Returns the worker that :func:`enter_world` has found; None if it was not called."""
    return _entered[0] if _entered else None


def connect_rank(
    context: WorkerContext,
    module: str,
    options: ServerOptions,
    run_dir: Path,
    device: torch.device | str,
    resumes: bool = False,
) -> tuple[WorkerContext, ServerConnection, ServerProcess | None]:
    """Connects a worker as :meth:`WorkerContext.connect` does, or one rank of it, of which rank 0 alone connects.

    The server gives a worker that joins its number, which its other ranks learn from rank 0: they have a process group.

    Args:
        device: see :class:`~fairseq_async.worker.connection.island.IslandClient`.
        resumes: see :meth:`WorkerContext.connect`.
    """
    client, server = None, None
    if context.rank == 0:
        try:
            context, client, server = context.connect(module, options, run_dir, end_process, resumes)
        except BaseException:
            if context.joins and context.island_size > 1:
                _share_number(context, device, failed=True)
            raise
        if context.island_size == 1:
            return context, client, server
    if context.joins:
        context = _share_number(context, device)
    return context, IslandClient(client, context, device), server


def _share_number(context: WorkerContext, device: torch.device | str, failed: bool = False) -> WorkerContext:
    """Returns the context with the worker's number, and that of all workers, as rank 0 has them. Collective."""
    numbers = torch.tensor([-1 if failed else context.worker, context.workers], device=device)
    torch.distributed.broadcast(numbers, 0)
    worker, workers = numbers.tolist()
    if worker < 0 and context.rank > 0:
        raise ExchangeError("rank 0 of this worker could not join the run; its own line says why")
    return replace(context, worker=worker, workers=workers)


_entered: list[WorkerContext] = []
