"""Finds out which worker this process is, and connects it to its server, which it may have to start."""

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

from fairseq_async.environment import (
    HOST,
    JOINS,
    MEETING,
    RANKS,
    RENDEZVOUS,
    SERVER,
    SLOWDOWN,
    TLS,
    TOKEN,
    WORKER,
    WORKERS,
)
from fairseq_async.errors import AsyncError, ConfigurationError, ExchangeError, RefusedError, option
from fairseq_async.exchange.authentication import new_token, read_token
from fairseq_async.exchange.linux import end_with_parent
from fairseq_async.options.addresses import ANY, LOOPBACK, is_loopback
from fairseq_async.options.config import ServerOptions
from fairseq_async.options.validation import split_address
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.start.invitation import invitation, own_command
from fairseq_async.worker.start.meeting import Meeting, MeetingPlace, wait_until_it_listens
from fairseq_async.worker.start.process import check_guard, end_own_servers, own
from fairseq_async.worker.start.rendezvous import Rendezvous, ServerRequest
from fairseq_async.worker.start.server_process import ServerProcess, say
from fairseq_async.worker.start.store import PATIENCE, STARTED_AGAIN, ask, tell

_RESTARTS = 3  # how often a server without a launcher is started again


class FoundServer(NamedTuple):
    """The server of a worker's run: its address, the run's token, and its process if this worker has started it."""

    address: str
    token: str
    process: ServerProcess | None = None


