"""Starts the same command several times on this machine, each process with its own device or core."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol, TypeVar

import torch

from fairseq_async.errors import USER_ERROR, AsyncError
from fairseq_async.exchange.linux import environment
from fairseq_async.launch.command.programs import executing, of_ranks
from fairseq_async.launch.error_lines import last_words
from fairseq_async.launch.output import Output
from fairseq_async.records.created_files import CreatedFiles
from fairseq_async.worker.start.server_process import manner

_ENDING = 5.0  # seconds between SIGTERM and SIGKILL
_Device = TypeVar("_Device", int, str)


class Command(Protocol):
    """The command that every worker runs."""

    run_dir: Path
    on_cpu: bool
    synchronous: bool

    def line(self, address: str | None) -> list[str]:
        """Returns the whole command of a worker of the server at this address."""
        ...


@dataclass
class Worker:
    """One worker's process and its log.

    Attributes:
        process: the present process; this attribute is not there before :meth:`Processes.start`.
        restarts: how often the worker was started again.
        updates_at_start: number of the worker's updates in the log of events when its present process was started.
        last_words: last words of the process before the present one, if that ended with an error of its own.
        given_up: whether the run, which is finished, does without it.
    """

    id: int
    log: Path
    output: Output = field(default_factory=Output)
    process: subprocess.Popen[bytes] = field(init=False)
    restarts: int = 0
    updates_at_start: int = 0
    last_words: str = ""
    given_up: bool = False


class RunFailedError(AsyncError):
    """A worker or the server ended in a way that ends the run.

    Args:
        ended_with: exit code of the worker; that of a user's mistake becomes the command's.
    """

    def __init__(self, message: str, ended_with: int = 1) -> None:
        super().__init__(message)
        self.code = USER_ERROR if ended_with == USER_ERROR else 1


def failure(
    error: str, code: int, log: Path, begun: bool, end: Callable[[], object], created: CreatedFiles
) -> RunFailedError:
    """Returns the error of a run that a worker's end has ended; removes the files of a run that never began, and its
    logs too where the error says all that they have.

    Args:
        error: says how the worker has ended, with ``code``.
        begun: whether the run has had an update.
        end: ends all processes of the run.
    """
    says_all = not begun and code == USER_ERROR
    if not begun:
        end()
        created.remove(logs=says_all)
    return RunFailedError(error if says_all else f"{error} (log: {log})", code)


class Processes:
    """The worker processes of one command.

    Args:
        count: number of workers.
        ranks: number of ranks of each, which live and die together; each rank has a GPU or a core.
    """

    def __init__(self, command: Command, count: int, ranks: Sequence[int] = ()) -> None:
        self.command, self._ranks = command, ranks or [1] * count
        self.workers = [Worker(number, _log(command.run_dir, number)) for number in range(count)]

    def start(self, worker: Worker, address: str | None, variables: dict[str, str]) -> None:
        """Starts one worker, with these environment variables added to those of all workers; its output goes to its
        log.

        Raises:
            ConfigurationError: the command cannot be executed.
        """
        line, world = of_ranks(self.command.line(address), worker.id, self._ranks)
        with executing(line[0]):
            variables = os.environ | self._environment(worker) | variables | world
            worker.process = worker.output.of(line, worker.log, variables)
        if not self.on_gpu:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(worker.process.pid, set(self._own(worker, cores)))

    def move_logs(self, run_dir: Path, move: Callable[[Path, Path], object] = os.replace) -> None:
        """Moves the logs, which may still be written to, to the run's directory; replaces those of an earlier run.

        Args:
            move: moves one file. The default cannot move to another disk: the logs then stay where they are.
        """
        for worker in self.workers:
            target = _log(run_dir, worker.id)
            if target == worker.log or not worker.log.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                move(worker.log, target)
                worker.log = target
            except OSError:
                pass

    @property
    def on_gpu(self) -> bool:
        return torch.cuda.is_available() and not self.command.on_cpu

    @property
    def running(self) -> bool:
        return any(worker.process.poll() is None for worker in self.workers)

    @property
    def failed(self) -> list[Worker]:
        """The workers that have ended with an error, without those that were given up."""
        return [worker for worker in self.workers if not worker.given_up and worker.process.poll() not in (None, 0)]

    @property
    def saved(self) -> bool:
        """Whether worker 0 has ended in order: a finished model is then saved."""
        first = self.workers[0]
        return hasattr(first, "process") and first.process.poll() == 0

    def wait(self, seconds: float, ids: Sequence[int] | None = None) -> None:
        """Waits until these workers, or all of them, have ended, but not longer than this."""
        _wait([worker for worker in self.workers if ids is None or worker.id in ids], seconds)

    def last_words(self, worker: Worker) -> str:
        """Returns the last words of the worker's present process, which has ended."""
        worker.output.finish()
        return last_words(worker.log, worker.output.start)

    def describe_end(self, worker: Worker) -> str:
        """Returns a line that says how the worker ended, with the last words of its log, which say more than a code."""
        said = self.last_words(worker) or "no output"
        return f"worker {worker.id} {manner(worker.process.returncode)}: {said}"

    def end(self) -> None:
        """Asks all workers to end, and kills those that do not after five seconds, whatever is pressed meanwhile."""
        with _undisturbed():
            self._end()

    def _end(self) -> None:
        started = [worker for worker in self.workers if hasattr(worker, "process")]
        for worker in started:
            if worker.process.poll() is None:
                _signal(worker, signal.SIGTERM)
        _wait(started, _ENDING)
        for worker in started:
            _signal(worker, signal.SIGKILL)  # also to processes that it may have left in its group
            worker.process.wait()
            worker.output.finish()

    def kill_children(self, worker: Worker) -> None:
        """Kills what a worker that has ended has left: a data loader may go on for seconds, with a copy of everything
        that the worker had open."""
        _signal(worker, signal.SIGKILL)

    def _environment(self, worker: Worker) -> dict[str, str]:
        variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **environment()}
        if self.on_gpu and not self.command.synchronous:  # ranks see all GPUs, and take theirs by their numbers
            given = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = given.split(",") if given else [str(d) for d in range(torch.cuda.device_count())]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._own(worker, devices))
        return variables

    def _own(self, worker: Worker, devices: Sequence[_Device]) -> Sequence[_Device]:
        """Returns the cores or GPUs of a worker: one for each of its ranks."""
        first, ranks = sum(self._ranks[: worker.id]), self._ranks[worker.id]
        return list(dict.fromkeys(devices[number % len(devices)] for number in range(first, first + ranks)))


def _log(run_dir: Path, worker: int) -> Path:
    return run_dir / "logs" / f"worker-{worker}.log"


def _wait(workers: Sequence[Worker], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in workers):
        time.sleep(0.05)


def _signal(worker: Worker, number: signal.Signals) -> None:
    try:
        os.killpg(worker.process.pid, number)
    except ProcessLookupError:
        pass


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignores the signals of an impatient user: a Ctrl-C in here would leave workers that ignore SIGTERM."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ours = threading.current_thread() is threading.main_thread()  # no other thread can set them, or is interrupted
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers} if ours else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def interrupt_on_signals() -> None:
    """Makes SIGTERM end this process as Ctrl-C does, and so SIGHUP, which comes when the terminal is closed: workers in
    sessions of their own would go on. Where SIGHUP is ignored, as by nohup, it stays so."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
