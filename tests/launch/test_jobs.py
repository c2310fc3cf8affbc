"""Jobs of ``fairseq-async worker``: real processes, which get the variables of a scheduler by hand."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fairseq_async.environment import SLOWDOWN
from fairseq_async.launch.certificates import make
from fairseq_async.options.addresses import free_port
from fairseq_async.reporting.audit import audit
from scripts.faults.hosts import Host
from tests.helpers import slurm as slurm_daemons
from tests.helpers.commands import DEEPSPEED, DEEPSPEED_JOB, HELPERS, MODEL, ROOT, Processes, command
from tests.helpers.documents import script_of_the_readme
from tests.helpers.run_files import events, snapshot_versions
from tests.helpers.waiting import wait_until

QUIET = {"PYTHONPATH": f"{HELPERS / 'without_fairseq'}:{ROOT}"}
WORKER = [command("fairseq-async"), "worker", "--"]


def slurm(rank: int) -> dict[str, str]:
    """What srun tells one of two tasks on two nodes."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURMD_NODENAME": socket.gethostname(),
    }


def script(folder: Path, slowly: bool = False) -> list[object]:
    """The example of the README, in this folder."""
    text = script_of_the_readme().replace('"model.pt"', repr(str(folder / "model.pt")))
    text = text.replace("total_steps=200", f"total_steps=200, run_dir={str(folder / 'run')!r}")
    assert "run_dir=" in text
    if slowly:
        step = "        optimizer.step()\n"
        assert step in text
        text = "import time\n" + text.replace(step, f"{step}        time.sleep(0.02)\n")
    (folder / "train.py").write_text(text)
    return [*WORKER, sys.executable, folder / "train.py"]


def outputs(tasks: list["subprocess.Popen[str]"], seconds: float = 120) -> str:
    said = [task.communicate(timeout=seconds)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * len(tasks), "\n".join(said)
    return "".join(said)


def check_run(folder: Path, workers: int, steps: int) -> None:
    applied = [event for event in events(folder / "run") if event["status"] == "applied"]
    assert {event["worker"] for event in applied} == set(range(workers))
    assert sum(event["local_steps"] for event in applied) == steps
    assert not (folder / "run" / ".server.json").exists()


def test_the_tasks_of_srun_find_each_other_also_when_the_first_is_killed_and_started_again(
    processes: Processes, tmp_path: Path
) -> None:
    """The server ends with its task, and writes a last snapshot; the other task waits for the next server.

    It listens at every address, since there are several nodes, and says so.
    """
    line = script(tmp_path, slowly=True)
    second, first = (processes.start(line, **QUIET, **slurm(rank)) for rank in (1, 0))
    told = tmp_path / "run" / ".server.json"
    wait_until(lambda: (tmp_path / "run" / "events.jsonl").exists() and len(events(tmp_path / "run")) > 4, 90)
    assert told.stat().st_mode & 0o777 == 0o600
    assert json.loads(told.read_text())["address"].startswith(f"{socket.gethostname()}:")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    first = processes.start(line, **QUIET, **slurm(0), SLURM_RESTART_COUNT="1")
    said = outputs([first, second])
    assert "the run goes on from version-" in said, said
    assert "nothing on its way there is encrypted; give tls= DIR" in said and "an SSH tunnel" in said
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.testing.assert_close(model["weight"], torch.ones(1, 8), atol=0.1, rtol=0)
    check_run(tmp_path, workers=2, steps=400)
    audit(tmp_path / "run")
    sources = [json.loads(line)["source"] for line in (tmp_path / "run" / "rollbacks.jsonl").open()]
    assert [source.split("-")[0] for source in sources] == ["snapshot version"]


def server_of(task: "subprocess.Popen[str]") -> int:
    """The process of the server that this task has started."""
    commands = {int(path.name): path for path in Path("/proc").iterdir() if path.name.isdecimal()}
    for process, path in commands.items():
        with suppress(OSError):
            of_task = int((path / "stat").read_text().rpartition(")")[2].split()[1]) == task.pid
            if of_task and os.getsid(process) == process:
                return process
    raise AssertionError("it has started none")


def test_a_job_that_slurm_stops_keeps_all_though_what_a_task_has_left_is_killed(
    processes: Processes, tmp_path: Path
) -> None:
    """SIGTERM goes to all of a task's processes, as a data loader's. The server ignores it, and Slurm kills it once the
    task is gone."""
    line = script(tmp_path, slowly=True)
    train = tmp_path / "train.py"
    loaded = "import torch\nbatches = iter(torch.utils.data.DataLoader(range(10**9), num_workers=1))\n"
    step = "        optimizer.step()\n"
    train.write_text(loaded + train.read_text().replace(step, f"        next(batches)\n{step}"))
    alone = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    task = processes.start(line, **QUIET, **(slurm(0) | alone))
    wait_until(lambda: (tmp_path / "run" / "events.jsonl").exists() and len(events(tmp_path / "run")) > 1, 90)
    server = server_of(task)
    os.killpg(task.pid, signal.SIGTERM)
    assert task.wait(30) == -signal.SIGTERM, task.communicate()[0]
    with suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)
    version = events(tmp_path / "run")[-1]["version_after"]
    assert snapshot_versions(tmp_path / "run")[-1] == version > 0