@dataclass(frozen=True)
class WorkerContext:
    """This process's place in the run: it belongs to worker ``worker`` of ``workers``.

    Attributes:
        slowdown: factor by which this worker is made slower, for experiments.
        rank: this process among the ``island_size`` ranks that form the worker; rank 0 alone connects to the server.
        several_machines: whether the workers are on more than one machine.
        has_store: whether torchrun or deepspeed has started the ranks, which the store at MASTER_ADDR:MASTER_PORT
            connects.
        joins: whether the worker was not announced; the server then assigns its id.
        sizes: numbers of ranks of all workers, where a launcher says so; empty where all have as many as this one.
    """

    worker: int = 0
    workers: int = 1
    local_rank: int = 0
    slowdown: float = 1.0
    rank: int = 0
    island_size: int = 1
    several_machines: bool = False
    has_store: bool = False
    joins: bool = False
    sizes: tuple[int, ...] = ()

    @classmethod
    def find(cls, island_size: int = 1) -> "WorkerContext":
        """Reads the context from the environment that ``fairseq-async launch``, torchrun or deepspeed sets; without
        any of them, this process is the only worker.

        Args:
            island_size: number of the worker's ranks; 1 for as many as ``--ranks-per-worker`` has started.

        Raises:
            ConfigurationError: the ranks do not divide into islands, or were started in a way that is not supported.
        """
        get = os.environ.get
        if WORKER in os.environ:
            return cls._of_our_launcher(island_size)
        if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            return cls._of_torchrun(island_size)
        if get("SLURM_PROCID", "0") != "0":
            raise ConfigurationError(
                "srun started several tasks, and none knows of the others: call srun fairseq-async worker -- COMMAND"
            )
        if island_size > 1:
            raise ConfigurationError(
                f"{option('island_size')} is {island_size}: no launcher has started this process; start the ranks of "
                "islands with torchrun, deepspeed or fairseq-async launch"
            )
        return cls()

    @classmethod
    def _of_our_launcher(cls, island_size: int) -> "WorkerContext":
        ranks = ranks_of_launcher()
        if island_size not in (1, ranks):
            raise ConfigurationError(
                f"this worker is to have {island_size} ranks ({option('island_size')}), and its launcher has "
                f"started {ranks}: give the launcher {island_size} as well, or {ranks} here"
            )
        joins, rank = os.environ[WORKER] == JOINS, int(os.environ["RANK"]) if RANKS in os.environ else 0
        if not joins or ranks > 1:
            end_with_parent(signal.SIGTERM, os.getppid())  # without its launcher nobody restarts the server
        if joins:
            return cls(local_rank=rank, rank=rank, island_size=ranks, joins=True)
        worker, workers = int(os.environ[WORKER]), int(os.environ[WORKERS])
        slowdown = _slowdown(worker, workers) if MEETING in os.environ else float(os.environ.get(SLOWDOWN, "1"))
        if RANKS not in os.environ:
            return cls(worker, workers, worker, slowdown)
        return cls(worker, workers, rank, slowdown, rank, ranks, sizes=tuple(_numbers_of_ranks()))

    @classmethod
    def _of_torchrun(cls, island_size: int) -> "WorkerContext":
        """Reads the variables of torchrun, which deepspeed sets as well."""
        get = os.environ.get
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world % island_size:
            raise ConfigurationError(f"{option('island_size')} is {island_size}: it does not divide the {world} ranks")
        # LOCAL_SIZE is deepspeed's own; a library may have set LOCAL_WORLD_SIZE, torchrun's, for another purpose
        local = int(get("LOCAL_SIZE") or get("LOCAL_WORLD_SIZE") or world)
        return cls(
            worker=rank // island_size,
            workers=world // island_size,
            local_rank=int(get("LOCAL_RANK", "0")),
            slowdown=_slowdown(rank // island_size, world // island_size),
            rank=rank % island_size,
            island_size=island_size,
            several_machines=local != world,
            has_store=True,
        )

    def connect(
        self,
        module: str,
        options: ServerOptions,
        run_dir: Path,
        on_loss: Callable[[AsyncError], None],
        resumes: bool = False,
    ) -> tuple["WorkerContext", Client, ServerProcess | None]:
        """Connects to the server, and starts it first if that is this worker's task.

        Args:
            module: the server's module, if the server is to be started here.
            options: the address of a running server, or of the one to start for other machines; and how to connect.
            run_dir: the run's directory, which the options need not name.
            on_loss: see :class:`~fairseq_async.worker.connection.client.Client`.
            resumes: see :class:`~fairseq_async.worker.start.server_process.ServerProcess`.

        Returns:
            This context with the worker's id, the connection, and the server's process if this worker has started it.

        Raises:
            ConfigurationError: there is no token, or no address that other machines could reach, or this is a process
                of :func:`check_guard`.
            ExchangeError: there is no server, or it did not start.
        """
        check_guard()
        address, token, process = self._find_server(module, options, run_dir, resumes)
        number, patience = None if self.joins else self.worker, options.server_timeout
        try:
            tls, ended = _certificates(options), partial(_has_ended, process)
            client = Client(LastingConnection(address, token, number, patience, on_loss, tls, ended))
        except AsyncError as error:
            if process is None:
                raise
            process.stop()
            if isinstance(error, RefusedError):
                raise
            raise ExchangeError(f"the server did not start; see {process.log}") from error
        return replace(self, worker=client.worker, workers=client.workers), client, process

    def _find_server(self, module: str, options: ServerOptions, run_dir: Path, resumes: bool) -> FoundServer:
        """Finds the server, or starts it if that is this worker's task.

        Where a launcher starts the server, the launcher tells its address. Elsewhere worker 0 starts the server, and
        the others read its address in a file or in the store of torchrun or deepspeed.
        """
        resumes = resumes or int(os.environ.get(STARTED_AGAIN) or 0) > 0  # torchrun has started all workers again
        given, token_file = options.server, options.token_file
        token = read_token(Path(token_file)) if token_file else os.environ.get(TOKEN)
        if MEETING in os.environ and not self.joins:
            return self._find_server_of_job(module, options, token, run_dir, resumes)
        if RENDEZVOUS in os.environ and token:
            return FoundServer(self._ask_launcher(module, options, run_dir), token)
        address = os.environ.get(SERVER) or given
        if address and token and not (token_file and self.has_store):
            return FoundServer(address, token)
        if given and not self.has_store:
            raise ConfigurationError(
                f"{option('server')} {given}: the run's token is missing; give it with {option('token_file')}"
            )
        if self.several_machines and not given:
            raise ConfigurationError(
                f"workers on several machines: say with {option('server')} HOST:PORT at which address of worker 0's "
                "machine the others reach the server"
            )
        if self.worker == 0:
            host, port = split_address(given) if given else (LOOPBACK, 0)
            process = self._start_server(module, options, (host, port), token, run_dir, resumes)
            if self.has_store:
                tell(self.global_rank, "server", [process.address, str(process.token_file.resolve())])
            return FoundServer(process.address, process.token, process)
        late = f"worker 0 did not start a server within {PATIENCE.seconds} s"
        address, path = ask(self.global_rank, "server", late)
        return FoundServer(address, token or read_token(Path(path)))

    def _ask_launcher(self, module: str, options: ServerOptions, run_dir: Path) -> str:
        """Waits for the address of the server, which the launcher starts once worker 0 has told it the module."""
        if options.server:
            raise ConfigurationError(
                f"{option('server')} {options.server}: the launcher starts the server; leave it out"
            )
        rendezvous, tls = Rendezvous(Path(os.environ[RENDEZVOUS])), _certificates(options)
        if self.worker == 0:
            own = str(run_dir.resolve()), str(tls) if tls else None, option("run_dir")
            rendezvous.request(ServerRequest(module, *own, standby=not options.no_standby))
        return rendezvous.wait()

    def _find_server_of_job(
        self, module: str, options: ServerOptions, token: str | None, run_dir: Path, resumes: bool
    ) -> FoundServer:
        """Starts the server if this is worker 0, or resumes it where the job was started again; other workers wait
        until it listens."""
        meeting, given = Meeting(run_dir, os.environ[MEETING]), options.server
        if self.worker > 0:
            if given and token:  # machines without a file system in common
                wait_until_it_listens(given, options.server_timeout)
                return FoundServer(given, token)
            address, of_run = meeting.wait(options.server_timeout)
            return FoundServer(address, token or of_run)
        before = meeting.place()
        token, resumes = token or (before.token if before else new_token()), resumes or before is not None
        host, port = split_address(given) if given else (os.environ[HOST], 0)
        listens = host if is_loopback(host) else ANY  # the name by which others reach it may not resolve here yet
        start = partial(self._start_server, module, options, token=token, run_dir=run_dir, resumes=resumes)
        try:
            process = start((listens, before.port if before and before.may_be_here and not given else port))
        except ConfigurationError:
            if given or not before:
                raise
            process = start((listens, 0))  # another process has taken the port by now
        port = split_address(process.address)[1]
        near = f"{LOOPBACK if listens == ANY else host}:{port}"
        meeting.tell(MeetingPlace(meeting.job, socket.gethostname(), f"{host}:{port}", near, token))
        return FoundServer(near, token, process)

    def _start_server(
        self,
        module: str,
        options: ServerOptions,
        where: tuple[str, int],
        token: str | None,
        run_dir: Path,
        resumes: bool,
    ) -> ServerProcess:
        (host, port), tls = where, _certificates(options)
        if not (is_loopback(host) or token):
            raise ConfigurationError(
                f"{option('server')} {host}:{port}: other machines can reach this address; give every worker the same "
                f"secret with {option('token_file')} FILE, made with: (umask 077; openssl rand -hex 16 > FILE)"
            )
        end_own_servers()  # of a run before this one in the same process, whose directory this one may have
        process = ServerProcess(
            module,
            self.workers,
            run_dir,
            run_dir / "logs" / "server.log",
            port=port,
            host=host,
            token=token,
            restarts=_RESTARTS,
            ends_with_workers=True,
            resumes=resumes,
            tls=tls,
            standby=not options.no_standby,
            stays=True,
        )
        own(process)
        say(invitation(process.address, process.token_file.resolve(), own_command(), tls))
        return process

    @property
    def ranks(self) -> int:
        """Number of ranks of all workers that were announced."""
        return sum(self._sizes)

    @property
    def share(self) -> float:
        """Number of this worker's ranks over the mean number; 1 for a worker that joins, which knows no other's."""
        return self.island_size * self.workers / self.ranks

    @property
    def global_rank(self) -> int:
        """Rank of this process among the ranks of all workers; a worker that joins has that of another one."""
        return sum(self._sizes[: self.worker % self.workers]) + self.rank

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.sizes or (self.island_size,) * self.workers


def ranks_of_launcher() -> int:
    """Returns how many ranks of this worker ``--ranks-per-worker`` has started."""
    if RANKS not in os.environ:
        return 1
    return _numbers_of_ranks()[0 if os.environ[WORKER] == JOINS else int(os.environ[WORKER])]


def _numbers_of_ranks() -> list[int]:
    return [int(each) for each in os.environ[RANKS].split(",")]


def _has_ended(process: ServerProcess | None) -> bool:
    """Whether the server that this process has started has ended for good."""
    return process is not None and process.poll() is not None


def _certificates(options: ServerOptions) -> Path | None:
    """The directory of the certificates that the options or a launcher name; None without TLS."""
    given = options.tls or os.environ.get(TLS)
    return Path(given).resolve() if given else None


def _slowdown(worker: int, workers: int) -> float:
    """Returns the worker's slowdown where no launcher of ours sets it: FAIRSEQ_ASYNC_SLOWDOWN=1,4 makes worker 1 four
    times slower."""
    given = os.environ.get(SLOWDOWN)
    if not given:
        return 1.0
    try:
        factors = [float(part) for part in given.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"{SLOWDOWN}={given}: give numbers separated by commas, as in 1,4") from error
    if len(factors) != workers or not all(1 <= factor < inf for factor in factors):
        raise ConfigurationError(f"{SLOWDOWN}={given}: give each of the {workers} workers a factor of at least 1")
    return factors[worker]
