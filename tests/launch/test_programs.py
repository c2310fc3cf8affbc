"""Programs that the system cannot execute, though their files are there."""

import signal
import socket
import sys
from pathlib import Path

import pytest

from fairseq_async import cli
from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.command import WorkerCommand, without_beginning
from fairseq_async.launch.command.programs import is_fairseq, numbers_of_ranks
from fairseq_async.launch.join import join
from fairseq_async.options.addresses import free_port, is_loopback
from tests.helpers.slurm import SLURM


@pytest.mark.parametrize(
    ("text", "why"),
    [("echo hello\n", "Exec format error"), ("#!/no/such/python\n", "No such file or directory")],
    ids=["no first line", "no such interpreter"],
)
@pytest.mark.parametrize("command", ["launch", "worker", "join"])
def test_a_script_that_cannot_be_executed_is_one_line_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    text: str,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers are those of the tests
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train").write_text(text)
    (tmp_path / "train").chmod(0o700)
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        flags = {"launch": ["--workers", "1"], "worker": [], "join": [address, "--token-file", "token"]}[command]
        monkeypatch.setattr(sys, "argv", ["fairseq-async", command, *flags, "--", str(tmp_path / "train")])
        with pytest.raises(SystemExit) as end:
            cli.main()
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert end.value.code == 2 and f"{tmp_path / 'train'} cannot be executed: {why}; " in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["token", "train"]


def test_a_worker_that_joins_before_its_server_listens_says_so_and_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The worker itself tries again for ``server_timeout``."""
    started: list[str] = []
    monkeypatch.setattr("os.execve", lambda path, line, variables: started.append(variables["FAIRSEQ_ASYNC_SERVER"]))
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    address = f"127.0.0.1:{free_port()}"
    join(address, [sys.executable, "train.py"], tmp_path / "token", None)
    assert started == [address]
    assert f"{address}: no server there (Connection refused); trying again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "workers", "numbers"),
    [("2", 3, [2, 2, 2]), ("1,2,3", 3, [1, 2, 3]), ("4", 1, [4])],
)
def test_ranks_are_one_number_for_all_workers_or_one_for_each(given: str, workers: int, numbers: list[int]) -> None:
    assert numbers_of_ranks(given, workers) == numbers


@pytest.mark.parametrize("given", ["0", "1,2", "1,2,3,4", "1,0,2", "1,-1,2", "two", "", "1,,2"])
def test_other_numbers_of_ranks_are_one_line(given: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--ranks-per-worker {given}: .* each of the 3 workers: 2,1$"):
        numbers_of_ranks(given, 3)


def test_a_size_of_the_world_is_that_of_each_worker() -> None:
    given = ["fairseq-train", "data", "--optimizer", "hybrid_async", "--distributed-world-size", "2"]
    for ranks in ([2, 1], [1, 1]):
        with pytest.raises(ConfigurationError, match="^--distributed-world-size is 2, and --ranks-per-worker "):
            WorkerCommand(given, 2, ranks=ranks)
    assert "--distributed-world-size" not in WorkerCommand(given, 2, ranks=[2, 2]).line("there:1")[len(given) :]


@pytest.mark.parametrize(
    ("host", "is_near"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("localhost", True), ("0.0.0.0", False), ("node1", False)],
)
def test_what_no_other_machine_can_reach_is_a_loopback_address(host: str, is_near: bool) -> None:
    assert is_loopback(host) == is_near


def test_a_command_that_is_to_go_on_has_nothing_left_of_where_it_began() -> None:
    begins = ["--restore-file", "a.pt", "--reset-optimizer", "--restore-file=b.pt", "--reset-dataloader"]
    keeps = [
        "fairseq-train",
        "data",
        "--lr",
        "0.1",
        "--save-dir",
        "a.pt",
        "--reset-meters",
        "--finetune-from-model",
        "c",
    ]
    assert without_beginning([*keeps[:2], *begins, *keeps[2:], "--reset-lr-scheduler"]) == keeps


@pytest.mark.parametrize(
    ("given", "resumes"),
    [
        (["--restore-file", "a.pt"], False),
        (["--restore-file=a.pt"], False),
        (["--reset-optimizer"], False),
        (["--reset-meters"], True),
        (["--finetune-from-model=a.pt"], True),
        (["--save-dir", "a"], True),
    ],
)
def test_a_command_that_says_where_to_begin_goes_on_from_no_snapshot(given: list[str], resumes: bool) -> None:
    assert WorkerCommand(["fairseq-train", "data", "--optimizer", "hybrid_async", *given]).resumes is resumes


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["fairseq-train", "data"], True),
        (["/opt/bin/fairseq-train", "data", "--optimizer", "adam"], True),
        (["train.sh", "data", "--optimizer", "local_sgd"], True),
        (["train.sh", "--optimizer=hybrid_async"], True),
        (["train.sh", "--optimizer", "adam"], False),
        (["train.sh", "--optimizer"], False),
        (["train.sh", "local_sgd"], False),
        (["python", "train.py"], False),
    ],
)
def test_a_command_is_fairseqs_by_its_name_or_by_a_method_of_ours(line: list[str], found: bool) -> None:
    assert is_fairseq(line) == found


@pytest.mark.parametrize("line", [[], ["fairseq-hydra-train", "x"], ["fairseq-generate", "--optimizer", "local_sgd"]])
def test_a_program_that_trains_nothing_here_is_refused(line: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="fairseq-train"):
        is_fairseq(line)
