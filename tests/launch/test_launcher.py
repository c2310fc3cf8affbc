"""``fairseq-async launch`` with real processes, some of which die."""

import glob
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import BinaryIO
from unittest.mock import MagicMock

import pytest

from fairseq_async import cli
from fairseq_async.errors import LOST_SERVER, USER_ERROR, ConfigurationError
from fairseq_async.launch import output
from fairseq_async.launch import processes as processes_module
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.command.script import ScriptCommand
from fairseq_async.launch.launcher import Launcher
from fairseq_async.launch.options import LaunchOptions
from fairseq_async.launch.processes import RunFailedError, Worker, interrupt_on_signals
from fairseq_async.options.addresses import free_port
from tests.helpers.commands import HYBRID, MODEL, ROOT, Processes, command, launch_command
from tests.helpers.launched import count, find, server_of, worker_of
from tests.helpers.run_files import events, load, snapshot_versions
from tests.helpers.waiting import wait_until

Launch = Callable[..., tuple[int, str]]
FOREVER = ["--max-update", "1000000", "--disable-validation"]
SLOWLY = ["--slowdown", "5,5"]


def nothing_is_left(run_dir: Path, shared_memory: set[str]) -> None:
    wait_until(lambda: not find(run_dir, ""), 30)
    wait_until(lambda: left_in_shared_memory() <= shared_memory, 30)


def left_in_shared_memory() -> set[str]:
    """Files that no process has open, for others may run beside a test; but for what DeepSpeed leaves there, and the
    semaphores of Python's multiprocessing, which stay if any other program on the machine is killed."""
    there = {name for name in os.listdir("/dev/shm") if not name.startswith(("deepspeed_", "sem."))}
    return there - in_use() if there else set()


def in_use() -> set[str]:
    """Names in /dev/shm that a process has open or mapped."""
    names: set[str] = set()
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):
            names.add(os.readlink(path).removeprefix("/dev/shm/"))
    for path in glob.glob("/proc/[0-9]*/maps"):
        with suppress(OSError):
            names |= set(re.findall(r"/dev/shm/(.*)", Path(path).read_text()))
    return names


@pytest.fixture
def shared_memory() -> set[str]:
    return left_in_shared_memory()


def test_a_killed_worker_is_started_again_and_the_run_goes_on(
    processes: Processes, data: Path, tmp_path: Path, shared_memory: set[str]
) -> None:
    """As fairseq does by default, each has a process that loads its data, which a kill of the worker alone leaves. Both
    are slow, so that the run is not over when it is back."""
    flags = ["--max-update", 80, "--disable-validation", "--num-workers", 1]
    launcher = processes.start(launch_command(data, 2, tmp_path, *flags, launcher=SLOWLY))
    wait_until(lambda: count(tmp_path, 1) > 5, 90)
    os.kill(worker_of(tmp_path, 1), signal.SIGKILL)
    before = count(tmp_path, 0)
    output, _ = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, output
    assert "worker 1 was killed by SIGKILL; start 1 of 3 again" in output
    assert count(tmp_path, 0) > before + 10, "the other went on"
    updates = events(tmp_path)
    sequences = [event["sequence"] for event in updates if event["worker"] == 1]
    assert sequences == list(range(len(sequences))), "it goes on where its predecessor was"
    assert load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 80
    nothing_is_left(tmp_path, shared_memory)


