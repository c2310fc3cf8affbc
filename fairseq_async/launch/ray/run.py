"""Drives a run on a Ray cluster from its start to its end, and changes the number of its workers."""

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError

from fairseq_async.environment import PLUGINS
from fairseq_async.errors import ConfigurationError
from fairseq_async.exchange.authentication import new_token
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.command.programs import is_fairseq
from fairseq_async.launch.command.script import ScriptCommand
from fairseq_async.launch.error_lines import traceback
from fairseq_async.launch.interrupted import what_is_kept
from fairseq_async.launch.processes import RunFailedError, failure, interrupt_on_signals
from fairseq_async.launch.progress.display import Display
from fairseq_async.launch.progress.progress import Progress
from fairseq_async.launch.ray.cluster import Actors, connect, ended, find_registry
from fairseq_async.launch.ray.registry import Ended, NodeAddress, State
from fairseq_async.launch.ray.resources import Resources, server_shards
from fairseq_async.launch.ray.server import ServerTask
from fairseq_async.launch.ray.shard import ShardTask
from fairseq_async.launch.ray.worker import WorkerTask
from fairseq_async.records.created_files import CreatedFiles
from fairseq_async.worker.start.invitation import invitation
from fairseq_async.worker.start.server_process import manner

_PAUSE = 0.5  # seconds between two looks at the registry
_PLACING = 20.0  # seconds after which workers without a node are reported
_FINISHING = 60.0  # seconds for worker 0 to end after the server; it may still write its checkpoint
_LEAVING = 10.0  # seconds for other workers to end


@dataclass(frozen=True)
class RayOptions:
    """The flags of ``fairseq-async ray``.

    Attributes:
        address: address of the Ray cluster; ``auto`` for the one of this machine.
        name: name of the run in the cluster.
        max_restarts: how often each process, and each actor, may be started again.
        resume: whether to go on with a script's interrupted run.
        shards: number of shards of the server, each on a node of its own if there are enough.
    """

    address: str
    name: str
    max_restarts: int
    resume: bool
    shards: int = 1


