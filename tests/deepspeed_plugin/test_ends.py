"""How a script with a data loader of its own ends, under DeepSpeed's launcher."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock, call

import pytest

from fairseq_async.deepspeed_plugin import exit
from fairseq_async.environment import SLOWDOWN
from fairseq_async.errors import USER_ERROR, AsyncError
from fairseq_async.options.addresses import free_port
from fairseq_async.protocol.notices import ENDED
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


LEFT = [call.client.leave(finished=False)]
FAILED, OUTLASTED = [call.client.close()], [*LEFT, call.server.outlast_workers()]
CHECKED = [call.engine.check_at_exit(), call.engine.async_worker.settle()]
IN_ORDER = [*CHECKED, call.check_ended(ANY, ANY)]


@pytest.mark.parametrize(
    ("way", "alone", "with_server"),
    [
        ("in order", IN_ORDER + LEFT, [*IN_ORDER, *OUTLASTED, call.server.end(why="last")]),
        ("the server is lost", CHECKED + LEFT, [*CHECKED, *OUTLASTED, call.server.end(why="last")]),
        ("failed", LEFT, [*FAILED, call.server.end(why=ENDED)]),
        (
            "not seen",
            [CHECKED[0], *LEFT, call.exit(USER_ERROR)],
            [CHECKED[0], *FAILED, call.server.end(why=ENDED), call.exit(USER_ERROR)],
        ),
        ("interrupted", IN_ORDER + LEFT, [*IN_ORDER, *OUTLASTED, call.server.end(why="last")]),
    ],
)
def test_a_process_leaves_the_run_and_the_one_with_the_server_ends_it_last_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, way: str, alone: list[Any], with_server: list[Any]
) -> None:
    """Where it has failed, a server that is left by the last worker would keep no snapshot."""
    for has_server in (False, True):
        did = MagicMock()
        did.engine.async_worker.settle.side_effect = AsyncError() if way == "the server is lost" else None
        did.engine.check_at_exit.side_effect = SystemExit(USER_ERROR) if way == "not seen" else None
        did.server.outlast_workers.side_effect = KeyboardInterrupt if way == "interrupted" else None
        monkeypatch.setattr(exit, "has_failed", lambda: way == "failed")
        monkeypatch.setattr(exit, "last_word", lambda: "last")
        monkeypatch.setattr(exit, "_check_ended", did.check_ended)
        monkeypatch.setattr(exit.os, "_exit", did.exit)
        did.exit.side_effect = SystemExit
        with suppress(KeyboardInterrupt, SystemExit):
            exit.leave_at_exit(did.client, did.engine, did.server if has_server else None)
        assert did.mock_calls == (with_server if has_server else alone)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "later; call engine.end()"),
        ({"done": 3}, "later, and 3 local steps are lost; call engine.end()"),
        ({"done": 3, "workers": 1}, "later, and 3 local steps are lost; call engine.end()"),
        ({"workers": 1}, ""),
        ({"rank": 1}, ""),
        ({"finished": True}, ""),
        ({"joined": False}, ""),
    ],
)
def test_a_script_is_told_once_what_it_has_lost_if_it_ends_before_the_run(
    capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    present = {"done": 0, "joined": True, "finished": False, "worker": 1, "workers": 2, "rank": 0}
    given: Any = SimpleNamespace(**present | changes)
    exit._check_ended(given, given)
    assert said in (told := capsys.readouterr().err) and bool(said) == bool(told)


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
