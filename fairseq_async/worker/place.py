"""Which worker this process is, and where its server is found."""

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.server.client import LOOPBACK
from fairseq_async.server.process import TOKEN, ServerProcess

WORKER, WORKERS, SLOWDOWN = "FAIRSEQ_ASYNC_WORKER", "FAIRSEQ_ASYNC_WORKERS", "FAIRSEQ_ASYNC_SLOWDOWN"
# the module that is the server of each fairseq --optimizer
SERVERS = {
    "hybrid_async": "fairseq_async.fairseq_plugin.server",
    "local_sgd": "fairseq_async.worker.outer",
}
_RENDEZVOUS = timedelta(seconds=120)  # worker 0 has to import its framework and to start the server


@dataclass(frozen=True)
class Place:
    """``worker`` of ``workers``; ``slowdown`` times slower than it could be, for experiments.

    Attributes:
        rank: among the ``island_size`` ranks that are this worker together; rank 0 speaks for them.
        several_machines: not all workers are on this one.
    """

    worker: int = 0
    workers: int = 1
    local_rank: int = 0
    slowdown: float = 1.0
    rank: int = 0
    island_size: int = 1
    several_machines: bool = False

    @classmethod
    def find(cls, island_size: int = 1) -> "Place":
        """From the environment that ``fairseq-async launch``, torchrun or deepspeed gives; alone without any.

        Raises:
            ConfigurationError: the ranks do not divide into islands, or were started in a way that is not supported.
        """
        get = os.environ.get
        if WORKER in os.environ:
            worker = int(os.environ[WORKER])
            return cls(worker, int(os.environ[WORKERS]), worker, float(get(SLOWDOWN, "1")))
        if _under_torchrun():
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            if world % island_size:
                raise ConfigurationError(f"island_size is {island_size}: it does not divide the {world} ranks")
            local = int(get("LOCAL_WORLD_SIZE") or get("LOCAL_SIZE") or world)
            return cls(
                worker=rank // island_size,
                workers=world // island_size,
                local_rank=int(get("LOCAL_RANK", "0")),
                slowdown=_slowdown(rank // island_size, world // island_size),
                rank=rank % island_size,
                island_size=island_size,
                several_machines=local != world,
            )
        if get("SLURM_PROCID", "0") != "0":
            raise ConfigurationError(
                "srun started several tasks; start one, with fairseq-async launch, or use torchrun"
            )
        return cls()

    def find_server(self, module: str, given: str | None, run_dir: Path) -> tuple[str, str, ServerProcess | None]:
        """Address, token, and the server's process if it is this worker's own.

        Where a launcher has started the server, ``given`` is its address. Elsewhere worker 0 starts ``module`` as the
        server, for workers on other machines at the address that is given, and the store of torchrun or deepspeed
        tells the others where it is.

        Raises:
            ConfigurationError: there is no token, or no address that other machines could reach.
            ExchangeError: worker 0 did not start a server.
        """
        if given and TOKEN in os.environ:
            return given, os.environ[TOKEN], None
        if given and not _under_torchrun():
            raise ConfigurationError(f"--server {given}: the run's token is missing from the variable {TOKEN}")
        if self.several_machines and not given:
            raise ConfigurationError(
                'workers on several machines: say with --server HOST:PORT (deepspeed: "server") at which address of '
                "worker 0's machine the others reach the server"
            )
        if self.worker == 0:
            try:
                host, port = split_address(given) if given else (LOOPBACK, 0)
            except ValueError as error:
                raise ConfigurationError(f"--server {given}: {error}") from error
            process = ServerProcess(module, self.workers, run_dir, run_dir / "logs" / "server.log", port, host)
            if _under_torchrun():
                self.tell("server", [process.address, process.token])
            return process.address, process.token, process
        address, token = self.ask("server", f"worker 0 did not start a server within {_RENDEZVOUS.seconds} s")
        return address, token, None

    def tell(self, name: str, value: Any) -> None:
        """Leaves a value of JSON's types for the other ranks."""
        _store(self).set(_key(name), json.dumps(value))

    def ask(self, name: str, otherwise: str) -> Any:
        """Waits for a value that another rank tells.

        Raises:
            ExchangeError: it did not come; ``otherwise`` is the message.
        """
        try:
            return json.loads(_store(self).get(_key(name)))
        except RuntimeError as error:
            raise ExchangeError(otherwise) from error


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT in its parts.

    Raises:
        ValueError: it is not written so.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("an address is written HOST:PORT, as in 10.0.0.1:29400")
    return host, int(port)


def _slowdown(worker: int, workers: int) -> float:
    """FAIRSEQ_ASYNC_SLOWDOWN=1,4 makes worker 1 four times slower, where no launcher of ours gives each its own."""
    given = os.environ.get(SLOWDOWN)
    if not given:
        return 1.0
    try:
        factors = [float(part) for part in given.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"{SLOWDOWN}={given}: numbers with commas between them, as in 1,4") from error
    if len(factors) != workers or min(factors) < 1:
        raise ConfigurationError(f"{SLOWDOWN}={given}: give each of the {workers} workers a factor of at least 1")
    return factors[worker]


def _under_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _store(place: Place) -> TCPStore:
    """torchrun's, or, where the launcher keeps none, one that the first rank does."""
    if not _kept:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        first = place.worker == 0 and place.rank == 0 and not agent
        _kept.append(TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=_RENDEZVOUS))
    return _kept[0]


_kept: list[TCPStore] = []  # the first rank's end must outlive the others' questions


def _key(name: str) -> str:
    return f"fairseq_async/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
