"""The driver of a run on Ray and the actors of its server and shards, each by itself, without a cluster."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from fairseq_async.environment import JOINS, MEETING, PLUGINS, RENDEZVOUS, SERVER, TOKEN, WORKER, WORKERS
from fairseq_async.errors import USER_ERROR, ConfigurationError
from fairseq_async.launch.processes import RunFailedError
from fairseq_async.worker.start.rendezvous import ServerRequest

pytest.importorskip("ray")

from fairseq_async.launch.ray import run as driver  # noqa: E402  # it needs Ray
from fairseq_async.launch.ray import server as of_server  # noqa: E402
from fairseq_async.launch.ray import shard as of_shard  # noqa: E402
from fairseq_async.launch.ray import worker as of_worker  # noqa: E402
from fairseq_async.launch.ray.cluster import Actors  # noqa: E402
from fairseq_async.launch.ray.registry import Ended, NodeAddress, Orders, State  # noqa: E402
from fairseq_async.launch.ray.resources import Resources  # noqa: E402
from fairseq_async.launch.ray.run import RayOptions, RayRun  # noqa: E402
from fairseq_async.launch.ray.server import RayServer, ServerTask  # noqa: E402
from fairseq_async.launch.ray.shard import RayShard, ShardTask  # noqa: E402
from fairseq_async.launch.ray.worker import RayWorker, WorkerTask  # noqa: E402

HERE, THERE = NodeAddress("10.0.0.1", 7), NodeAddress("10.0.0.2", 8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until somebody sleeps."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    for module in (driver, of_server, of_shard, of_worker):
        monkeypatch.setattr(module, "time", clock)
    return clock


def driver_of(monkeypatch: pytest.MonkeyPatch, run_dir: Path, shards: int = 1) -> Any:
    """The driver of two workers, the second with three cores."""
    monkeypatch.setattr(driver, "Actors", MagicMock())
    line = SimpleNamespace(run_dir=run_dir, rendezvous=None, resumes=True, tls=None, given=["train"], name="train.py")
    line.line = lambda server: ["fairseq-train", "data"]
    options = RayOptions("auto", "a run", 4, False, shards)
    run: Any = RayRun(line, run_dir / "first", [Resources(1, 0), Resources(3, 0)], options)  # type: ignore[arg-type]
    run._display, run._actors.runs, run._actors.shards = MagicMock(), {}, []
    run.said = lambda: [each.args[0] for each in run._display.say.call_args_list]
    return run


def test_the_driver_follows_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setenv(PLUGINS, "rules")
    run = driver_of(monkeypatch, tmp_path)
    run._follow(state := State([0, 1]))
    tasks = [each.args[0] for each in run._actors.start_worker.call_args_list]
    assert [(task.number, task.workers, task.joins, task.resources) for task in tasks] == [
        (0, 2, False, Resources(1, 0)), (1, 2, False, Resources(3, 0))
    ]  # fmt: skip
    assert (tasks[0].line, tasks[0].restarts, tasks[0].plugins) == (["fairseq-train", "data"], 4, "rules")
    assert tasks[0].logs == tmp_path.resolve() / "logs" and run.said() == []

    state.workers, state.placed = [0, 2, 3], {0, 1}
    run._follow(state)
    added = [each.args[0] for each in run._actors.start_worker.call_args_list[2:]]
    assert [(task.number, task.joins, task.resources) for task in added] == [
        (2, True, Resources(3, 0)), (3, True, Resources(3, 0))
    ]  # fmt: skip
    assert run._actors.remove_workers.call_args_list == [call([1], {0, 1}, driver._LEAVING)]
    assert run.said() == ["added: worker 2", "added: worker 3", "taken: worker 1"] and run._numbers == {0, 2, 3}

    state.request, state.node = ServerRequest("a.server", str(tmp_path / "other")), "node"
    for _ in range(2):
        run._follow(state)
    assert run._actors.start_server.call_args_list == [call(ServerTask(state.request, 2, 4, True), "node")]
    assert run._run_dir == tmp_path / "other" and run._actors.start_worker.call_count == 4

    state.place = HERE
    clock.sleep(driver._PLACING + 1)
    for _ in range(2):
        run._follow(state)
    invited, waits = run.said()[3:]
    assert "10.0.0.1:7" in invited and str(tmp_path / "other" / ".token") in invited
    assert waits == "worker 2, worker 3: no node of the Ray cluster has room yet, as for 3 CPU"


def test_workers_are_started_when_all_shards_have_a_place_and_a_place_that_is_lost_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, state = driver_of(monkeypatch, tmp_path, shards=3), State([0], shards={2: THERE})
    run._follow(state)
    logs = [tmp_path.resolve() / "logs" / f"shard-{number}.log" for number in (1, 2)]
    tasks = [call(ShardTask(number, 4, None, log)) for number, log in enumerate(logs, 1)]
    assert run._actors.start_shard.call_args_list == tasks and not run._actors.start_worker.called
    run._actors.shards, state.shards = [object(), object()], {2: THERE, 1: HERE}
    run._follow(state)
    (task,) = run._actors.start_worker.call_args.args[:1]
    assert task.line[-2:] == ["--server-shards", "1,10.0.0.1:7,10.0.0.2:8"]
    run._actors.shards = []  # all have ended, as their run is finished
    run._follow(state)
    assert run._actors.start_shard.call_args_list == tasks
    state.shards = {1: HERE, 2: NodeAddress("10.0.0.3", 8)}
    with pytest.raises(RunFailedError, match="the node of shard 2 is lost; give the same command again"):
        run._follow(state)


@pytest.mark.parametrize(
    ("server", "ends", "how", "error"),
    [
        (None, False, Ended(0), "train.py: the script ended without joining a run"),
        ("server", False, Ended(0), "the workers ended before the run was finished; logs: .*/logs"),
        ("server", True, Ended(1), "the server ended with code 1; log: .*/logs/server.log"),
        ("server", True, Ended(1, "no room"), "the server ended with code 1: no room"),
        ("server", True, Ended(0), ""),
    ],
)
def test_a_run_whose_workers_have_ended_is_finished_if_its_server_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Any, ends: bool, how: Ended, error: str
) -> None:
    run = driver_of(monkeypatch, tmp_path)
    run._server, seconds = server, list[float]()
    monkeypatch.setattr(driver, "ended", lambda _: how)

    def wait(refs: list[object], timeout: float) -> tuple[list[object], list[object]]:
        seconds.append(timeout)
        return (refs, []) if ends else ([], refs)

    monkeypatch.setattr("ray.wait", wait)
    if error:
        with pytest.raises(RunFailedError, match=error):
            run._after_workers()
    else:
        run._after_workers()
    assert seconds == [driver._FINISHING] * (server is not None)


@pytest.mark.parametrize("of_script", [False, True])
def test_after_the_servers_end_worker_0_is_waited_for_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_script: bool
) -> None:
    """That of a script may evaluate the model for hours."""
    run, waited = driver_of(monkeypatch, tmp_path), list[Any]()
    run._command.rendezvous = object() if of_script else None
    run._actors.runs = {"of 1": 1, "of 0": 0}
    monkeypatch.setattr(driver, "ended", lambda _: Ended(0))
    monkeypatch.setattr("ray.wait", lambda refs, timeout: waited.append((refs, timeout)) or (refs, []))
    run._after_worker(1, Ended(0))
    assert not run._saved
    run._after_server(Ended(0))
    assert waited == [(["of 0"], None if of_script else driver._FINISHING)]
    run._after_worker(1, Ended(0))
    assert run._saved and run._actors.runs == {"of 1": 1}


def test_a_shard_that_has_failed_ends_the_run_and_one_that_has_ended_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver_of(monkeypatch, tmp_path)
    run._actors.shards = ["first", "second"]
    hows = {"first": Ended(0), "second": Ended(1, "shard 2 was killed")}
    monkeypatch.setattr(driver, "ended", hows.__getitem__)
    run._after_shard("first")
    with pytest.raises(RunFailedError, match="^shard 2 was killed "):
        run._after_shard("second")
    assert run._actors.shards == []


def test_workers_that_leave_are_waited_for_where_they_have_a_node_and_then_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors: Any = Actors.__new__(Actors)
    actors.runs = {f"run {number}": number for number in range(4)}
    actors._workers = {number: f"actor {number}" for number in range(4)}
    did = list[Any]()
    monkeypatch.setattr("ray.wait", lambda refs, num_returns, timeout: did.append((refs, num_returns, timeout)))
    monkeypatch.setattr("ray.kill", did.append)
    actors.remove_workers([1, 2, 3], {0, 1, 3}, 10.0)
    assert did == [(["run 1", "run 3"], 2, 10.0), "actor 1", "actor 2", "actor 3"]
    assert actors.runs == {"run 0": 0}
    actors.remove_workers([0], set(), 10.0)
    assert did[4:] == ["actor 0"], "nobody is waited for who has no node"


def worker_of(number: int, **task: Any) -> Any:
    given = {"joins": False, "resources": Resources(2, 0), "restarts": 1, "plugins": None} | task
    worker: Any = RayWorker.__new__(RayWorker)
    worker._task = WorkerTask(number, 2, line=["train"], cwd="/", directory=Path(), logs=Path(), **given)
    worker._restarts, worker._said, worker._token, worker._address = 1, "", "secret", ""
    worker._rendezvous = SimpleNamespace(directory=Path("/first/worker-1"))
    return worker


def test_a_worker_has_its_nodes_environment_but_for_the_job_that_has_started_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "os.environ", {"HOME": "/h", "RANK": "3", "SLURM_PROCID": "3", MEETING: "/m", "OMP_NUM_THREADS": "64"}
    )
    monkeypatch.setattr(of_worker, "environment", lambda: {"MALLOC": "1"})
    own = {
        "HOME": "/h",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC": "1",
        TOKEN: "secret",
        WORKERS: "2",
    }
    announced = own | {WORKER: "1", RENDEZVOUS: "/first/worker-1", "CUDA_VISIBLE_DEVICES": ""}
    assert worker_of(1)._environment() == announced
    added = worker_of(5, joins=True, resources=Resources(2, 1), plugins="rules")
    added._address = "10.0.0.1:7"
    assert added._environment() == own | {WORKER: JOINS, SERVER: "10.0.0.1:7", PLUGINS: "rules"}


def test_a_worker_whose_predecessor_is_still_there_loses_no_restart(clock: SimpleNamespace) -> None:
    worker = worker_of(1)
    for _ in range(3):
        assert worker._may_go_on(Ended(1, "worker 1 is here already"))
    assert worker._restarts == 1 and clock.now == 100.0 + 3 * of_worker._SILENT
    assert worker._may_go_on(Ended(1, "another")) and not worker._may_go_on(Ended(1, "a third"))
    assert not worker_of(1)._may_go_on(Ended(0))


@pytest.mark.parametrize(
    ("knows", "orders", "expected"),
    [
        ("a:1", Orders("a:1", "", False), Ended(3, "its last words")),
        ("", Orders("a:1", "", False), Ended(3, "its last words")),
        ("a:1", Orders("b:1", "", False), None),
        ("a:1", Orders("a:1", "", True), Ended(0)),
    ],
    ids=["ends", "learns the first address", "the server has moved", "leaves"],
)
def test_a_child_runs_until_it_ends_its_server_moves_or_it_is_to_leave(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, knows: str, orders: Orders, expected: Ended | None
) -> None:
    worker, did = worker_of(1), list[object]()
    child = SimpleNamespace(returncode=3, left=2)
    child.poll = lambda: 3 if child.left == 0 else setattr(child, "left", child.left - 1)
    worker._output, worker._log = SimpleNamespace(finish=lambda: did.append("finishes"), start=0), Path("log")
    monkeypatch.setattr(of_worker, "_end", did.append)
    monkeypatch.setattr(of_worker, "last_words", lambda log, start: "its last words")
    monkeypatch.setattr(worker, "_start", lambda: child)
    monkeypatch.setattr(worker, "_use", lambda given: None)
    monkeypatch.setattr(worker, "_check_in", lambda: orders)
    assert worker._run_once(Orders(knows, "", False)) == expected
    assert did == [child, "finishes"]


def test_a_worker_that_was_added_waits_for_a_server(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> None:
    worker = worker_of(5, joins=True)
    orders = [Orders("", "", False), Orders("", "", False), found := Orders("a:1", "", False)]
    monkeypatch.setattr(worker, "_check_in", lambda: orders.pop(0))
    monkeypatch.setattr(worker, "_run_once", lambda given: Ended(0, given.address))
    assert worker.run() == Ended(0, found.address) and clock.now > 100.0
    orders[:] = [Orders("a:1", "", True)]
    assert worker.run() == Ended(0), "it was taken before it began"


@pytest.mark.parametrize(
    ("codes", "restarts", "expected"),
    [
        ([-9, 0], 1, Ended(0)),
        ([1, 1], 1, Ended(1, "shard 2 ended with code 1: full")),
        ([1], 0, Ended(1, "shard 2 ended with code 1: full")),
        ([USER_ERROR], 5, Ended(USER_ERROR, f"shard 2 ended with code {USER_ERROR}: full")),
    ],
)
def test_a_shard_is_started_again_as_often_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list[int], restarts: int, expected: Ended
) -> None:
    shard: Any = RayShard.__new__(RayShard)
    shard._task = ShardTask(2, restarts, None, tmp_path / "log")
    shard._task.log.write_text("of a run before\n")
    starts = list[int]()
    monkeypatch.setattr(of_shard, "last_words", lambda log, start: starts.append(start) or "full")
    monkeypatch.setattr(shard, "_run_once", lambda: codes.pop(0))
    assert shard.run() == expected and codes == [] and starts in ([], [16])


@pytest.mark.parametrize(("before", "port"), [(None, 99), (HERE, 7), (NodeAddress("10.0.0.9", 7), 99)])
def test_a_shard_that_is_started_again_on_its_node_has_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: NodeAddress | None, port: int
) -> None:
    registry = MagicMock()
    registry.token.remote.return_value, registry.place_of_shard.remote.return_value = "secret" * 8, before
    monkeypatch.setattr("ray.get_actor", lambda _: registry)
    monkeypatch.setattr("ray.get", lambda answer: answer)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(of_shard, "free_port", lambda host: 99)
    RayShard("run", ShardTask(2, 0, None, tmp_path / "log"))
    registry.record_shard.remote.assert_called_once_with(2, NodeAddress("10.0.0.1", port))


@pytest.mark.parametrize("before", [None, HERE, THERE])
@pytest.mark.parametrize("failures", [0, 2, 1000])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_server_is_started_again_where_workers_look_for_it_once_the_last_one_is_gone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: SimpleNamespace,
    before: NodeAddress | None,
    failures: int,
    snapshot: bool,
) -> None:
    server, tried = RayServer.__new__(RayServer), list[int]()
    server._task = ServerTask(ServerRequest("a.server", str(tmp_path)), 2, 0, False)
    monkeypatch.setattr(of_server, "snapshots_in", lambda path: [path] * snapshot)

    def start(port: int = 0, recovers: bool = False) -> str:
        tried.append(port)
        if len(tried) <= failures and clock.now < 100.0 + of_server._LAST_ONES_END:
            raise ConfigurationError("the port is taken")
        return f"recovers: {recovers}"

    monkeypatch.setattr(server, "_start", start)
    assert server._start_again("10.0.0.1", before) == f"recovers: {snapshot}"  # type: ignore[comparison-overlap]
    port = 7 if before is HERE else 0
    assert tried[:3] == [port] * min(3, len(tried)) and tried[-1] == (0 if failures == 1000 else port)
    assert len(tried) == (failures + 1 if failures < 1000 else of_server._LAST_ONES_END / of_server._PAUSE + 1)


def test_a_server_that_cannot_be_started_says_why_and_is_not_ended() -> None:
    server: Any = RayServer.__new__(RayServer)
    server._error, server._process = "no room", MagicMock()
    assert server.follow() == Ended(1, "no room")
    server.end(True)
    assert not server._process.mock_calls
    server._error = ""
    for polled, code in ((None, 0), (0, 0), (3, 3)):
        server._process.poll.return_value = polled
        assert server.follow() == Ended(code)
    for saved, why in ((True, of_server.SAVED), (False, of_server.ENDED)):
        server.end(saved)
        server._process.end.assert_called_with(why=why)