@pytest.mark.parametrize(
    ("code", "updates", "starts"),
    [(LOST_SERVER, 0, 2), (USER_ERROR, 0, 0), (1, 0, 0), (1, 7, 1), (-signal.SIGKILL, 7, 2)],
    ids=["no server", "a mistake", "before an update", "twice the same words", "killed"],
)
def test_a_worker_is_started_again_as_often_as_it_may_and_for_a_mistake_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, updates: int, starts: int
) -> None:
    """Its server may be away before its first update: with another exit code, a worker that ends then has made a
    mistake, and so has one that ends twice with the same words."""
    script = ScriptCommand(["python", __file__], tmp_path, resumes=False)
    launcher = Launcher(script, LaunchOptions(1, max_restarts=2))
    launcher.display, started = MagicMock(), list[Worker]()
    launcher.display.progress = MagicMock(updates={0: updates}, unread=False)
    (worker,) = launcher.processes.workers
    worker.process = MagicMock(returncode=code)
    worker.log.parent.mkdir(parents=True)
    worker.log.write_text("fairseq-async: error: the server at 127.0.0.1:7 is gone\n")
    monkeypatch.setattr(launcher, "_start", started.append)
    monkeypatch.setattr(launcher.processes, "kill_children", lambda worker: None)
    assert worker.updates_at_start == 0
    with pytest.raises(RunFailedError, match="the server at 127.0.0.1:7 is gone") as failed:
        for _ in range(4):
            launcher._after_death(worker)
    assert len(started) == starts and failed.value.code == (2 if code == USER_ERROR else 1)


@pytest.mark.parametrize(
    ("code", "updates", "unread", "ends"),
    [(0, 0, False, True), (0, 7, False, False), (0, 0, True, False), (None, 0, False, False), (1, 0, False, False)],
    ids=["no part", "a part", "unknown", "at work", "an error"],
)
def test_a_worker_that_has_ended_in_order_without_a_part_in_the_run_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, updates: int, unread: bool, ends: bool
) -> None:
    """The others would wait for it, and then end well with a model that has nothing of its data."""
    monkeypatch.setattr("fairseq_async.launch.launcher._LEAVING", -1.0)
    launcher = Launcher(ScriptCommand(["python", __file__], tmp_path, resumes=False), LaunchOptions(2, max_restarts=3))
    launcher.display = MagicMock()
    launcher.display.progress = MagicMock(updates={0: 5, 1: updates}, unread=unread)
    monkeypatch.setattr(launcher, "_end", lambda: None)
    for worker, ended in zip(launcher.processes.workers, (None, code), strict=True):
        worker.process = MagicMock(poll=MagicMock(return_value=ended))
    said = "worker 1 ended without having trained anything, and the run is not finished"
    with pytest.raises(RunFailedError, match=said) if ends else nullcontext():
        launcher._check_absent()


def test_a_relative_directory_of_certificates_is_that_of_where_the_launcher_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers and workers may be elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fairseq_async.launch.launcher.worker_context", lambda directory: None)
    script = ScriptCommand(["python", __file__], tmp_path, resumes=False)
    assert Launcher(script, LaunchOptions(1, max_restarts=0, tls=Path("tls"))).tls == tmp_path.resolve() / "tls"


def test_what_workers_do_just_before_their_end_is_read(tmp_path: Path) -> None:
    """A short run would else have trained nothing, and the last line of each one would lack its last updates."""
    launcher = Launcher(ScriptCommand(["python", __file__], tmp_path, resumes=False), LaunchOptions(1, max_restarts=0))
    launcher.display = MagicMock()
    launcher.display.progress.begun = False
    launcher.display.refresh.side_effect = lambda: setattr(launcher.display.progress, "begun", True)
    (worker,) = launcher.processes.workers
    worker.process = MagicMock(returncode=0, poll=MagicMock(return_value=0))
    launcher._watch()


