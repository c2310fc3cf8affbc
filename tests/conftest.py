"""Settings of pytest, hypothesis and torch, and the fixtures that several directories of tests use."""

import gc
import logging
import os
import random
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from fairseq_async.environment import PLUGINS
from fairseq_async.errors import as_flag, spell_options
from fairseq_async.method import methods
from fairseq_async.method.rules import OUTER_RULES
from fairseq_async.worker.start.server_process import ServerProcess
from scripts.faults.hosts import Cable, Host, other_host
from scripts.faults.thread_server import ThreadServer
from tests.helpers.commands import MODEL, PACKAGE, ROOT, Processes, command, launch_command, train_alone
from tests.helpers.forking import USUAL, install
from tests.helpers.frameworks import quicken, seed_what_is_here
from tests.helpers.server_client import SGD_SERVER, StartServer, StartThreadServer

# A first call imports, and machines are busy. Where CI is set, hypothesis would try the same examples every time: it is
# to try new ones there too, and to print what reproduces a failure.
settings.register_profile("patient", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("patient")
torch.set_num_threads(1)
seed_what_is_here()
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile the package
sys.dont_write_bytecode = False
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in a background job, and so in what we start
if not torch.cuda.is_available():  # no process can use a GPU that one has asked for before it was forked
    install()
torch.serialization.add_safe_globals([Namespace])  # plain fairseq's own checkpoints hold one


def pytest_collection() -> None:
    """What is imported and collected stays to the end: to look through it for garbage, again and again, takes seconds
    of each process."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    quicken()  # what the tests use is imported now


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the files of tests, those that start programs come first: a long file that comes
    last would leave the other cores idle."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        starting = {
            each.path
            for each in items
            if "processes" in getattr(each, "fixturenames", ()) or hasattr(getattr(each, "module", None), "Processes")
        }
        items.sort(key=lambda each: each.path not in starting)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Values that a test draws are those of each other run: a bound that one draw in hundreds breaks says nothing."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def spelling() -> Iterator[None]:
    """A front end that a test uses in this process has spelt options its own way."""
    yield
    spell_options(as_flag)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A test that leaves logging off makes one that looks for a log line fail, in some orders of the tests."""
    yield
    assert logging.root.manager.disable == logging.NOTSET


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of this test start as a user's: they are executed, and import what they need themselves."""
    monkeypatch.setattr(subprocess, "Popen", USUAL)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 pairs of a language whose sentences are reversed and in capitals, binarised by fairseq."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = [f"w{i}" for i in range(60)]
    for split, count in (("train", 600), ("valid", 40)):
        sentences = [[rng.choice(words) for _ in range(rng.randint(3, 9))] for _ in range(count)]
        (folder / f"{split}.a").write_text("".join(" ".join(s) + "\n" for s in sentences))
        (folder / f"{split}.b").write_text("".join(" ".join(s[::-1]).upper() + "\n" for s in sentences))
    prefixes = ["--trainpref", f"{folder}/train", "--validpref", f"{folder}/valid", "--testpref", f"{folder}/valid"]
    subprocess.run(
        [command("fairseq-preprocess"), "-s", "a", "-t", "b", *prefixes, "--destdir", f"{folder}/bin"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return folder / "bin"


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as processes:
        yield processes


@pytest.fixture
def host() -> Iterator[Host]:
    """Another machine: a network namespace."""
    with other_host(Cable()) as host:
        if not host.prefix:
            pytest.skip("no network namespace can be made here, which takes the program ip and the right to use it")
        yield host


@pytest.fixture
def launch(processes: Processes, data: Path) -> Callable[..., tuple[int, str]]:
    """``launch(workers, save_dir, *flags)``: runs ``fairseq-async launch`` to its end."""

    def run(workers: int, save_dir: Path, *flags: object, launcher: Sequence[object] = ()) -> tuple[int, str]:
        return processes.run(launch_command(data, workers, save_dir, *flags, launcher=launcher))

    return run


@pytest.fixture
def alone(processes: Processes, data: Path, tmp_path: Path) -> Callable[..., dict[str, tuple[int, str]]]:
    """``alone(name=[flag, …], …)``: ``fairseq-train`` without a launcher, one after the other in one process.

    Each saves in ``tmp_path / name``, or where it says with ``--save-dir``; returns exit codes and outputs.
    """

    return lambda **jobs: train_alone(processes, data, tmp_path, jobs)


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> Callable[..., str]:
    """``refused(flag, …)``: what ``fairseq-train``, as one of two workers under torchrun, says before it starts."""
    from fairseq_cli import train

    import fairseq_async.fairseq_plugin  # noqa: F401  # the package may have been imported before fairseq

    def run(*flags: object) -> str:
        line = [data, *MODEL, "--user-dir", PACKAGE, "--save-dir", tmp_path, *flags]
        torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in torchrun.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *map(str, line)])
        for name in ("main", "Trainer", "convert_namespace_to_omegaconf"):
            monkeypatch.setattr(train, name, getattr(train, name))
        with pytest.raises(SystemExit) as end:
            train.cli_main()
        lines = capfd.readouterr().err.splitlines()
        said = [text for text in lines if text.startswith("fairseq-async: error:")]
        assert end.value.code == 2 and len(said) == 1, lines[-1]
        return said[0]

    return run


@pytest.fixture
def start_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartServer]:
    """``start_server(workers, restarts)``: a server process; its run directory is ``tmp_path``.

    Its workers share memory with it; a test that is marked with ``BOTH_WAYS`` runs over TCP too.
    """
    started: list[ServerProcess] = []
    host = getattr(request, "param", "127.0.0.1")

    def start(workers: int = 2, restarts: int = 3) -> ServerProcess:
        log = tmp_path / "server.log"
        server = ServerProcess(SGD_SERVER, workers, tmp_path, log, host=host, restarts=restarts)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(params=["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
def start_thread_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartThreadServer]:
    """``start_thread_server(workers)``: a server in a thread of this process; its run directory is ``tmp_path``."""
    started: list[ThreadServer] = []

    def start(workers: int) -> ThreadServer:
        started.append(ThreadServer(workers, tmp_path, request.param))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def recipe_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rules of ``recipes/rules``, in this test and in the processes that it starts."""
    known = dict(OUTER_RULES)
    plugins = [str(ROOT / "recipes" / "rules" / name) for name in ("register.py", "gs_sgd.py")]
    monkeypatch.setenv(PLUGINS, ",".join(plugins))
    yield
    methods._imported.difference_update(plugins)
    OUTER_RULES.clear()
    OUTER_RULES.update(known)
