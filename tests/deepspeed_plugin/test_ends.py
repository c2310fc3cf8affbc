"""How a script with a data loader of its own ends, under DeepSpeed's launcher."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fairseq_async.environment import SLOWDOWN
from fairseq_async.options.addresses import free_port
from tests.helpers.commands import DEEPSPEED, HELPERS, Processes, command
from tests.helpers.run_files import events, snapshot_versions

SECONDS = 100  # more than a job takes on a busy machine; the minute that a server may stay alone is in the assertions
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(processes: Processes, tmp_path: Path) -> Run:
    """``run(what, slowdown)``: the script with two workers, to its end."""

    def start(what: str, slowdown: str = "") -> tuple[int, str]:
        launcher = [command("deepspeed"), "--num_accelerators", 2, "--master_port", free_port()]
        return processes.run(
            [*launcher, HELPERS / "deepspeed_user.py", what, tmp_path], SECONDS, **DEEPSPEED, **{SLOWDOWN: slowdown}
        )

    return start


def test_a_loop_that_ends_by_its_own_count_ends_the_job_and_equal_data_is_noticed(run: Run, tmp_path: Path) -> None:
    code, output = run("same")
    assert code == 0, output
    assert output.count("workers 0 and 1 began with the same batch") == 1, output
    assert (tmp_path / "worker-0.json").exists() and (tmp_path / "worker-1.json").exists()
    for worker in (0, 1):
        assert f"warning: worker {worker} has ended before the run: what it has saved may lack what others" in output
    assert "later, and 1 local steps are lost; call engine.end() after the loop" in output


@pytest.mark.parametrize(("what", "slowdown"), [("divided", "6,1"), ("hybrid", "1,6")])
def test_after_end_all_workers_have_the_model_with_all_steps(
    run: Run, request: pytest.FixtureRequest, tmp_path: Path, what: str, slowdown: str
) -> None:
    """Half of sixteen batches each; with local SGD two rounds of three steps, and the rest."""
    if what == "hybrid":
        request.getfixturevalue("executed")
    code, output = run(what, slowdown)
    assert code == 0 and "began with the same batch" not in output, output
    assert " warning: " not in output, output  # Python's own, of a fork, is a RuntimeWarning
    (steps, model), other = (json.loads((tmp_path / f"worker-{worker}.json").read_text()) for worker in (0, 1))
    assert steps == 8 and other == [steps, model]
    taken = [sum(e.get("local_steps", 1) for e in events(tmp_path) if e["worker"] == worker) for worker in (0, 1)]
    assert taken == [8, 8]


def test_a_rank_0_that_crashes_ends_the_job_with_its_own_error_and_its_servers_state_is_kept(
    run: Run, tmp_path: Path
) -> None:
    code, output = run("crash")
    assert code != 0 and "a mistake of the script's own" in output, output
    assert "its server stays" not in output and snapshot_versions(tmp_path)[-1] > 0


def test_a_torch_distributed_that_was_started_before_is_one_line_on_every_rank(run: Run) -> None:
    code, output = run("early")
    said = [line for line in output.splitlines() if line.startswith("fairseq-async: error:")]
    assert code != 0 and "Traceback" not in output and "EADDRINUSE" not in output, output
    assert said and all("torch.distributed was initialised with all ranks; call" in line for line in said)