@pytest.mark.parametrize("finished", [False, True], ids=["started again", "given up"])
def test_what_a_dead_worker_has_left_is_killed_before_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """A data loader would go on with a copy of all that the worker had open."""
    script = ScriptCommand(["sh", "-c", f"sleep 60 & echo $!; exit {LOST_SERVER}"], tmp_path, resumes=False)
    launcher, left = Launcher(script, LaunchOptions(1, max_restarts=1)), list[bool]()
    launcher.display, launcher.server = MagicMock(), MagicMock() if finished else None
    (worker,) = launcher.processes.workers
    launcher.processes.start(worker, None, {})
    worker.process.wait(30)
    wait_until(lambda: worker.log.read_text().endswith("\n"))
    (child,) = worker.log.read_text().split()
    state = Path(f"/proc/{child}/stat")  # its command line is empty, too, while it is executed

    def is_dead() -> bool:
        try:
            return state.read_text().rpartition(") ")[2][0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    def start(worker: Worker) -> None:
        wait_until(is_dead, 5)
        left.append(is_dead())

    monkeypatch.setattr(launcher, "_start", start)
    monkeypatch.setattr(type(launcher.processes), "saved", property(lambda self: True))
    assert not is_dead()
    launcher._after_death(worker)
    wait_until(is_dead, 5)
    assert left == ([] if finished else [True]) and worker.given_up == finished


def test_a_worker_that_nobody_announced_joins_a_run_and_leaves_it(
    processes: Processes, data: Path, tmp_path: Path, shared_memory: set[str]
) -> None:
    port = free_port()
    launcher = processes.start(launch_command(data, 1, tmp_path, *FOREVER, launcher=["--port", port]))
    wait_until(lambda: count(tmp_path, 0) > 5, 90)
    job = ["fairseq-train", data, *MODEL, *HYBRID, "--save-dir", tmp_path, *FOREVER]
    join = [command("fairseq-async"), "join", f"127.0.0.1:{port}", "--token-file", tmp_path / ".token", "--", *job]
    joiner = processes.start(join)
    wait_until(lambda: count(tmp_path, 1) > 5, 90)
    joiner.send_signal(signal.SIGINT)
    joiner.communicate(timeout=30)
    before = count(tmp_path, 0)
    wait_until(lambda: count(tmp_path, 0) > before + 5, 90)
    launcher.send_signal(signal.SIGINT)
    assert launcher.communicate(timeout=30) and launcher.returncode == 130
    nothing_is_left(tmp_path, shared_memory)


def test_a_closed_terminal_ends_everything_as_ctrl_c_does(
    processes: Processes, data: Path, tmp_path: Path, shared_memory: set[str]
) -> None:
    """``test_interrupted.py`` has what is kept."""
    launcher = processes.start(launch_command(data, 2, tmp_path, *FOREVER))
    wait_until(lambda: count(tmp_path, 1) > 5, 90)
    launcher.send_signal(signal.SIGHUP)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130 and "Traceback" not in output and "go on with: fairseq-async launch" in output
    nothing_is_left(tmp_path, shared_memory)


def test_workers_that_ignore_sigterm_are_killed_however_often_ctrl_c_is_pressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn:
        run_dir, on_cpu, synchronous = tmp_path, True, False

        def line(self, address: str | None) -> list[str]:
            return ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]

    monkeypatch.setattr(processes_module, "_ENDING", 1.0)
    several = processes_module.Processes(Stubborn(), 2)
    for worker in several.workers:
        several.start(worker, None, {})
    wait_until(lambda: all(worker.log.read_bytes() for worker in several.workers), 30)
    pressed = [threading.Timer(0.2 * n, os.kill, (os.getpid(), signal.SIGINT)) for n in (1, 2, 3)]
    for timer in pressed:
        timer.start()
    several.end()
    for timer in pressed:
        timer.join()
    assert [worker.process.returncode for worker in several.workers] == [-signal.SIGKILL] * 2


