"""The actor of a worker by itself, without a cluster."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from fairseq_async.errors import LOST_SERVER, USER_ERROR, ConfigurationError
from fairseq_async.launch.processes import RunFailedError

ray = pytest.importorskip("ray")
from ray.exceptions import RayTaskError  # noqa: E402  # skipped without it

from fairseq_async.launch.ray.cluster import ended  # noqa: E402
from fairseq_async.launch.ray.registry import Ended, Orders, Registry  # noqa: E402
from fairseq_async.launch.ray.resources import Resources  # noqa: E402
from fairseq_async.launch.ray.run import RayOptions, RayRun, train  # noqa: E402
from fairseq_async.launch.ray.worker import RayWorker, WorkerTask  # noqa: E402


@pytest.mark.parametrize("again", [False, True], ids=["first", "started again"])
def test_a_worker_that_is_started_again_writes_on_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The log of a run before, in the same directory, is replaced."""
    run_dir, registry = tmp_path / "run", Registry("secret", 2)
    if again:
        registry.check_in(1, "127.0.0.1", "node", None)
    actor = SimpleNamespace(token=SimpleNamespace(remote=registry.token), state=SimpleNamespace(remote=registry.state))
    monkeypatch.setattr("ray.get_actor", lambda _: actor)
    monkeypatch.setattr("ray.get", lambda answer: answer)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("ray.get_runtime_context", MagicMock())
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "worker-1.log").write_text("before\n")
    first = tmp_path / "first"
    line = [sys.executable, "-c", "print('now')"]
    worker = RayWorker(
        "", WorkerTask(1, 2, False, line, str(tmp_path), first, first / "logs", Resources(1, 0), 0, None)
    )
    orders = Orders("", str(run_dir), False)
    worker._use(orders)
    assert worker._start().wait(60) == 0
    worker._output.finish()
    worker._use(orders)
    assert (run_dir / "logs" / "worker-1.log").read_text() == ("before\nnow\n" if again else "now\n")


@pytest.mark.parametrize(
    ("code", "starts"), [(LOST_SERVER, 3), (USER_ERROR, 1), (1, 2)], ids=["lost server", "mistake", "the same error"]
)
def test_a_worker_whose_server_is_away_is_started_again_as_often_as_it_may(
    monkeypatch: pytest.MonkeyPatch, code: int, starts: int
) -> None:
    task = WorkerTask(1, 2, False, [], os.getcwd(), Path(), Path(), Resources(1, 0), 2, None)
    worker, started = RayWorker.__new__(RayWorker), list[object]()
    worker._task, worker._restarts, worker._said = task, task.restarts, ""
    monkeypatch.setattr(worker, "_check_in", lambda: Orders("", "", False))
    monkeypatch.setattr(worker, "_run_once", lambda orders: started.append(orders) or Ended(code, "it is gone"))
    assert worker.run().code == code and len(started) == starts


def test_what_has_failed_in_an_actor_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RayTaskError("run", "Traceback ...", FileExistsError(17, "File exists", "/run/logs"))
    monkeypatch.setattr("ray.get", MagicMock(side_effect=error.as_instanceof_cause()))
    assert ended(ray.ObjectRef.nil()) == Ended(1, "FileExistsError: [Errno 17] File exists: '/run/logs'")


def test_a_worker_that_was_added_and_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node without the working directory."""
    monkeypatch.setattr("fairseq_async.launch.ray.run.Actors", MagicMock())
    command = SimpleNamespace(run_dir=tmp_path / "run", rendezvous=None)
    run = RayRun(command, tmp_path, [Resources(1, 0)] * 2, RayOptions("auto", "a run", 0, False))  # type: ignore[arg-type]
    run._display = MagicMock()
    how = Ended(USER_ERROR, "there is no directory /work on the node 10.0.0.3")
    run._after_worker(2, how)
    (said,) = run._display.say.call_args.args
    assert said == f"worker 2 ended with code 2: {how.said}; it was added, and the run goes on without it"
    run._actors.kill_worker.assert_called_once_with(2)  # type: ignore[attr-defined]
    with pytest.raises(RunFailedError, match="worker 1 ended with code 2: there is no directory"):
        run._after_worker(1, how)


def test_a_working_directory_that_cannot_be_written_to_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", MagicMock(side_effect=PermissionError(13, "Permission denied", "/here")))
    with pytest.raises(ConfigurationError, match="the working directory /.* cannot be written to: Permission denied"):
        train(["python", "train.py"], [Resources(1, 0)], RayOptions("auto", "a run", 0, False))
