"""The actor of a worker: runs the unchanged command as a child process, and starts it again when it dies."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ray

from fairseq_async.environment import JOINS, MEETING, PLUGINS, RENDEZVOUS, SERVER, TOKEN, WORKER, WORKERS
from fairseq_async.errors import LOST_SERVER, USER_ERROR
from fairseq_async.exchange.linux import environment
from fairseq_async.launch.error_lines import last_words, same_mistake
from fairseq_async.launch.output import Output
from fairseq_async.launch.ray import exec_with_parent
from fairseq_async.launch.ray.registry import Ended, Orders, State
from fairseq_async.launch.ray.resources import Resources
from fairseq_async.launch.task import SCHEDULERS
from fairseq_async.worker.start.rendezvous import Rendezvous
from fairseq_async.worker.start.server_process import manner, say

_PAUSE = 0.3  # seconds between two looks at the child and the registry
_ENDING = 5.0  # seconds between SIGTERM and SIGKILL
_SILENT = 5.0  # seconds between two starts while the server still waits for this worker's process on a lost node
_STILL_THERE = "is here already"  # end of the server's refusal in that case


@dataclass(frozen=True)
class WorkerTask:
    """The worker that an actor runs.

    Attributes:
        number: number of the worker.
        workers: number of workers that were announced.
        joins: whether the worker was not announced, and joins a run that is going on.
        line: the command.
        cwd: working directory of the command, on every node.
        directory: the run's temporary directory, in which worker 0 asks for the server.
        logs: directory of the logs, until the run's directory is known.
        restarts: how often the command is started again.
        plugins: modules with the user's own rules.
    """

    number: int
    workers: int
    joins: bool
    line: list[str]
    cwd: str
    directory: Path
    logs: Path
    resources: Resources
    restarts: int
    plugins: str | None


class RayWorker:
    """One worker of a run, on the node where Ray has placed it. The work that its child process has not sent is lost
    when the actor dies.

    Args:
        run: name of the run's registry.
    """

    def __init__(self, run: str, task: WorkerTask) -> None:
        context = ray.get_runtime_context()
        self._registry, self._task = ray.get_actor(run), task  # by name: see RayServer
        self._host, self._node = ray.util.get_node_ip_address(), context.get_node_id()
        self._token: str = ray.get(self._registry.token.remote())
        self._restarts, self._said = task.restarts, ""
        self._address = ""  # the server's address that the child knows
        self._log, self._output = task.logs / f"worker-{task.number}.log", Output()
        self._rendezvous = Rendezvous(task.directory / f"worker-{task.number}")
        state: State = ray.get(self._registry.state.remote())
        self._succeeds = task.number in state.placed  # Ray has started the actor again

    def run(self) -> Ended:
        """Runs until the worker has ended for good. Runs in the main thread: the kernel ends the child together with
        the thread that has started it."""
        if not os.path.isdir(self._task.cwd):
            return Ended(USER_ERROR, f"there is no directory {self._task.cwd} on the node {self._host}")
        while (orders := self._check_in()).leaves or (self._task.joins and not orders.address):
            if orders.leaves:
                return Ended(0)
            time.sleep(_PAUSE)
        ended = self._run_once(orders)
        while ended is None or self._may_go_on(ended):
            ended = self._run_once(self._check_in())
        return ended

    def _may_go_on(self, ended: Ended) -> bool:
        if ended.said.endswith(_STILL_THERE):
            time.sleep(_SILENT)
            return True
        repeats = same_mistake(self._said, ended.said) and ended.code != LOST_SERVER
        if ended.code in (0, USER_ERROR) or repeats or self._restarts == 0:
            return False
        self._restarts, self._said = self._restarts - 1, ended.said
        how = f"{manner(ended.code)}: {ended.said}" if ended.said else manner(ended.code)
        say(f"worker {self._task.number} {how}; start {self._task.restarts - self._restarts} again")
        return True

    def _run_once(self, orders: Orders) -> Ended | None:
        """Runs the child once; returns how it has ended, or None if the server has moved and the child is to be started
        again."""
        self._address = orders.address
        self._use(orders)
        child = self._start()
        try:
            while child.poll() is None:
                time.sleep(_PAUSE)
                orders = self._check_in()
                if orders.leaves:
                    return Ended(0)
                if self._address and orders.address != self._address:
                    return None
                self._use(orders)
        finally:
            _end(child)
            self._output.finish()
        return Ended(child.returncode, last_words(self._log, self._output.start) if child.returncode > 0 else "")

    def _check_in(self) -> Orders:
        request = self._rendezvous.requested() if self._task.number == 0 else None
        asked = self._registry.check_in.remote(self._task.number, self._host, self._node, request)
        orders: Orders = ray.get(asked)
        return orders

    def _use(self, orders: Orders) -> None:
        """Tells the child the server's address, and moves the child's open log to the run's directory."""
        if orders.address and not self._address:
            self._rendezvous.answer(orders.address)
            self._address = orders.address
        target = Path(orders.run_dir) / "logs" / self._log.name
        if orders.run_dir and self._succeeds and not self._log.exists():
            self._log = target  # the actor before has moved it there
        if orders.run_dir and target != self._log and self._log.exists():
            with suppress(OSError):  # on another disk it stays where it is
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(self._log, target)
                self._log = target

    def _start(self) -> "subprocess.Popen[bytes]":
        shutil.rmtree(self._rendezvous.directory, ignore_errors=True)  # of the child before
        self._rendezvous.directory.mkdir(mode=0o700, parents=True)
        line = [sys.executable, exec_with_parent.__file__, str(os.getpid()), *self._task.line]
        return self._output.of(line, self._log, self._environment(), self._task.cwd)

    def _environment(self) -> dict[str, str]:
        """Returns the child's environment: the node's, without the variables by which a library would find the ranks
        of the job that has started Ray."""
        task, ranks = self._task, {name for scheduler in SCHEDULERS for name in scheduler.own}
        variables = {name: value for name, value in os.environ.items() if name not in ranks | {MEETING}}
        variables |= {TOKEN: self._token, WORKER: JOINS if task.joins else str(task.number), WORKERS: str(task.workers)}
        variables |= {"OMP_NUM_THREADS": str(task.resources.cpus), "OMP_WAIT_POLICY": "PASSIVE", **environment()}
        variables |= {} if task.resources.gpus else {"CUDA_VISIBLE_DEVICES": ""}
        variables |= {} if task.plugins is None else {PLUGINS: task.plugins}
        found = {SERVER: self._address} if self._address else {RENDEZVOUS: str(self._rendezvous.directory)}
        return variables | found


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ends the child, and any processes that it has left in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_ENDING)
