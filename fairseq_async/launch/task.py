"""``fairseq-async worker``: turns a task that a scheduler has started into a worker of the job's run."""

import glob
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from fairseq_async.environment import HOST, MEETING, WORKER, WORKERS
from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.command.programs import executing, find_program, is_fairseq, numbers_of_ranks, of_ranks
from fairseq_async.options.addresses import LOOPBACK


@dataclass(frozen=True)
class Scheduler:
    """The environment variables by which a scheduler, a program that starts tasks, tells each task its rank.

    Attributes:
        name: name of the program.
        rank: variable with the rank of this task among all, from 0.
        size: variables with the number of tasks; the first that is set counts.
        local_rank: variable with the rank among the tasks of this machine.
        local_size: variables with the number of tasks of this machine; a value unlike ``size`` means several machines.
        job: variables that name the job, the same after it is started again; without any, all jobs have one name.
        machine: variable with the name at which other machines reach this one; empty if the program sets none.
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
        """The variables from which another library would take the task for a rank of one group."""
        return (self.rank, *self.size, self.local_rank, *self.local_size)


_TASKS_OF_JOB = "SLURM_NTASKS"  # srun sets the number of a step's tasks, too; sbatch's script itself has this one alone
# The order matters: srun may have started torchrun or mpirun, and its variables then describe the launcher's process.
# In a heterogeneous step, as of srun --het-group=0,1, Slurm counts ranks and tasks over all of its groups.
SCHEDULERS = (
    Scheduler(
        "torchrun",
        "RANK",
        ("WORLD_SIZE",),
        "LOCAL_RANK",
        ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"),  # deepspeed's; torchrun's
        ("TORCHELASTIC_RUN_ID",),  # not MASTER_PORT, which changes at each restart
        "MASTER_ADDR",  # the machine of rank 0, which alone needs to know its own name
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
        ("SLURM_STEP_NUM_TASKS", _TASKS_OF_JOB),
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
        job: name of the job, which the file by which its workers meet contains.
        host: name at which the job's other machines reach this one; the loopback address where there are none.
    """

    scheduler: Scheduler
    rank: int
    size: int
    local_rank: int
    job: str
    host: str

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> "Task":
        """Reads the task from the environment of this process.

        Raises:
            ConfigurationError: no scheduler has started this process, or the scheduler's variables are not ranks.
        """
        for scheduler in SCHEDULERS:
            names = (scheduler.rank, _first(environment, scheduler.size), scheduler.local_rank)
            if scheduler.rank in environment and all(name in environment for name in names):
                return cls._of(scheduler, *names, environment)
        known = ", ".join(each.name for each in reversed(SCHEDULERS))
        raise ConfigurationError(
            f"worker: this process is no task of a job; start it with {known}, as in: srun -n 4 fairseq-async worker "
            "-- COMMAND; on one machine use fairseq-async launch"
        )

    @classmethod
    def _of(cls, scheduler: Scheduler, rank: str, size: str, local: str, environment: Mapping[str, str]) -> "Task":
        values = [environment[name] for name in (rank, size, local)]
        if not all(value.isdecimal() for value in values) or int(values[0]) >= int(values[1]):
            raise ConfigurationError(
                f"{rank}={values[0]}, {size}={values[1]}, {local}={values[2]}: no rank of {scheduler.name}"
            )
        if size == _TASKS_OF_JOB and int(values[1]) > 1:
            raise ConfigurationError(
                f"worker: srun is missing: this is the script of a job of {values[1]} tasks ({size}), not one of them; "
                "start all with: srun fairseq-async worker -- COMMAND"
            )
        alone = environment.get(_first(environment, scheduler.local_size)) == values[1]
        job = " ".join([scheduler.name, *(environment[name] for name in scheduler.job if name in environment)])
        host = LOOPBACK if alone else _host(environment.get(scheduler.machine, ""))
        return cls(scheduler, int(values[0]), int(values[1]), int(values[2]), job, host)

    def environment(self, given: Mapping[str, str], ranks: int = 1) -> dict[str, str]:
        """Returns the worker's environment, without the variables that would make a library see one group of ranks."""
        kept = {name: value for name, value in given.items() if name not in self.scheduler.own}
        devices = given["CUDA_VISIBLE_DEVICES"].split(",") if "CUDA_VISIBLE_DEVICES" in given else _devices()
        if len(devices) > ranks:
            first = self.local_rank * ranks
            kept["CUDA_VISIBLE_DEVICES"] = ",".join(devices[n % len(devices)] for n in range(first, first + ranks))
        variables = {WORKER: str(self.rank), WORKERS: str(self.size), MEETING: self.job, HOST: self.host}
        return {"OMP_NUM_THREADS": "1"} | kept | variables | {"OMP_WAIT_POLICY": "PASSIVE"}


def become_worker(arguments: list[str], given: str = "1") -> NoReturn:
    """Replaces this process by the worker's command; worker 0 will start the server, and write its address to a file
    in the run's directory for the others.

    Args:
        given: numbers of ranks of the workers; this task starts all of its own.

    Raises:
        ConfigurationError: no scheduler has started this process, or the command cannot be run.
    """
    task = Task.find(os.environ)
    ranks = numbers_of_ranks(given, task.size)
    line, world = of_ranks(_line(arguments, task.size, ranks), task.rank, ranks)
    with executing(line[0]):
        os.execve(line[0], line, task.environment(os.environ, ranks[task.rank]) | world)


def _line(arguments: list[str], workers: int, ranks: list[int]) -> list[str]:
    if not is_fairseq(arguments):
        return [find_program(arguments[0]), *arguments[1:]]
    command = WorkerCommand(arguments, workers, starts_server=True, ranks=ranks)
    if command.synchronous:
        raise ConfigurationError(
            "worker: the ranks of a synchronous method find each other by themselves; leave fairseq-async worker out"
        )
    command.check_inputs()
    return command.line(None)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in environment), names[-1])


def _devices() -> list[str]:
    """Returns the GPUs of this machine, without torch, whose import takes seconds."""
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def _host(given: str) -> str:
    """Returns the name at which other machines can look this one up: ``given`` if it resolves, or else the host name.

    A scheduler's names need not be the network's.
    """
    try:
        socket.getaddrinfo(given, None)
    except OSError:
        return socket.gethostname()
    return given or socket.gethostname()
