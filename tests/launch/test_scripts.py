"""``fairseq-async launch`` and ``join`` with a script of the user's own, here one of DeepSpeed's."""

import os
import signal
import socket
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fairseq_async import cli, errors
from fairseq_async.environment import JOINS, RENDEZVOUS, SERVER, TLS, TOKEN, WORKER, WORKERS
from fairseq_async.errors import ConfigurationError, as_argument
from fairseq_async.launch import launcher
from fairseq_async.launch.error_lines import last_words, same_mistake, traceback
from fairseq_async.launch.join import join
from fairseq_async.options.config import ServerOptions
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.invitation import invitation, own_command
from fairseq_async.worker.start.rendezvous import Rendezvous, ServerRequest
from tests.helpers.commands import DEEPSPEED, DEEPSPEED_JOB, ROOT, Processes, command
from tests.helpers.launched import count, find
from tests.helpers.run_files import events
from tests.helpers.waiting import wait_until

CONFIG = ROOT / "deepspeed_config" / "delayed_nesterov.json"
EVALUATES = """
import time
from pathlib import Path
import torch
from fairseq_async.torch import AsyncLocalSGD
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with AsyncLocalSGD(model, optimizer, local_steps=2, total_steps=4) as run:
    while not run.finished:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
if run.worker == 0:
    time.sleep(8)
    Path("score").write_text("good")
"""


