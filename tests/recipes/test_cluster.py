"""The scripts for clusters: what can be checked of them without one."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairseq_async.launch.command import WorkerCommand
from fairseq_async.launch.task import Task
from tests.helpers.commands import ROOT

CLUSTER = ROOT / "recipes" / "cluster"


def worker_commands(path: Path) -> list[list[str]]:
    """What comes behind ``fairseq-async worker --``, or ``fairseq-async ray ... --``."""
    text = path.read_text().replace("\\\n", " ")
    return [
        shlex.split(found)
        for found in re.findall(r"^[^#\n]*fairseq-async (?:worker|ray .*?) -- +(.*)$", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_one_of_the_shells_with_a_command_that_we_take(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], timeout=20).returncode == 0
    (command,) = worker_commands(path)
    if command[0] == "fairseq-train":
        assert not WorkerCommand(command, 5, starts_server=True).synchronous
    else:
        assert command == ["python", "$@"]


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
