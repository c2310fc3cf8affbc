"""What a rank that hangs or is paused costs a job under the ``deepspeed`` launcher."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from fairseq_async.environment import SLOWDOWN
from fairseq_async.options.addresses import free_port
from fairseq_async.reporting.audit import audit
from tests.helpers.commands import DEEPSPEED, DEEPSPEED_JOB, ROOT, Processes, command
from tests.helpers.launched import count, find
from tests.helpers.run_files import events
from tests.helpers.waiting import wait_until

SECTION = {"local_steps": 5, "total_steps": 800, "outer": "nesterov", "grace_period": None, "worker_timeout": 3}


@pytest.fixture
def start(processes: Processes, tmp_path: Path) -> Any:
    """``start(slowdown, **section)``: a job of two ranks; its run is in ``tmp_path / "run"``."""

    def run(slowdown: str = "1,1", **section: Any) -> Any:
        launcher = [command("deepspeed"), "--num_accelerators", 2, "--master_port", free_port()]
        loading = {"data_sampling": {"num_workers": 1, "pin_memory": True}}  # processes that have the rank's connection
        changes = {"gradient_clipping": 0.0, "data_efficiency": loading, "async_training": SECTION | section}
        base = ROOT / "deepspeed_config" / "delayed_nesterov.json"
        job = [
            DEEPSPEED_JOB,
            "--out",
            tmp_path,
            "--deepspeed",
            "--deepspeed_config",
            base,
            "--change",
            json.dumps(changes),
        ]
        return processes.start([*launcher, *job], **DEEPSPEED, **{SLOWDOWN: slowdown})

    return run


def rank(tmp_path: Path, number: int) -> int:
    (pid,) = find(tmp_path, rf"deepspeed_job\.py.*\bLOCAL_RANK={number}\b")
    return pid


@pytest.mark.timeout(400)
def test_a_rank_that_hangs_ends_no_others_run(start: Any, tmp_path: Path) -> None:
    """The others do all the steps, and their server does not wait for it at the end."""
    start()
    run_dir = tmp_path / "run"
    wait_until(lambda: min(count(run_dir, 0), count(run_dir, 1)) > 2, 300)
    first = rank(tmp_path, 0)
    os.kill(rank(tmp_path, 1), signal.SIGSTOP)
    wait_until(lambda: (tmp_path / "worker-0-0.json").exists(), 120)
    wait_until(lambda: not Path(f"/proc/{first}").exists() or " Z " in Path(f"/proc/{first}/stat").read_text(), 30)
    assert sum(event["local_steps"] for event in events(run_dir)) >= 2 * 800


@pytest.mark.timeout(400)
def test_a_rank_that_is_paused_for_three_times_the_timeout_goes_on_and_so_does_a_server_that_is_killed(
    start: Any, tmp_path: Path
) -> None:
    # worker 0 is slow: it goes on alone while worker 1 is paused, and both are needed after that
    job = start("20,4", worker_timeout=1, total_steps=300, snapshot_seconds=0.2)
    run_dir = tmp_path / "run"
    wait_until(lambda: min(count(run_dir, 0), count(run_dir, 1)) > 2, 300)
    pid = rank(tmp_path, 1)
    os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(3)
    before = count(run_dir, 1)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: count(run_dir, 1) > before + 2, 60)
    (server,) = find(tmp_path, r"local_sgd_main")
    os.kill(server, signal.SIGKILL)
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert "the server was killed by SIGKILL, and was started again from version-" in output
    assert all((tmp_path / f"worker-{worker}-0.json").exists() for worker in (0, 1))
    assert audit(run_dir).applied == sum(event["status"] == "applied" for event in events(run_dir))
