"""Starts, finds and ends the Ray actors of one run."""

import socket
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.ray.registry import Ended, Registry, State
from fairseq_async.launch.ray.resources import Resources
from fairseq_async.launch.ray.server import RayServer, ServerTask
from fairseq_async.launch.ray.shard import RayShard, ShardTask
from fairseq_async.launch.ray.worker import RayWorker, WorkerTask
from fairseq_async.options.validation import split_address

NAMESPACE = "fairseq-async"
_KNOCK = 10.0  # seconds for the cluster's head to accept a connection
_ANSWER = 180.0  # seconds for an answer of the registry, whose process may have to start on a busy node first

# When a driver dies, Ray would kill what its actors have started, and so a server that still writes its last snapshot.
_CHILD_ENDS_ITSELF = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}


def connect(address: str) -> None:
    """Connects this process to a Ray cluster.

    Raises:
        ConfigurationError: there is no cluster at this address.
    """
    try:
        if address != "auto":  # Ray itself would try for minutes
            socket.create_connection(split_address(address), timeout=_KNOCK).close()
        ray.init(address, namespace=NAMESPACE, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:  # ConnectionError is an OSError
        said = str(error).split(". ")[0]
        raise ConfigurationError(
            f"--address {address}: no Ray cluster there ({said}); start one with: ray start --head"
        ) from error


def find_registry(name: str) -> ActorHandle:
    """Returns the registry of a run by the run's name.

    Raises:
        ConfigurationError: no run of this name is going on in this cluster.
    """
    try:
        return ray.get_actor(name)
    except ValueError as error:
        raise ConfigurationError(f"--name {name}: no run of this name is going on in the Ray cluster") from error


class Actors:
    """The registry, server and workers of one run, as Ray actors that end with this process.

    Args:
        name: name of the run, and of its registry.
        token: the run's secret.
        workers: number of workers at the beginning.
        restarts: how often each actor may be started again.

    Attributes:
        runs: numbers of the workers that have not ended, by the Ray reference to their call of ``run``.
        shards: references to the ends of the shards on other nodes.

    Raises:
        ConfigurationError: another run has this name.
    """

    def __init__(self, name: str, token: str, workers: int, restarts: int) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._name, self._restarts = name, restarts
        try:
            self.registry = _actor(Registry, name, num_cpus=0, scheduling_strategy=here).remote(token, workers)
        except ValueError as error:
            raise ConfigurationError(f"--name {name}: another run has this name; give this one its own") from error
        self.runs: dict[ray.ObjectRef, int] = {}
        self.shards: list[ray.ObjectRef] = []
        self._workers: dict[int, ActorHandle] = {}
        self._server: ActorHandle | None = None

    def state(self) -> State:
        """Returns the registry's state.

        Raises:
            RayError: the registry is lost.
        """
        found: State = ray.get(self.registry.state.remote(), timeout=_ANSWER)
        return found

    def start_server(self, task: ServerTask, node: str) -> ray.ObjectRef:
        """Starts the server, on this node if possible: worker 0's, with which it shares memory and a disk. Returns a
        reference to the server's end.

        The actor asks Ray for no CPU, because the server computes on the cores that no worker uses at the time.
        """
        near = NodeAffinitySchedulingStrategy(node, soft=True)
        restarts = {"max_restarts": self._restarts, "max_task_retries": -1, "max_concurrency": 2}
        placing = {"num_cpus": 0, "scheduling_strategy": near, "runtime_env": _CHILD_ENDS_ITSELF}
        server = _actor(RayServer, f"{self._name}-server", **placing, **restarts)
        self._server = server.remote(self._name, task)
        return self._server.follow.remote()

    def start_shard(self, task: ShardTask) -> None:
        """Starts a shard of the server, on another node than the last one if there are several."""
        restarts = {"max_restarts": self._restarts, "max_task_retries": -1}
        placing = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        shard = _actor(RayShard, f"{self._name}-shard-{task.number}", **placing, **restarts)
        self.shards.append(shard.remote(self._name, task).run.remote())

    def start_worker(self, task: WorkerTask, wanted: Resources) -> None:
        """Starts a worker on a node with room for it; without room, also after a node is lost, the worker waits."""
        options = {"num_cpus": wanted.cpus, "num_gpus": wanted.gpus, "max_restarts": self._restarts}
        name = f"{self._name}-worker-{task.number}"
        worker = _actor(RayWorker, name, max_task_retries=-1, **options).remote(self._name, task)
        self._workers[task.number] = worker
        self.runs[worker.run.remote()] = task.number

    def remove_workers(self, numbers: Sequence[int], placed: set[int], seconds: float) -> None:
        """Waits this long for workers that were told to leave, except those without a node, then kills the actors of
        all that were told so."""
        leaving = [run for run, number in self.runs.items() if number in numbers]
        ending = [run for run in leaving if self.runs[run] in placed]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=seconds)
        for run in leaving:
            ray.kill(self._workers[self.runs.pop(run)])

    def kill_worker(self, number: int) -> None:
        """Kills the actor of a worker that has ended, and so gives back what it has asked Ray for."""
        ray.kill(self._workers[number])

    def end(self, seconds: float, saved: bool = False) -> None:
        """Ends all actors in order: the workers within this time, then the server, which writes its last snapshot,
        unless worker 0 has ``saved`` the model of a finished run."""
        if not ray.is_initialized():
            return  # all have ended already, and a further call to Ray would start a local cluster
        try:
            ray.get(self.registry.end.remote(), timeout=_ANSWER)
            self.remove_workers(list(self.runs.values()), self.state().placed, seconds)
            if self._server is not None:
                ray.get(self._server.end.remote(saved), timeout=4 * _ANSWER)
        except (RayError, GetTimeoutError):
            pass  # an actor that is lost has ended
        finally:
            ray.shutdown()


def _actor(kind: type, name: str, **options: object) -> ActorHandle:
    return ray.remote(kind).options(name=name, **options)


def ended(run: ray.ObjectRef) -> Ended:
    """Returns how a run has ended; in one line also for an actor that has failed, or that is lost, since Ray has
    restarted it too often."""
    try:
        found: Ended = ray.get(run)
    except RayTaskError as error:  # Ray's own text begins with the actor, and ends with a traceback
        return Ended(1, f"{type(error.cause).__name__}: {_first_line(error.cause)}")
    except RayError as error:
        return Ended(1, f"its actor is lost: {_first_line(error)}")
    return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