def test_a_job_without_a_number_goes_on_in_its_directory_and_begins_anew_without_snapshots(
    processes: Processes, tmp_path: Path
) -> None:
    mpiexec = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    line, run = script(tmp_path, slowly=True), tmp_path / "run"

    def begin_and_stop() -> str:
        task = processes.start(line, **QUIET, **mpiexec)
        path, before = run / "events.jsonl", version()
        wait_until(lambda: path.exists() and version() > before, 90)
        task.terminate()
        return task.communicate(timeout=30)[0]

    def version() -> int:
        return events(run)[-1]["version_after"] if (run / "events.jsonl").exists() and events(run) else 0

    assert "the run goes on" not in begin_and_stop()
    said = begin_and_stop()
    assert "the run goes on from version-" in said and said.splitlines()[-1].endswith("give another directory"), said
    shutil.rmtree(run / "snapshots")
    assert "the run goes on" not in outputs([processes.start(line, **QUIET, **mpiexec)])
    check_run(tmp_path, workers=1, steps=200)


def test_fairseq_under_torchrun_on_two_machines_with_certificates(
    host: Host, processes: Processes, data: Path, tmp_path: Path
) -> None:
    """Nobody tells it an address or a token; worker 1 has neither the server's memory nor its loopback address.

    Both are slow, so that neither has taken all steps before the other has come, whenever its imports are done.
    """
    make(tmp_path / "server", [host.near])
    (tmp_path / "worker").mkdir(mode=0o700)
    for name in ("authority.pem", "worker.pem", "worker.key"):
        shutil.copy(tmp_path / "server" / name, tmp_path / "worker" / name)
    method = ["--optimizer", "local_sgd", "--local-steps", 5, "--max-update", 40, "--save-dir", tmp_path / "run"]
    nodes = []
    for rank, prefix, directory in ((0, (), "server"), (1, host.prefix, "worker")):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, SLOWDOWN: "20,20"}
        store = {"MASTER_ADDR": host.near, "MASTER_PORT": "1"}
        line = [*prefix, *WORKER, "fairseq-train", data, *MODEL, *method, "--tls", tmp_path / directory]
        nodes.append(processes.start(line, **{name: str(value) for name, value in (variables | store).items()}))
    assert "encrypted" not in outputs(nodes, 200)
    check_run(tmp_path, workers=2, steps=80)


def test_deepspeeds_own_launcher_on_one_machine(processes: Processes, tmp_path: Path) -> None:
    """The server listens on the loopback address alone."""
    config = ROOT / "deepspeed_config" / "delayed_nesterov.json"
    change = {"async_training": {"local_steps": 5, "total_steps": 20, "run_dir": str(tmp_path / "run")}}
    job = [DEEPSPEED_JOB, "--out", tmp_path, "--deepspeed", "--deepspeed_config", config]
    launcher = [command("deepspeed"), "--num_accelerators", 2, "--master_port", free_port(), "--no_python"]
    line = [*launcher, "--no_local_rank", *WORKER, sys.executable, *job, "--change", json.dumps(change)]
    said = outputs([processes.start(line, **DEEPSPEED)], 200)
    assert "server at 127.0.0.1:" in said and "can reach" not in said
    check_run(tmp_path, workers=2, steps=40)


@pytest.mark.skipif(slurm_daemons.missing() != "", reason=slurm_daemons.missing())
def test_slurm_itself_on_two_nodes_with_a_job_of_two_kinds_and_one_that_is_requeued(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "slurm").mkdir()
    with slurm_daemons.running(tmp_path / "slurm", processes) as variables:
        found = "import os; from fairseq_async.launch.task import Task; print(Task.find(os.environ))"
        code, said = processes.run(["srun", "-n1", ":", "-n2", sys.executable, "-c", found], **QUIET, **variables)
        ranks = re.findall(r"rank=(\d), size=3, local_rank=\d, job='srun (\d+)'", said)
        assert code == 0 and sorted(rank for rank, _ in ranks) == ["0", "1", "2"], said
        assert len({job for _, job in ranks}) == 1
        line = shlex.join(["srun", "--nodes=2", "--ntasks=3", *map(str, script(tmp_path, slowly=True))])
        (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{line}\n")
        log = tmp_path / "job.log"
        batch = ["sbatch", "--parsable", "--requeue", "--open-mode=append", "-N2", "-n3", "-o", log]
        code, said = processes.run([*batch, tmp_path / "job.sh"], **QUIET, **variables)
        path = tmp_path / "run" / "events.jsonl"
        wait_until(lambda: path.exists() and len(path.read_text().splitlines()) > 4, 90)
        assert processes.run(["scontrol", "requeue", said.strip()], **variables)[0] == 0
        state = ["squeue", "--noheader", "--states=all", "--format=%T", "--jobs", said.strip()]
        wait_until(lambda: processes.run(state, **variables)[1].strip() in ("COMPLETED", "FAILED"), 150)
    assert "the run goes on from version-" in log.read_text()
    assert "is gone: it ends at version" in (tmp_path / "run" / "logs" / "server.log").read_text()
    audit(tmp_path / "run")
    check_run(tmp_path, workers=3, steps=600)
