"""The scripts for clusters: what can be checked of them without one."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.task import Task
from tests.helpers.commands import ROOT

CLUSTER = ROOT / "recipes" / "cluster"
LAUNCHERS = ("srun", "torchrun", "deepspeed", "fairseq-async")
_SAYS = f"#!{sys.executable} -S\nimport json, sys\nprint(json.dumps(sys.argv))\n"


def launched(path: Path, programs: Path) -> list[str]:
    """The line with which a script starts its launcher, if the job has these arguments: DATA RUN_DIR."""
    for name in LAUNCHERS:
        (programs / name).write_text(_SAYS)
        (programs / name).chmod(0o700)
    (programs / "python").symlink_to(sys.executable)
    there = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    arguments = ["DATA", "RUN_DIR"] if path.name != "torchrun.sh" else ["node1", "DATA", "RUN_DIR"]
    bash = shutil.which("bash")
    said = subprocess.run(
        [str(bash), path, *arguments], env=there, capture_output=True, text=True, timeout=20, check=True
    )
    line: list[str] = json.loads(said.stdout)
    return line


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_starts_workers_with_a_command_that_we_take(path: Path, tmp_path: Path) -> None:
    groups = [list(part) for colon, part in groupby(launched(path, tmp_path), ":".__eq__) if not colon]
    commands = [group[group.index("--") + 1 :] for group in groups]
    assert commands == commands[:1] * (2 if "heterogeneous" in path.name else 1)
    if commands[0][0] == "fairseq-train":
        assert commands[0][1:4] == ["DATA", "--save-dir", "RUN_DIR"]
        assert not WorkerCommand(commands[0], 5, starts_server=True).synchronous
    else:
        assert commands[0] == [str(tmp_path / "python"), "DATA", "RUN_DIR"]


def test_deepspeed_is_given_programs_that_the_shell_of_another_machine_finds(tmp_path: Path) -> None:
    """It starts the workers by ssh, whose shell has not the PATH of the environment, and passes none on."""
    line = launched(CLUSTER / "deepspeed.sh", tmp_path)
    assert line[line.index("--no_local_rank") + 1] == str(tmp_path / "fairseq-async")


def test_the_tasks_of_each_group_of_nodes_get_the_cores_that_were_asked_for_them(tmp_path: Path) -> None:
    """srun does not take them from the job: all threads of a task would be on one core."""
    path = CLUSTER / "slurm_heterogeneous.sh"
    asked = re.findall(r"^#SBATCH .*(--cpus-per-task=\d+)", path.read_text(), re.MULTILINE)
    line = launched(path, tmp_path)
    assert [word for word in line if word.startswith("--cpus-per-task")] == asked and len(asked) == 2
    assert [word for word in line if word.startswith("--het-group")] == ["--het-group=0", "--het-group=1"]


def test_the_jobset_starts_tasks_that_we_find_with_the_pod_that_they_name() -> None:
    """Kubernetes names a pod JOBSET-JOB-0-INDEX.JOBSET within the JobSet."""
    jobset: dict[str, Any] = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    indexed = job["template"]["spec"]
    (container,) = indexed["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "3") for each in container["env"]}
    task = Task.find(variables)
    assert (task.rank, task.size) == (3, indexed["completions"]) and indexed["completionMode"] == "Indexed"
    assert container["command"] == ["fairseq-async", "worker", "--"]
    assert not WorkerCommand(container["args"], task.size, starts_server=True).synchronous
    name = jobset["metadata"]["name"]
    assert f"--server={name}-{job['name']}-0-0.{name}:29400" in container["args"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/secrets/token", "/secrets/tls"} <= mounted


def test_a_pod_of_the_jobset_has_more_shared_memory_than_the_64_mebibytes_of_a_container() -> None:
    (job,) = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    in_memory = [volume["name"] for volume in pod["volumes"] if volume.get("emptyDir") == {"medium": "Memory"}]
    assert {"name": in_memory[0], "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