def test_the_last_words_are_those_of_the_present_process_though_a_child_of_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is in a session of its own, so that it survives and holds the output open; the disk is slow."""

    class Talkative:
        run_dir, on_cpu, synchronous = tmp_path, True, False

        def line(self, address: str | None) -> list[str]:
            script = "setsid sleep 12 & head -c 300000 /dev/zero | tr '\\0' x; echo; printf %s $WORD >&2; exit 3"
            return ["sh", "-c", script]

    def slowly(log: BinaryIO, printed: bytes, append: Callable[[BinaryIO, bytes], int] = output._append) -> int:
        threading.Event().wait(0.1)
        return append(log, printed)

    monkeypatch.setattr(output, "_append", slowly)
    monkeypatch.setattr(output, "_REST", 2.0)
    several = processes_module.Processes(Talkative(), 1)
    (worker,) = several.workers
    for number, word in enumerate(("once", "twice")):
        several.start(worker, None, {"WORD": word})
        worker.process.wait(30)
        assert several.last_words(worker) == word
        assert worker.output.start == number * 300_005
    assert worker.log.read_text() == "x" * 300_000 + "\nonce" + "x" * 300_000 + "\ntwice"


def test_a_killed_launcher_is_no_error_of_a_worker_that_prints_as_it_ends(tmp_path: Path) -> None:
    # by number: a shell that starts after its parent's end has another parent
    waits = "while kill -0 $0 2> /dev/null; do sleep 0.05; done; echo ending && touch ended"
    starts = f"""
import os, signal
from pathlib import Path
from fairseq_async.launch.output import Output
Output().of(["sh", "-c", {waits!r}, str(os.getpid())], Path("log"), os.environ)
os.kill(os.getpid(), signal.SIGKILL)
"""
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", starts], cwd=tmp_path, env=variables).returncode == -signal.SIGKILL
    wait_until((tmp_path / "ended").exists)


def test_with_nohup_a_closed_terminal_ends_nothing() -> None:
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        interrupt_on_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_a_killed_launcher_leaves_nothing_behind(
    processes: Processes, data: Path, tmp_path: Path, shared_memory: set[str]
) -> None:
    launcher = processes.start(launch_command(data, 2, tmp_path, *FOREVER))
    wait_until(lambda: count(tmp_path, 1) > 5, 90)
    launcher.kill()
    nothing_is_left(tmp_path, shared_memory)


def test_a_killed_server_is_started_again_from_its_snapshot_and_the_run_goes_on(
    processes: Processes, data: Path, tmp_path: Path, shared_memory: set[str]
) -> None:
    limits = ["--max-update", 50, "--disable-validation", "--snapshot-seconds", 0.2]
    launcher = processes.start(launch_command(data, 2, tmp_path, *limits, launcher=SLOWLY))
    wait_until(lambda: any(snapshot_versions(tmp_path)), 90)
    os.kill(server_of(tmp_path), signal.SIGKILL)
    output, _ = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, output
    assert "the server was killed by SIGKILL, and was started again from version-" in output
    assert load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 50
    assert "worker 0 was" not in output and "worker 1 was" not in output, "they waited"
    assert not list(tmp_path.glob("snapshots/*")), "a finished run needs none"
    nothing_is_left(tmp_path, shared_memory)


def test_a_server_that_dies_too_often_ends_the_run(
    processes: Processes, data: Path, tmp_path: Path, shared_memory: set[str]
) -> None:
    launcher = processes.start(launch_command(data, 2, tmp_path, *FOREVER, "--barrier", launcher=["--max-restarts", 0]))
    wait_until(lambda: count(tmp_path, 1) > 5, 90)
    os.kill(server_of(tmp_path), signal.SIGKILL)
    try:
        output, _ = launcher.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        pytest.fail("the launcher did not end")
    assert launcher.returncode == 1 and "error: the server was killed by SIGKILL" in output
    nothing_is_left(tmp_path, shared_memory)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--updates-per-step", "3", "--barrier"], "there are only 2 workers, which"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_users_mistake_is_one_line_and_ends_everything(
    launch: Launch, tmp_path: Path, shared_memory: set[str], flags: list[str], message: str
) -> None:
    code, output = launch(2, tmp_path, *flags, "--max-update", 5)
    lines = [line for line in output.splitlines() if line.startswith("fairseq-async: error:")]
    assert code == 2 and len(lines) == 1 and message in lines[0] and "Traceback" not in output
    assert " is gone" not in output, "the line of error says why"
    nothing_is_left(tmp_path, shared_memory)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--inner-optimizer", "adem"], "--inner-optimizer adem"),
        (["--updates-per-step", "0"], "--updates-per-step: Input should be greater than or equal to 1 (it is 0)"),
        (["--ddp-backend", "fully_sharded"], "--ddp-backend fully_sharded: not possible with --optimizer"),
        (["--distributed-world-size", "3"], "--distributed-world-size is 3"),
        (["--update-freq", "0"], "--update-freq 0: a step needs a batch"),
    ],
)
def test_a_users_mistake_is_one_line(refused: Callable[..., str], flags: list[str], message: str) -> None:
    world = [] if "--distributed-world-size" in flags else ["--distributed-world-size", 1]
    assert message in refused(*HYBRID, *world, *flags)


OTHER_MODEL = """
import os
import torch
from fairseq_async.torch import HybridAsync
model = torch.nn.Linear(8, 1 + int(os.environ["FAIRSEQ_ASYNC_WORKER"]))
with HybridAsync(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=10**6) as worker:
    while not worker.finished:
        model(torch.ones(8)).sum().backward()
        worker.optimizers[0].step()