def train(arguments: list[str], workers: list[Resources], options: RayOptions) -> None:
    """Runs a command on a Ray cluster to its end.

    Raises:
        AsyncError: the command has a mistake, or the run failed.
        KeyboardInterrupt: the run was interrupted, and has ended in order.
    """
    directory = _make_directory()
    try:
        command = _command(arguments, directory, len(workers), options.resume)
        connect(options.address)
        RayRun(command, directory, workers, options).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _make_directory() -> Path:
    """Makes the run's temporary directory where all nodes see it.

    Raises:
        ConfigurationError: nothing can be made there.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=".fairseq-async-", dir=os.getcwd())).resolve()
    except OSError as error:
        raise ConfigurationError(
            f"the working directory {os.getcwd()} cannot be written to: {error.strerror}; call the command in one on a "
            "file system that all nodes share"
        ) from error


def _command(arguments: list[str], directory: Path, workers: int, resume: bool) -> WorkerCommand | ScriptCommand:
    if not is_fairseq(arguments):
        return ScriptCommand(arguments, directory, resume)
    command = WorkerCommand(arguments, workers)
    if command.synchronous or resume:
        raise ConfigurationError(
            "--resume is for scripts: leave it out; an interrupted fairseq-train continues without it"
            if resume
            else "ray: a synchronous method has no server; start its ranks with torchrun"
        )
    command.check_inputs()
    return command


def scale(change: int, address: str, name: str) -> None:
    """Changes the number of workers of a run that is going on.

    Raises:
        ConfigurationError: there is no such run, or it has too few workers to remove so many.
    """
    connect(address)
    try:
        refused = ray.get(find_registry(name).scale.remote(change))
    finally:
        ray.shutdown()
    if refused:
        raise ConfigurationError(f"scale {change:+}: {refused}")


class RayRun:
    """The driver of a run. Its actors end with it: a driver that is killed leaves an interrupted run.

    Args:
        directory: temporary directory of the run, until its end.
        workers: the resources of each worker; workers that are added ask for the same as the last one.
    """

    def __init__(
        self, command: WorkerCommand | ScriptCommand, directory: Path, workers: list[Resources], options: RayOptions
    ) -> None:
        self._command, self._directory, self._resources, self._options = command, directory, workers, options
        self._run_dir, self._created = command.run_dir.resolve(), CreatedFiles(command.run_dir)
        self._actors = Actors(options.name, new_token(), len(workers), options.max_restarts)
        self._server: ray.ObjectRef | None = None
        self._numbers: set[int] = set()  # of the workers that were started, and not removed by a scale
        self._saved = False  # whether worker 0 has ended with 0
        self._invited, self._places_at = False, time.monotonic() + _PLACING
        self._shards: dict[int, NodeAddress] = {}  # the places of shards on other nodes, which the workers' command has

    def run(self) -> None:
        """Runs until the run is finished.

        Raises:
            RunFailedError: the run failed, or the Ray cluster is lost.
            KeyboardInterrupt: the run was interrupted, and has ended in order.
        """
        interrupt_on_signals()
        self._display = Display(Progress(self._run_dir, len(self._resources)))
        try:
            with self._display:
                self._watch()
            self._display.say(f"finished: {self._display.progress.result()}")
        except KeyboardInterrupt:
            self._display.say("interrupted: the server writes what was done")
            self._actors.end(_LEAVING)
            self._display.say(what_is_kept(self._display.progress, self._run_dir, self._created, self._command))
            raise
        except RayError as error:
            raise RunFailedError(f"the Ray cluster, or the registry in it, is lost: {_first_line(error)}") from error
        finally:
            self._actors.end(_LEAVING, self._saved)

    def _watch(self) -> None:
        while True:
            state = self._actors.state()
            self._follow(state)
            waited = [*self._actors.runs, *self._actors.shards, *([] if self._server is None else [self._server])]
            for run in ray.wait(waited, timeout=_PAUSE)[0]:
                if run == self._server:
                    return self._after_server(ended(run))
                if run in self._actors.shards:
                    self._after_shard(run)
                else:
                    self._after_worker(self._actors.runs.pop(run), ended(run))
            self._display.refresh()
            if self._numbers and not self._actors.runs:
                return self._after_workers()

    def _follow(self, state: State) -> None:
        """Follows the registry's state: starts and removes workers, starts the server, and prints what has changed."""
        if not self._has_shards(state):
            return
        for number in state.workers:
            if number not in self._numbers:
                self._start_worker(number)
        removed = self._numbers - set(state.workers)
        if removed:
            self._actors.remove_workers(sorted(removed), state.placed, _LEAVING)
            self._numbers -= removed
            self._display.say(f"taken: {_names(removed)}")
        if state.request is not None and self._server is None:
            self._run_dir = Path(state.request.run_dir)
            self._created = CreatedFiles(self._run_dir)
            resumes = self._command.resumes
            task = ServerTask(state.request, len(self._resources), self._options.max_restarts, resumes)
            self._display.progress = Progress(self._run_dir, len(self._resources))
            self._server = self._actors.start_server(task, state.node)
        if state.place is not None and not self._invited:
            self._invited, place = True, state.place
            token_file = self._run_dir / ".token"
            self._display.say(invitation(f"{place.host}:{place.port}", token_file, self._command.given))
        waiting = self._numbers - state.placed
        if waiting and time.monotonic() > self._places_at:
            self._places_at = float("inf")
            wanted = self._wanted(min(waiting))
            self._display.say(f"{_names(waiting)}: no node of the Ray cluster has room yet, as for {wanted}")

    def _has_shards(self, state: State) -> bool:
        """Whether every shard on another node has a place, which the command of the workers needs.

        Raises:
            RunFailedError: a shard has another place than the one that the workers know.
        """
        others = self._options.shards - 1
        if others and not self._actors.shards and not self._shards:
            logs, tls = self._command.run_dir.resolve() / "logs", self._command.tls
            for number in range(1, 1 + others):
                certificates = None if tls is None else Path(tls).resolve()
                log = logs / f"shard-{number}.log"
                self._actors.start_shard(ShardTask(number, self._options.max_restarts, certificates, log))
        if len(state.shards) < others:
            return False
        self._shards = self._shards or dict(state.shards)
        moved = [number for number, place in self._shards.items() if state.shards[number] != place]
        if moved:
            raise RunFailedError(
                f"the node of shard {moved[0]} is lost; give the same command again: the run goes on from its last "
                "snapshot, with the shard on another node"
            )
        return True

    def _wanted(self, number: int) -> Resources:
        return self._resources[min(number, len(self._resources) - 1)]

    def _start_worker(self, number: int) -> None:
        command, announced = self._command, len(self._resources)
        wanted = self._wanted(number)
        task = WorkerTask(
            number,
            announced,
            joins=number >= announced,
            line=self._line(),
            cwd=os.getcwd(),
            directory=self._directory,
            logs=command.run_dir.resolve() / "logs",
            resources=wanted,
            restarts=self._options.max_restarts,
            plugins=os.environ.get(PLUGINS),
        )
        self._actors.start_worker(task, wanted)
        self._numbers.add(number)
        if task.joins:
            self._places_at = time.monotonic() + _PLACING
            self._display.say(f"added: worker {number}")

    def _line(self) -> list[str]:
        line = self._command.line(None)
        hosts = [f"{place.host}:{place.port}" for _, place in sorted(self._shards.items())]
        return [*line, "--server-shards", ",".join([server_shards(line), *hosts])] if hosts else line

    def _after_shard(self, run: ray.ObjectRef) -> None:
        self._actors.shards.remove(run)
        if (how := ended(run)).code != 0:
            raise RunFailedError(f"{how.said} (logs: {self._run_dir / 'logs'})")

    def _after_worker(self, number: int, how: Ended) -> None:
        if how.code == 0:
            self._saved = self._saved or number == 0
            return
        error = f"worker {number} {manner(how.code)}: {how.said or 'no output'}"
        if number >= len(self._resources):
            self._actors.kill_worker(number)  # its place is free for another
            self._display.say(f"{error}; it was added, and the run goes on without it")
            return
        log = self._run_dir / "logs" / f"worker-{number}.log"
        if log.is_relative_to(self._directory):  # it is removed with the script's first directory
            for line in traceback(log):
                self._display.say(line)
            raise RunFailedError(error, how.code)
        self._display.progress.poll()
        end = partial(self._actors.end, _LEAVING)
        raise failure(error, how.code, log, self._display.progress.begun, end, self._created)

    def _after_workers(self) -> None:
        """Decides by the server's end, after all workers have ended, whether the run is finished."""
        if self._server is None:
            raise RunFailedError(f"{self._command.name}: the script ended without joining a run")
        if not ray.wait([self._server], timeout=_FINISHING)[0]:
            raise RunFailedError(f"the workers ended before the run was finished; logs: {self._run_dir / 'logs'}")
        self._after_server(ended(self._server))

    def _after_server(self, how: Ended) -> None:
        """Waits for worker 0 after the server has ended; in a finished run, the workers have left it before.

        Worker 0 of a script may go on as long as it likes, to evaluate the model for example.
        """
        self._display.refresh()
        if how.code != 0:
            said = f": {how.said}" if how.said else f"; log: {self._run_dir / 'logs' / 'server.log'}"
            raise RunFailedError(f"the server {manner(how.code)}{said}")
        first = [run for run, number in self._actors.runs.items() if number == 0]
        if first and ray.wait(first, timeout=_FINISHING if self._command.rendezvous is None else None)[0]:
            self._after_worker(self._actors.runs.pop(first[0]), ended(first[0]))


def _names(workers: Sequence[int] | set[int]) -> str:
    return ", ".join(f"worker {number}" for number in sorted(workers))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
