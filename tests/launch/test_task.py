"""Which worker a task of a job is, by the variables of its scheduler."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_async.environment import HOST, MEETING, WORKER, WORKERS
from fairseq_async.errors import ConfigurationError
from fairseq_async.launch import output
from fairseq_async.launch.task import SCHEDULERS, Task, become_worker
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.slurm import SLURM

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29400",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_a_task_of_srun_counts_in_its_step() -> None:
    task = Task.find(SLURM)
    assert (task.rank, task.size, task.local_rank) == (3, 5, 1)
    assert task.job == "srun 77" and task.host == "localhost"


def test_a_heterogeneous_step_is_one_job() -> None:
    """Slurm counts over all groups, and gives every task the number of the first group's job."""
    groups = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "77", "SLURM_JOB_ID_HET_GROUP_1": "78"}
    first = SLURM | groups | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    tasks = [Task.find(first), Task.find(SLURM | groups)]
    assert [(task.rank, task.size, task.job) for task in tasks] == [(0, 5, "srun 77"), (3, 5, "srun 77")]
    assert {task.host for task in tasks} == {"localhost"}


def test_tasks_on_one_machine_share_its_memory() -> None:
    assert Task.find(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5"}).host == "127.0.0.1"
    assert Task.find(HYDRA).host == "127.0.0.1"
    assert Task.find(MPI).host == socket.gethostname()


def test_a_name_that_nobody_can_look_up_is_not_told() -> None:
    assert Task.find(SLURM | {"SLURMD_NODENAME": "no-such-node.invalid"}).host == socket.gethostname()


def test_torchrun_and_mpirun_within_srun_say_more_than_srun() -> None:
    assert Task.find(SLURM | TORCHRUN).job == "torchrun"
    assert Task.find(TORCHRUN | {"TORCHELASTIC_RUN_ID": "mine"}).job == "torchrun mine"
    assert Task.find(SLURM | MPI).size == 4
    assert Task.find(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "5"}).job == "srun 77", "srun with --mpi=pmi2"


def test_no_library_in_a_worker_takes_it_for_a_rank_of_one_group() -> None:
    variables = Task.find(TORCHRUN).environment(TORCHRUN | {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "4,6,8"})
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(variables)
    assert variables["HOME"] == "/h" and variables["CUDA_VISIBLE_DEVICES"] == "6"
    assert {WORKER: "3", WORKERS: "4", HOST: "localhost"}.items() <= variables.items() and MEETING in variables
    assert not any(scheduler.rank in variables for scheduler in SCHEDULERS)


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "ACTIVE"}])
def test_a_task_has_as_many_threads_as_its_user_gives_and_one_otherwise(given: dict[str, str]) -> None:
    """Threads that wait leave their core to others."""
    variables = Task.find(TORCHRUN).environment(TORCHRUN | given)
    assert variables["OMP_NUM_THREADS"] == given.get("OMP_NUM_THREADS", "1")
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(("ranks", "devices"), [(1, "4,6,8"), (2, "4,6,8,9"), (3, "4,6,8,9,10,11")])
def test_the_tasks_of_a_machine_divide_its_gpus(ranks: int, devices: str) -> None:
    given = devices.split(",")
    own = [
        Task.find(TORCHRUN | {"LOCAL_RANK": str(local)}).environment({"CUDA_VISIBLE_DEVICES": devices}, ranks)
        for local in range(len(given) // ranks)
    ]
    assert ",".join(each["CUDA_VISIBLE_DEVICES"] for each in own) == devices


@pytest.mark.parametrize("change", [{"SLURM_PROCID": "5"}, {"SLURM_PROCID": "x"}, {"SLURM_STEP_NUM_TASKS": ""}])
def test_variables_that_are_no_rank_are_named(change: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="SLURM_PROCID=.*, SLURM_STEP_NUM_TASKS=.*: no rank of srun"):
        Task.find(SLURM | change)


def test_the_script_of_a_job_is_no_task_unless_it_has_one_alone() -> None:
    """sbatch gives its script a rank, too; it would wait for the others for ever."""
    script = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    with pytest.raises(ConfigurationError, match=r"worker: srun is missing: .* 4 tasks \(SLURM_NTASKS\)"):
        Task.find(script)
    assert Task.find(script | {"SLURM_NTASKS": "1"}).size == 1
    assert Task.find(script | TORCHRUN).size == 4


def test_a_process_without_a_scheduler_is_told_how_to_start_it() -> None:
    with pytest.raises(ConfigurationError, match="start it with srun, mpiexec, mpirun, torchrun, as in: srun -n 4"):
        Task.find({})


def test_the_worker_is_the_command_with_what_fairseq_needs(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    job = ["fairseq-train", str(data), "--optimizer", "hybrid_async", "--server", "10.0.0.1:29400", "--arch", "t"]
    become_worker(job)
    ((program, line, variables),) = became
    assert line[1 : len(job)] == job[1:] and line[len(job) :][0::2] == ["--user-dir", "--distributed-world-size"]
    assert os.access(program, os.X_OK) and variables[WORKER] == "3"
    with pytest.raises(ConfigurationError, match="leave fairseq-async worker out"):
        become_worker(["fairseq-train", str(data), "--optimizer", "adasum"])


def test_srun_without_the_command_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", WORKER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(ConfigurationError, match="srun fairseq-async worker -- COMMAND"):
        WorkerContext.find()


def test_what_a_log_takes_in_parts_is_in_it_once() -> None:
    taken = bytearray()

    def write(data: bytes) -> int:
        taken.extend(data[:3])
        return len(data[:3])

    assert output._append(SimpleNamespace(write=write), b"12345678") == 8 and taken == b"12345678"  # type: ignore[arg-type]
