"""The launcher's processes, one by one: what each is started with, and what is done about those that do not end."""

import os
import signal
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from fairseq_async.environment import SLOWDOWN, WORKER, WORKERS
from fairseq_async.errors import LOST_SERVER, USER_ERROR
from fairseq_async.launch import launcher as launcher_module
from fairseq_async.launch import processes as processes_module
from fairseq_async.launch import ranks, serve
from fairseq_async.launch.command.programs import of_ranks
from fairseq_async.launch.command.script import ScriptCommand
from fairseq_async.launch.launcher import Launcher
from fairseq_async.launch.options import LaunchOptions
from fairseq_async.launch.output import Output
from fairseq_async.launch.processes import Processes, RunFailedError, Worker, failure
from fairseq_async.launch.synchronous import GroupLauncher
from fairseq_async.worker.start.rendezvous import Rendezvous, ServerRequest
from tests.helpers.stand_ins import Time
from tests.helpers.waiting import group_has_ended, has_ended, wait_until


def launcher_of(directory: Path, workers: int, *line: str, slowdown: tuple[float, ...] = ()) -> Launcher:
    script = ScriptCommand(list(line or ["true"]), directory, resumes=False)
    made = Launcher(script, LaunchOptions(workers, max_restarts=2, slowdown=slowdown))
    made.display, made.server = MagicMock(), MagicMock()
    return made


def test_each_worker_has_its_own_number_slowdown_core_and_updates_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, own, cores = launcher_of(tmp_path, 3, slowdown=(1.0, 4.0, 2.0)), list[tuple[str, ...]](), sorted([5, 8])
    launcher.display.progress = MagicMock(updates={0: 3, 1: 5, 2: 0})
    pinned: list[set[int]] = []

    def start(line: Any, log: Path, env: dict[str, str]) -> MagicMock:
        own.append((log.name, env[WORKER], env[WORKERS], env[SLOWDOWN]))
        return MagicMock(pid=7)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, given: pinned.append(given))
    for worker in launcher.processes.workers:
        monkeypatch.setattr(worker.output, "of", start)
        launcher._start(worker)
    assert own == [(f"worker-{n}.log", str(n), "3", each) for n, each in enumerate(("1.0", "4.0", "2.0"))]
    assert [worker.updates_at_start for worker in launcher.processes.workers] == [3, 5, 0]
    assert pinned == [{5}, {8}, {5}]


@pytest.mark.parametrize("synchronous", [False, True])
def test_of_three_workers_on_two_gpus_each_has_one_and_ranks_see_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: bool
) -> None:
    monkeypatch.setattr(Processes, "on_gpu", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    processes = Processes(MagicMock(run_dir=tmp_path, synchronous=synchronous), 3)
    given = [processes._environment(worker).get("CUDA_VISIBLE_DEVICES") for worker in processes.workers]
    assert given == ([None] * 3 if synchronous else ["4", "7", "4"])


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("test $RANK = 0 || kill -KILL $$; sleep 60", -9),
        ("test $RANK = 0 || exit 2; sleep 60", 2),
        ("test $RANK$LOCAL_RANK$WORLD_SIZE$FAIRSEQ_ASYNC_RANKS = 1121,2 && exit 7; sleep 60", 7),
        ("test $RANK = 0 && exit 0; sleep 0.3; exit 3", 0),  # rank 0 has saved all
    ],
)
def test_a_rank_that_dies_takes_the_others_of_its_worker_with_it(script: str, code: int, tmp_path: Path) -> None:
    line, world = of_ranks(["sh", "-c", f"echo $$ >> {tmp_path}/ids; {script}"], 1, [1, 2])
    assert subprocess.run(line, timeout=60, env=os.environ | world).returncode == code
    for process in (tmp_path / "ids").read_text().split():
        wait_until(lambda id=int(process): has_ended(id), 5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("codes", "code"), [((None, 1, 2, -9), 2), ((None, 1, -9, 0), -9), ((3, 1), 1), ((0, 0), 0), ((0, 0, 4), 0)]
)
def test_of_ranks_that_have_ended_together_a_mistake_is_what_the_worker_ends_with(
    codes: tuple[int | None, ...], code: int
) -> None:
    """The others die of its end."""
    ended: list[Any] = [SimpleNamespace(poll=lambda its=each: its) for each in codes]
    assert ranks._wait(ended, None) == code