def test_a_worker_0_that_dies_is_started_again_with_the_server_that_it_has_asked_for(
    processes: Processes, tmp_path: Path
) -> None:
    """The first start of worker 1 is killed too early to have asked for anything."""
    change = '{"async_training": {"local_steps": 5, "total_steps": 800, "dynamic_local_steps": false}}'
    job = ["python", DEEPSPEED_JOB, "--out", tmp_path, "--deepspeed", "--deepspeed_config", CONFIG, "--change", change]
    run = tmp_path / "run"
    launcher = processes.start([command("fairseq-async"), "launch", "--workers", 2, "--", *job], **DEEPSPEED)
    wait_until(lambda: count(run, 0) > 3, 120)
    (first,) = find(tmp_path, rf"deepspeed_job.*{WORKER}=0\b")
    os.kill(first, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, output[-3000:]
    assert "worker 0 was killed by SIGKILL; start 1 of 3 again" in output
    assert f"--token-file {run}/.token -- python {DEEPSPEED_JOB} --out" in output, "how others join"
    sequences = [event["sequence"] for event in events(run) if event["worker"] == 0]
    assert sequences == list(range(len(sequences))), "it went on after its predecessor's last update"
    assert sum(event["local_steps"] for event in events(run)) >= 2 * 240
    assert (run / "logs" / "worker-1.log").stat().st_size and "is finished" in (run / "logs" / "server.log").read_text()
    assert not list(ROOT.glob(".fairseq-async-*")) and not list(Path.cwd().glob(".fairseq-async-*"))


def launched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *job: object) -> tuple[int, str]:
    """Exit code and stderr of ``fairseq-async launch --workers 2 -- JOB``."""
    monkeypatch.setattr(sys, "argv", ["fairseq-async", "launch", "--workers", "2", "--", *map(str, job)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(str(end.value.code)), capsys.readouterr().err


def test_a_script_that_fails_before_it_joins_shows_its_traceback_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text("print('some output')\nraise ValueError('no such model')\n")
    (tmp_path / "idle.py").write_text("print('nothing to do with us')\n")
    monkeypatch.chdir(tmp_path)
    code, said = launched(monkeypatch, capsys, "python", "wrong.py")
    assert code == 1 and said.splitlines()[-1].endswith("ended with code 1: ValueError: no such model")
    assert "Traceback" in said and "some output" not in said
    code, said = launched(monkeypatch, capsys, "python", "idle.py")
    assert code == 1 and "idle.py: the script ended without joining a run" in said.splitlines()[-1]
    code, said = launched(monkeypatch, capsys, "python", "missing.py")
    assert code == 2 and said.startswith("fairseq-async: error: missing.py: no such script") and said.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["idle.py", "wrong.py"]


def test_all_workers_of_a_script_get_the_address_that_the_launcher_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rendezvous = Rendezvous(tmp_path)
    assert rendezvous.requested() is None
    rendezvous.answer("127.0.0.1:7")
    for name, value in {RENDEZVOUS: str(tmp_path), TOKEN: "secret", WORKER: "0", WORKERS: "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(errors, "_spell", [as_argument])
    own = {"run_dir_option": "run_dir="}
    for worker in (1, 0):
        found = WorkerContext(worker, 2)._find_server("a.server", ServerOptions(), tmp_path / "run", resumes=False)
        assert found == ("127.0.0.1:7", "secret", None)
    assert rendezvous.requested() == ServerRequest("a.server", str(tmp_path / "run"), **own)
    WorkerContext(0, 2)._find_server("a.server", ServerOptions(tls="/certificates"), tmp_path, resumes=False)
    assert rendezvous.requested() == ServerRequest("a.server", str(tmp_path), "/certificates", **own)
    with pytest.raises(ConfigurationError, match="127.0.0.1:9: the launcher starts the server; leave it out"):
        WorkerContext(0, 2)._find_server("a.server", ServerOptions(server="127.0.0.1:9"), tmp_path, resumes=False)


def test_a_script_joins_by_its_whole_command_with_the_address_and_the_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process becomes the script's: what it is replaced by is kept here."""
    token = "0123456789abcdef"
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(token)
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        join(address, ["python", "train.py", "--deepspeed", "--lr", "1"], tmp_path / "token", Path("certificates"))
    ((program, line, variables),) = became
    assert line == [program, "train.py", "--deepspeed", "--lr", "1"] and os.access(program, os.X_OK)
    expected = {WORKER: JOINS, SERVER: address, TOKEN: token, TLS: str(Path.cwd() / "certificates")}
    assert expected.items() <= variables.items() and RENDEZVOUS not in variables


def test_the_command_to_join_is_that_of_this_process_without_what_belongs_to_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = ["train.py", "--local_rank=1", "--lr", "0.1", "--server", "a:1", "--token-file=x", "--name", "two words"]
    monkeypatch.setattr(sys, "argv", job)
    main = ModuleType("__main__")
    main.__file__ = "train.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    for tls, more in ((None, ""), (Path("/run/tls"), " --tls /run/tls")):
        said = invitation("10.0.0.1:29400", Path("/run/.token"), own_command(), tls)
        line = f"fairseq-async join 10.0.0.1:29400 --token-file /run/.token{more} -- python train.py"
        assert said == f"server at 10.0.0.1:29400; one more worker joins with: {line} --lr 0.1 --name 'two words'"
    monkeypatch.setattr(sys, "argv", [sys.executable, *job[1:]])  # a program that pip has installed
    assert own_command() == [Path(sys.executable).name, "--lr", "0.1", "--name", "two words"]
    main.__spec__ = ModuleSpec("package.train.__main__", None)
    assert own_command() == ["python", "-m", "package.train", "--lr", "0.1", "--name", "two words"]
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # of a notebook
    assert own_command() == ["python", "SCRIPT.py"]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("a\nfairseq-async: error: --lr is bad\n[W] leaked\n", "--lr is bad"),
        ('Traceback (most recent call last):\n  File "x"\n    f()\nKeyError: 3\n[W] leaked semaphore\n', "KeyError: 3"),
        ("[rank0]: Traceback (most recent call last):\n[rank0]:   File\n[rank0]: OSError: x\n", "OSError: x"),
        (
            "Traceback (most recent call last):\n  x\nValueError: 1\nException ignored in: <function D.__del__>\n"
            "Traceback (most recent call last):\n  y\nAttributeError: 2\n",
            "ValueError: 1",
        ),
        (
            "Exception ignored in: <function D.__del__>\nTraceback (most recent call last):\n  y\nAttributeError: 2\n"
            "Traceback (most recent call last):\n  x\nValueError: 1\n",
            "ValueError: 1",
        ),
        ("Traceback (most recent call last):\n  x\nOld: 1\n" + "step\n" * 30 + "Killed by hand\n", "Killed by hand"),
        (
            "usage: fairseq-train\nfairseq-train: error: argument --lr: bad\n\n",
            "fairseq-train: error: argument --lr: bad",
        ),
        ("", ""),
    ],
)
def test_the_last_words_are_the_error_and_not_what_comes_behind_it(tmp_path: Path, log: str, words: str) -> None:
    path = tmp_path / "log"
    path.write_text("of the process before: fairseq-async: error: old\n" + log)
    assert last_words(path, len("of the process before: fairseq-async: error: old\n")) == words


def test_the_traceback_that_is_shown_is_the_last_one(tmp_path: Path) -> None:
    begins, path = "Traceback (most recent call last):", tmp_path / "log"
    path.write_text(f"a line\n{begins}\n  x\nOld: 1\n\nIn handling it:\n{begins}\n  y\nNew: 2\n")
    assert traceback(path) == [begins, "  y", "New: 2"]


def test_on_a_full_disk_the_words_are_that_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has lost its end: what is left of a traceback would be taken for the reason."""
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\n    main(cfg, **kw")
    assert last_words(log) == "    main(cfg, **kw"
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=400, f_bavail=1, f_frsize=4096))
    assert last_words(log) == f"the disk of {log} is full: make room there"
    log.write_text("fairseq-async: error: --lr is bad\n")
    assert last_words(log) == "--lr is bad"


@pytest.mark.parametrize(
    ("blocks", "available", "size", "full"),
    [(400, 3, 4096, True), (400, 4, 4096, False), (400, 20_000, 1, False), (0, 0, 4096, False)],
    ids=["12 KiB", "16 KiB", "blocks of a byte", "a disk that counts no blocks"],
)
def test_a_disk_is_full_where_less_than_16_kib_are_left_for_others_than_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, available: int, size: int, full: bool
) -> None:
    room = SimpleNamespace(f_blocks=blocks, f_bfree=available + 100, f_bavail=available, f_frsize=size)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    (tmp_path / "log").write_text("a word")
    assert last_words(tmp_path / "log") == (
        f"the disk of {tmp_path / 'log'} is full: make room there" if full else "a word"
    )


def test_of_a_long_log_the_last_mebibyte_is_read_and_of_an_exception_twenty_lines_behind_it(tmp_path: Path) -> None:
    log, error = tmp_path / "log", "fairseq-async: error: old\n"
    behind = "x" * ((1 << 20) - len(error))
    log.write_text(error + behind)
    assert last_words(log) == "old"
    log.write_text(error + behind + "x")
    assert last_words(log) == behind + "x"
    for lines, words in ((20, "OSError: 1"), (21, "step")):
        log.write_text("Traceback (most recent call last):\n  x\nOSError: 1\n" + "step\n" * lines)
        assert last_words(log) == words


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("\nValueError: no such model\n", "ValueError: no such model"),
        ("\nValueError: no such model\n[W] leak", "ValueError: no such model"),
        ("\nValueError: no such mo", ""),
        ("\nOSError: [Errno 28] No space left on device: 'x.pt'\n", ""),
        ("\nRuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\n", ""),
        ("", ""),
    ],
    ids=["another reason", "before a line that is cut", "cut", "no space", "no space for torch", "without"],
)
def test_an_exception_of_another_reason_is_said_on_a_full_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, words: str
) -> None:
    path = tmp_path / "log"
    path.write_text(f'Traceback (most recent call last):\n  File "x"\n    f(){log}')
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=400, f_bavail=1, f_frsize=4096))
    assert last_words(path) == (words or f"the disk of {path} is full: make room there")


def test_words_that_differ_in_their_time_alone_are_the_same_mistake() -> None:
    assert same_mistake("2026-01-01 10:00:00 | ERROR | no data", "2026-01-01 10:00:07 | ERROR | no data")
    assert not same_mistake("no data in a", "no data in b") and not same_mistake("", "")


def test_the_script_of_worker_0_may_go_on_after_its_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It evaluates the model, for longer than a worker of fairseq may take to end."""
    monkeypatch.setattr(launcher, "_FINISHING", 0.2)
    (tmp_path / "evaluates.py").write_text(EVALUATES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code, said = launched(monkeypatch, capsys, "python", "evaluates.py")
    assert code == 0, said
    assert (tmp_path / "score").read_text() == "good"
