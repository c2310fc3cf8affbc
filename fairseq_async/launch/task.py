"""``fairseq-async worker``: a task that a scheduler has started becomes a worker of the job's run."""

import glob
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from fairseq_async.addresses import LOOPBACK
from fairseq_async.environment import HOST, MEETING, WORKER, WORKERS
from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command import WorkerCommand
from fairseq_async.launch.programs import find_program, is_fairseq


@dataclass(frozen=True)
class Scheduler:
    """The variables of the environment in which a program that starts tasks tells each which it is.

    Attributes:
        name: of the program.
        rank: of this task among all, from 0.
        size: how many there are; of several names the first that is set.
        local_rank: among the tasks of this machine.
        local_size: how many this machine has; what is not a number equal to ``size`` means several machines.
        job: what names the job, which stays the same when it is started again; where nothing does, all are one.
        machine: where other machines reach this one, if the program says so.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: tuple[str, ...]
    job: tuple[str, ...]
    machine: str

    @property
    def own(self) -> tuple[str, ...]:
        """The variables by which another library in the task would take it for a rank of one group."""
        return (self.rank, *self.size, self.local_rank, *self.local_size)


# In this order: torchrun and mpirun may have been started by srun, whose variables are those of their own process then.
# In a heterogeneous step, as of srun --het-group=0,1, Slurm counts ranks and tasks over all of its groups.
SCHEDULERS = (
    Scheduler(
        "torchrun",
        "RANK",
        ("WORLD_SIZE",),
        "LOCAL_RANK",
        ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"),  # deepspeed's; torchrun's
        ("TORCHELASTIC_RUN_ID",),  # its MASTER_PORT is another after each restart
        "MASTER_ADDR",  # of the machine of rank 0, which alone needs it
    ),
    Scheduler(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE",),
        "",
    ),
    Scheduler("mpiexec", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), (), ""),
    Scheduler(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE",),
        ("SLURM_JOB_ID",),
        "SLURMD_NODENAME",
    ),
)


@dataclass(frozen=True)
class Task:
    """One task of a job.

    Attributes:
        job: names it; the file by which its workers meet is of this job.
        host: where the job's other machines reach this one; the loopback address where there are none.
    """

    scheduler: Scheduler
    rank: int
    size: int
    local_rank: int
    job: str
    host: str

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> "Task":
        """From the environment of this process.

        Raises:
            ConfigurationError: no scheduler has started it, or its variables are no ranks.
        """
        for scheduler in SCHEDULERS:
            names = (scheduler.rank, _first(environment, scheduler.size), scheduler.local_rank)
            if scheduler.rank in environment and all(name in environment for name in names):
                return cls._of(scheduler, *names, environment)
        known = ", ".join(each.name for each in reversed(SCHEDULERS))
        raise ConfigurationError(
            f"worker: no task of a job; start it with {known}, as in: srun -n 4 fairseq-async worker -- COMMAND; on "
            "one machine fairseq-async launch does without"
        )

    @classmethod
    def _of(cls, scheduler: Scheduler, rank: str, size: str, local: str, environment: Mapping[str, str]) -> "Task":
        values = [environment[name] for name in (rank, size, local)]
        if not all(value.isdecimal() for value in values) or int(values[0]) >= int(values[1]):
            raise ConfigurationError(
                f"{rank}={values[0]}, {size}={values[1]}, {local}={values[2]}: no rank of {scheduler.name}"
            )
        alone = environment.get(_first(environment, scheduler.local_size)) == values[1]
        job = " ".join([scheduler.name, *(environment[name] for name in scheduler.job if name in environment)])
        host = LOOPBACK if alone else _host(environment.get(scheduler.machine, ""))
        return cls(scheduler, int(values[0]), int(values[1]), int(values[2]), job, host)

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """The environment of the worker, in which no library finds the ranks of one group: each worker is alone."""
        kept = {name: value for name, value in given.items() if name not in self.scheduler.own}
        devices = given["CUDA_VISIBLE_DEVICES"].split(",") if "CUDA_VISIBLE_DEVICES" in given else _devices()
        if len(devices) > 1:
            kept["CUDA_VISIBLE_DEVICES"] = devices[self.local_rank % len(devices)]
        variables = {WORKER: str(self.rank), WORKERS: str(self.size), MEETING: self.job, HOST: self.host}
        return {"OMP_NUM_THREADS": "1"} | kept | variables | {"OMP_WAIT_POLICY": "PASSIVE"}


def become_worker(arguments: list[str]) -> NoReturn:
    """Becomes the worker's command; worker 0 will start the server, and tell the others in the run's directory.

    Raises:
        ConfigurationError: no scheduler has started this process, or the command is not one.
    """
    task = Task.find(os.environ)
    line = _line(arguments, task.size)
    os.execve(line[0], line, task.environment(os.environ))


def _line(arguments: list[str], workers: int) -> list[str]:
    if not is_fairseq(arguments):
        return [find_program(arguments[0]), *arguments[1:]]
    command = WorkerCommand(arguments, workers, starts_server=True)
    if command.synchronous:
        raise ConfigurationError(
            "worker: the ranks of a synchronous method find each other by themselves; leave fairseq-async worker out"
        )
    command.check_inputs()
    return command.line(None)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in environment), names[-1])


def _devices() -> list[str]:
    """The GPUs of this machine, without torch, whose import takes seconds."""
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def _host(told: str) -> str:
    """The name of this machine that others can look up: a scheduler's own names need not be the network's."""
    try:
        socket.getaddrinfo(told, None)
    except OSError:
        return socket.gethostname()
    return told or socket.gethostname()