def test_a_rank_that_does_not_end_holds_the_worker_no_longer_than_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is ten seconds after rank 0 has ended in order, however long both were at work before."""
    clock = Time(0.0)
    monkeypatch.setattr(ranks, "time", clock)
    first: Any = SimpleNamespace(poll=lambda: None if clock.now < 100.0 else 0)
    hangs: Any = SimpleNamespace(poll=lambda: None)
    assert ranks._wait([first, hangs], None) == 0 and clock.now == pytest.approx(110.0, abs=0.2)


def test_workers_have_five_seconds_between_sigterm_and_sigkill_and_none_is_waited_for_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, clock, signals = launcher_of(tmp_path, 3), Time(0.0), list[tuple[int, int, float]]()
    monkeypatch.setattr(processes_module, "time", clock)
    monkeypatch.setattr(
        processes_module, "_signal", lambda worker, number: signals.append((worker.id, number, clock.now))
    )
    first, second, third = launcher.processes.workers
    ended(first, code=0)
    ended(third, code=None)
    second.process = MagicMock(poll=lambda: None if clock.now < 2.0 else -15)
    launcher.processes.wait(60.0, [0, 1])
    assert clock.now == pytest.approx(2.0, abs=0.1)
    second.process.poll = lambda: None
    began = clock.now
    launcher.processes.end()
    assert clock.now - began == pytest.approx(5.0, abs=0.1)
    assert [each[:2] for each in signals] == [(n, signal.SIGTERM) for n in (1, 2)] + [
        (n, signal.SIGKILL) for n in range(3)
    ]


def test_each_rank_has_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "on_gpu", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,9")
    processes = Processes(MagicMock(run_dir=tmp_path, synchronous=False), 3, ranks=[1, 2, 2])
    given = [processes._environment(worker)["CUDA_VISIBLE_DEVICES"] for worker in processes.workers]
    assert given == ["4", "7,9", "4,7"]


def test_the_last_output_of_a_process_that_has_ended_has_a_second() -> None:
    """A child of it may hold the pipe."""
    its = Output()
    its.finish()
    its._thread = MagicMock()
    its.finish()
    its._thread.join.assert_called_once_with(1.0)


def test_what_a_worker_has_left_in_its_group_dies_with_the_run_though_it_ignores_sigterm(tmp_path: Path) -> None:
    launcher = launcher_of(tmp_path, 2, "sh", "-c", "(trap '' TERM; echo ready; exec sleep 60) & exec sleep 60")
    for worker in launcher.processes.workers:
        launcher.processes.start(worker, None, {})
        wait_until(lambda worker=worker: worker.log.read_text() == "ready\n", 10)  # type: ignore[misc]
    launcher.processes.end()
    for worker in launcher.processes.workers:
        wait_until(lambda worker=worker: group_has_ended(worker.process.pid), 5)  # type: ignore[misc]


def test_logs_are_moved_though_one_worker_has_none_and_one_cannot_be_moved(tmp_path: Path) -> None:
    processes = Processes(MagicMock(run_dir=tmp_path / "first"), 4)
    for worker in processes.workers[1:]:
        worker.log.parent.mkdir(parents=True, exist_ok=True)
        worker.log.write_text(str(worker.id))

    def move(source: Path, target: Path) -> None:
        if source.name == "worker-2.log":
            raise OSError
        source.replace(target)

    processes.move_logs(tmp_path / "run", move)
    where = [worker.log.parent.parent.name for worker in processes.workers]
    assert where == ["first", "run", "first", "run"]
    assert [worker.log.read_text() for worker in processes.workers[1:]] == ["1", "2", "3"]


def test_the_logs_of_a_script_go_to_the_directory_that_its_worker_0_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_of(tmp_path, 2)
    launcher.server, rendezvous = None, Rendezvous(tmp_path)
    for worker in launcher.processes.workers:
        worker.log.parent.mkdir(exist_ok=True)
        worker.log.touch()
    launcher._start_server_of_script(rendezvous)
    assert launcher.server is None, "nobody has asked for it"
    rendezvous.request(ServerRequest("a.module", str(tmp_path / "run")))
    server = MagicMock(address="127.0.0.1:7", token_file=tmp_path / "token")
    monkeypatch.setattr(launcher, "_new_server", lambda wanted: server)
    launcher._start_server_of_script(rendezvous)
    assert [worker.log.parents[1].name for worker in launcher.processes.workers] == ["run", "run"]
    assert all(worker.log.exists() for worker in launcher.processes.workers) and rendezvous.wait() == "127.0.0.1:7"


@pytest.mark.parametrize(
    ("begun", "code", "did", "text"),
    [
        (False, USER_ERROR, ["ends", "removes, logs: True"], "worker 1 ended"),
        (False, 1, ["ends", "removes, logs: False"], "worker 1 ended (log: the log)"),
        (True, USER_ERROR, [], "worker 1 ended (log: the log)"),
        (True, 1, [], "worker 1 ended (log: the log)"),
    ],
)
def test_files_and_the_log_are_left_where_they_may_say_more_than_the_error(
    begun: bool, code: int, did: list[str], text: str
) -> None:
    done = list[str]()
    created: Any = SimpleNamespace(remove=lambda logs: done.append(f"removes, logs: {logs}"))
    error = failure("worker 1 ended", code, Path("the log"), begun, lambda: done.append("ends"), created)
    assert (done, str(error), error.code) == (did, text, code)


def ended(*workers: Worker, code: int | None) -> None:
    for worker in workers:
        worker.process = MagicMock(returncode=code, poll=lambda code=code: code)


def test_workers_that_hang_after_the_end_are_killed_and_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, killed = launcher_of(tmp_path, 3), list[int]()
    first, *others = launcher.processes.workers
    ended(first, code=0)
    ended(*others, code=None)
    monkeypatch.setattr(launcher.processes, "kill_children", lambda worker: killed.append(worker.id))
    clock = Time()
    monkeypatch.setattr(launcher_module, "time", clock)
    ended(first, code=None)
    launcher._after_end()
    clock.now += 50.0  # in which worker 0 saves its model
    ended(first, code=0)
    for seconds in (0.0, 4.9):
        clock.now += seconds
        launcher._after_end()
        assert not killed, "they have five seconds after its end"
    clock.now += 0.2
    launcher._after_end()
    ended(*others, code=-9)
    assert killed == [1, 2] and launcher.processes.failed == []


KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("worker", "code", "updates", "state", "outcome"),
    [
        (1, 1, 5, {}, "ends the run"),  # before its first update since it was started
        (1, 1, 6, {}, "again"),
        (1, 1, 5, {"unread": True}, "again"),  # nobody knows
        (1, KILLED, 5, {}, "again"),
        (1, KILLED, 6, {"restarts": 2}, "ends the run"),
        (1, LOST_SERVER, 5, {}, "again"),
        (1, 1, 5, {"finished": True}, "again"),  # no update comes any more
        (1, KILLED, 6, {"finished": True, "restarts": 2}, "given up"),
        (0, KILLED, 6, {"finished": True, "restarts": 2}, "ends the run"),  # the model is not saved
        (1, KILLED, 6, {"finished": True, "saved": True}, "given up"),
        (1, USER_ERROR, 6, {"finished": True, "saved": True}, "ends the run"),
        (1, KILLED, 6, {"saved": True}, "again"),
    ],
)
def test_what_becomes_of_a_worker_that_has_died(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    worker: int,
    code: int,
    updates: int,
    state: dict[str, Any],
    outcome: str,
) -> None:
    """It had sent five updates when it was started, and may be started twice again."""
    launcher, did = launcher_of(tmp_path, 2), list[str]()
    dead, server = launcher.processes.workers[worker], MagicMock()
    dead.updates_at_start, dead.restarts = 5, state.get("restarts", 0)
    ended(dead, code=code)
    launcher.server, server.finished.is_set.return_value = server, state.get("finished", False)
    launcher.display.progress = MagicMock(updates={0: updates, 1: updates}, unread=state.get("unread", False))
    monkeypatch.setattr(type(launcher.processes), "saved", state.get("saved", False))
    monkeypatch.setattr(launcher.processes, "kill_children", lambda worker: did.append("kills children"))
    monkeypatch.setattr(launcher.processes, "last_words", lambda worker: "its words")
    monkeypatch.setattr(launcher, "_start", lambda worker: did.append("again"))
    try:
        launcher._after_death(dead)
    except RunFailedError as error:
        did.append("ends the run")
        assert error.code == (USER_ERROR if code == USER_ERROR else 1)
    did += ["given up"] * dead.given_up
    assert did == ["kills children", outcome]
    again = outcome == "again"
    assert (dead.restarts, dead.last_words) == (
        state.get("restarts", 0) + again, "its words" if again and code > 0 else ""
    )  # fmt: skip
    assert server.over.clear.called == (again and state.get("finished", False))


@pytest.mark.parametrize("of_script", [False, True])
def test_after_the_end_worker_0_of_a_script_is_waited_for_with_a_word_and_that_of_fairseq_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_script: bool
) -> None:
    launcher, said = launcher_of(tmp_path, 1), list[str]()
    launcher.command.rendezvous = Rendezvous(tmp_path) if of_script else None
    ended(*launcher.processes.workers, code=None)
    monkeypatch.setattr(launcher.display, "say", said.append)
    monkeypatch.setattr(launcher.processes, "describe_end", lambda worker: "worker 0 hangs")
    clock = Time()
    monkeypatch.setattr(launcher_module, "time", clock)
    for seconds in (0.0, 59.0, 61.0, 62.0):
        clock.now = 1000.0 + seconds
        with pytest.raises(RunFailedError, match="hangs") if seconds > 60 and not of_script else nullcontext():
            launcher._after_end()
    assert said == ["the run is finished; waiting for the script of worker 0 (Ctrl-C ends it)"] * of_script


@pytest.mark.parametrize("dead", [0, 1])
def test_a_worker_that_dies_after_the_end_and_before_worker_0_has_saved_is_waited_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: int
) -> None:
    launcher = launcher_of(tmp_path, 2)
    server: Any = launcher.server
    ended(*launcher.processes.workers, code=None)
    worker = launcher.processes.workers[dead]
    ended(worker, code=-9)
    monkeypatch.setattr(launcher.processes, "kill_children", lambda worker: None)
    monkeypatch.setattr(launcher, "_start", lambda worker: ended(worker, code=None))
    launcher._ending = dead > 0, 0.0
    launcher._after_death(worker)
    server.over.clear.assert_called_once_with()
    launcher._after_end()
    assert launcher._ending[0] and launcher._ending[1] > 0.0, "worker 0 has its time again"
    assert worker.restarts == 1 and not any(each.given_up for each in launcher.processes.workers)


def test_that_the_run_was_finished_may_be_heard_after_the_workers_have_ended() -> None:
    """Another thread reads it from the server. They had nothing to do, as where the run was finished before."""
    launcher: Any = Launcher.__new__(Launcher)
    launcher.server, launcher.run_dir = SimpleNamespace(finished=threading.Event()), Path()
    threading.Timer(0.3, launcher.server.finished.set).start()
    launcher._check_whether_finished()


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_a_launchers_server_has_what_its_flags_and_the_run_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    made = MagicMock()
    monkeypatch.setattr(launcher_module, "ServerProcess", made)
    launcher = launcher_of(tmp_path, 3)
    launcher.options, launcher.token = LaunchOptions(3, max_restarts=7, port=29, host=host), "secret"
    launcher.command.resumes, launcher.tls, launcher.run_dir = True, tmp_path / "tls", tmp_path / "run"
    wanted = ServerRequest("a.module", str(tmp_path / "run"), run_dir_option="--dir", standby=False)
    assert launcher._new_server(wanted) is made.return_value
    log, given = tmp_path / "run" / "logs" / "server.log", f"address {host}:29 (--host)"
    made.assert_called_once_with(
        "a.module",
        3,
        tmp_path / "run",
        log,
        29,
        host,
        "secret",
        restarts=7,
        resumes=True,
        tls=tmp_path / "tls",
        run_dir_option="--dir",
        given="port 29 (--port)" if host == "127.0.0.1" else given,
        stays=True,
        standby=False,
    )


def test_each_rank_of_a_group_is_told_its_number_and_where_they_meet(tmp_path: Path) -> None:
    group = GroupLauncher(MagicMock(run_dir=tmp_path), 3, 29)
    variables = group._ranks(group.processes.workers[2])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29"}
    assert variables == {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"} | meeting


@pytest.mark.parametrize("resumes", [False, True])
def test_a_global_server_has_what_its_flags_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool) -> None:
    made = MagicMock()
    made.return_value.poll.return_value = 0
    for name, stand_in in (("ServerProcess", made), ("interrupt_on_signals", MagicMock()), ("say", MagicMock())):
        monkeypatch.setattr(serve, name, stand_in)
    monkeypatch.setattr(serve, "read_token", lambda path: f"secret of {path}")
    serve.serve("10.0.0.1:29", 3, tmp_path, Path("token"), Path("tls"), resumes, standby=False, restarts=7)
    made.assert_called_once_with(
        "fairseq_async.regions.global_main",
        3,
        tmp_path,
        tmp_path / "logs" / "server.log",
        port=29,
        host="10.0.0.1",
        token="secret of token",
        restarts=7,
        ends_with_workers=True,
        resumes=resumes,
        tls=Path("tls"),
        given="HOST:PORT 10.0.0.1:29",
        standby=False,
    )
    assert made.return_value.join.called and made.return_value.end.called
