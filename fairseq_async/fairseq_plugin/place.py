"""Which worker this process is, and where its server is found."""

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.server.process import TOKEN, ServerProcess

WORKER, WORKERS, SLOWDOWN = "FAIRSEQ_ASYNC_WORKER", "FAIRSEQ_ASYNC_WORKERS", "FAIRSEQ_ASYNC_SLOWDOWN"
_SERVER_MODULE = "fairseq_async.fairseq_plugin.server"
_RENDEZVOUS = timedelta(seconds=120)  # worker 0 has to import fairseq and to start the server


@dataclass(frozen=True)
class Place:
    """``worker`` of ``workers``; ``slowdown`` times slower than it could be, for experiments."""

    worker: int = 0
    workers: int = 1
    local_rank: int = 0
    slowdown: float = 1.0

    @classmethod
    def find(cls) -> "Place":
        """From the environment that ``fairseq-async launch`` or torchrun gives; alone without either."""
        get = os.environ.get
        if WORKER in os.environ:
            worker = int(os.environ[WORKER])
            return cls(worker, int(os.environ[WORKERS]), worker, float(get(SLOWDOWN, "1")))
        if _under_torchrun():
            if get("LOCAL_WORLD_SIZE", get("WORLD_SIZE")) != get("WORLD_SIZE"):
                raise ConfigurationError("torchrun started workers on several machines; hybrid_async needs them on one")
            return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(get("LOCAL_RANK", "0")))
        if get("SLURM_PROCID", "0") != "0":
            raise ConfigurationError(
                "srun started several tasks; start one, with fairseq-async launch, or use torchrun"
            )
        return cls()

    def find_server(self, given: str | None, run_dir: Path) -> tuple[str, str, ServerProcess | None]:
        """Address, token, and the server's process if it is this worker's own.

        Worker 0 starts the server where no launcher has done so, and torchrun's store tells the others where it is.
        """
        if given:
            if TOKEN not in os.environ:
                raise ConfigurationError(f"--server {given}: the run's token is missing from the variable {TOKEN}")
            return given, os.environ[TOKEN], None
        if self.worker == 0:
            process = ServerProcess(_SERVER_MODULE, self.workers, run_dir, run_dir / "logs" / "server.log")
            if _under_torchrun():
                _store(True).set(_key(), json.dumps([process.address, process.token]))
            return process.address, process.token, process
        try:
            address, token = json.loads(_store(False).get(_key()))
        except RuntimeError as error:
            raise ExchangeError(f"worker 0 did not start a server within {_RENDEZVOUS.seconds} s") from error
        return address, token, None


def _under_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _store(first: bool) -> TCPStore:
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=first and not agent, wait_for_workers=False, timeout=_RENDEZVOUS)
    _kept.append(store)  # the master's end must outlive the others' questions
    return store


_kept: list[TCPStore] = []


def _key() -> str:
    return f"fairseq_async/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