"""


def test_a_worker_with_another_model_is_named_with_the_first_difference(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(OTHER_MODEL)
    monkeypatch.chdir(tmp_path)
    code, output = processes.run([command("fairseq-async"), "launch", "--workers", 2, "--", "python", "train.py"])
    assert code == 2 and re.search(r"worker [01] has another model than the others: its weight is ", output)
    assert "2x8" in output and "1x8" in output and "Traceback" not in output


def test_a_port_in_use_is_said(launch: Launch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = launch(1, tmp_path / "run", launcher=["--port", port])
    assert code == 2 and f"port {port} (--port) cannot be used" in output and "Traceback" not in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fairseq-train", "data", "--optimizer", "adam"], "--optimizer adam: launch runs --optimizer hybrid_async"),
        (["no-such-program", "--optimizer", "hybrid_async"], "no-such-program: no such program"),
        (["fairseq-train", "--optimizer", "hybrid_async", "--server", "a:1"], "launch starts its own server"),
    ],
)
def test_a_command_that_cannot_be_launched_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        WorkerCommand(arguments)


@pytest.mark.parametrize("slowdown", ["1,4,2", "1,,4", "1,0.5", "1,fast", "1,nan", "inf,1"])
def test_slowdown_needs_a_factor_for_each_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slowdown: str
) -> None:
    line = ["fairseq-async", "launch", "--workers", "2", "--slowdown", slowdown, "--"]
    monkeypatch.setattr(sys, "argv", [*line, "fairseq-train", "data", "--optimizer", "hybrid_async"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and "error: --slowdown" in said and said.count("\n") == 1


@pytest.mark.parametrize("flag", ["--slowdown", "--max-restarts", "--host", "--token-file"])
def test_what_only_asynchronous_workers_have_is_refused_with_a_synchronous_method(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    job = ["--", "fairseq-train", "data", "--optimizer", "adasum"]
    monkeypatch.setattr(sys, "argv", ["fairseq-async", "launch", "--workers", "2", flag, "1", *job])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith(f"fairseq-async: error: {flag}: ") and said.count("\n") == 1


def test_a_slowed_down_worker_sends_fewer_gradients_and_older_ones(launch: Launch, tmp_path: Path) -> None:
    # both sleep: worker 0 alone would be through before worker 1 has started on a busy machine
    code, output = launch(2, tmp_path, "--max-update", 60, launcher=["--slowdown", "5,50"])
    assert code == 0, output
    updates = events(tmp_path)
    began = [event["worker"] for event in updates].index(1)
    ages = [[e["staleness"] for e in updates[began:] if e["worker"] == worker] for worker in (0, 1)]
    assert len(ages[0]) > 2 * len(ages[1])
    assert sum(ages[1]) / len(ages[1]) > sum(ages[0]) / len(ages[0])
