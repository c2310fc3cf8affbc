"""A Slurm of two nodes that are both this machine, from Debian's packages, for the length of a test."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairseq_async.options.addresses import free_port
from tests.helpers.commands import Processes
from tests.helpers.waiting import wait_until

SLURM = {  # the variables of a task, as srun sets them
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "9",  # of the job, whose steps may have fewer
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURMD_NODENAME": "localhost",
}
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
_SYSTEM = "/usr/sbin"  # where Debian has them, which a user's PATH may lack
_NODES = ("n0", "n1")


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [name for name in PROGRAMS if _find(name) is None]
    if absent:
        return f"{', '.join(absent)} are not installed"
    return "" if os.geteuid() == 0 else "only root can start it"


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}{os.pathsep}{_SYSTEM}")


@contextmanager
def running(directory: Path, processes: Processes) -> Iterator[dict[str, str]]:
    """Starts it; gives the variables with which its commands find it."""
    key, config = directory / "munge.key", directory / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    config.write_text(_config(directory))
    variables = {"SLURM_CONF": str(config)}
    munge = ["--key-file", key, f"--socket={directory}/munge.socket", f"--pid-file={directory}/munge.pid"]
    files = [f"--log-file={directory}/munge.log", f"--seed-file={directory}/munge.seed"]
    processes.start([_find("munged"), "--force", "--foreground", *munge, *files])
    wait_until((directory / "munge.socket").exists)
    processes.start([_find("slurmctld"), "-D", "-f", config])
    for node in _NODES:
        (directory / node).mkdir()
        processes.start([_find("slurmd"), "-D", "-N", node, "-f", config])
    wait_until(lambda: _idle(variables), 60)
    yield variables
    subprocess.run(["scancel", "--full", "--user", "root"], env=os.environ | variables, timeout=30)


def _idle(variables: dict[str, str]) -> bool:
    asked = ["sinfo", "--noheader", "--format=%D %T"]
    said = subprocess.run(asked, env=os.environ | variables, capture_output=True, text=True, timeout=30)
    return said.stdout.split() == ["2", "idle"]


def _config(directory: Path) -> str:
    host = socket.gethostname()
    control, *ports = (free_port(), free_port(), free_port())
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000"
        for node, port in zip(_NODES, ports, strict=True)
    )
    return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
