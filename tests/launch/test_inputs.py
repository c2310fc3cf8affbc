"""Wrong inputs of ``fairseq-train`` are one line of the launcher's, before a process is started."""

import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from fairseq_async import cli
from fairseq_async.errors import ConfigurationError
from fairseq_async.launch import synchronous
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.command.inputs import check_inputs
from fairseq_async.launch.launcher import Launcher
from fairseq_async.launch.processes import RunFailedError
from fairseq_async.launch.synchronous import GroupLauncher
from tests.helpers.stand_ins import Time

Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """``made(name, …)``: a directory with these files, empty."""

    def make(*names: str) -> Path:
        (tmp_path / "data").mkdir(exist_ok=True)
        for name in names:
            (tmp_path / "data" / name).touch()
        return tmp_path / "data"

    return make


PAIR = "train.de-en.de.bin", "dict.de.txt", "dict.en.txt", "valid.de-en.de.bin"


@pytest.mark.parametrize(
    ("files", "flags", "said"),
    [
        ((), [], "no training set of two languages there (train.SRC-TGT.*); make it with fairseq-preprocess"),
        (PAIR[:2], [], "no dictionary there (dict.en.txt)"),
        (PAIR, ["-s", "de", "-t", "fr"], "no dictionary there (dict.fr.txt)"),
        (PAIR, ["--target-lang", "fr", "--source-lang=de"], "no dictionary there (dict.fr.txt)"),
        (PAIR, ["--train-subset", "train1"], "no training set there (train1.*)"),
        ((), ["--task", "language_modeling"], "no dictionary there (dict.txt)"),
        (("dict.txt",), ["--task", "language_modeling"], "no training set there (train.*)"),
        (PAIR[:3], [], "no validation set there (valid.*); make it with fairseq-preprocess"),
        (PAIR, ["--valid-subset", "valid,valid2"], "no validation set there (valid2.*)"),
        (("dict.txt", "train.bin"), ["--task", "language_modeling"], "no validation set there (valid.*)"),
    ],
)
def test_data_that_is_not_there_names_the_file_and_how_it_is_made(
    made: Made, files: tuple[str, ...], flags: list[str], said: str
) -> None:
    data = made(*files)
    with pytest.raises(ConfigurationError) as error:
        check_inputs("hybrid_async", [str(data), *flags])
    assert str(error.value).startswith(f"{data}: {said}") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("files", "flags"),
    [
        (PAIR, []),
        (PAIR, ["-s", "de", "-t", "en", "--inner-optimizer", "nag"]),
        (PAIR, ["-s", "de"]),  # the files say the other
        (PAIR, ["-t", "en"]),
        (PAIR, ["--finetune-from-model", "s3://bucket/model.pt"]),
        (("dict.txt", "train.bin", "valid.bin"), ["--task", "language_modeling"]),
        (PAIR[:3], ["--disable-validation"]),
        ((), ["--task", "masked_lm"]),  # its files may have other names
    ],
)
def test_what_may_be_right_is_left_to_fairseq(made: Made, files: tuple[str, ...], flags: list[str]) -> None:
    check_inputs("hybrid_async", [str(made(*files)), *flags])


def test_each_of_several_directories_is_checked(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere: no such directory of data"):
        check_inputs("local_sgd", [f"{made(*PAIR)}:{tmp_path / 'nowhere'}"])


def test_dictionaries_may_be_in_the_first_of_several_directories_alone(made: Made, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    with pytest.raises(ConfigurationError, match="more: no training set there"):
        check_inputs("local_sgd", [f"{made(*PAIR)}:{tmp_path / 'more'}"])
    (tmp_path / "more" / "train.de-en.de.bin").touch()
    check_inputs("local_sgd", [f"{made(*PAIR)}:{tmp_path / 'more'}"])


def test_an_unknown_inner_optimizer_is_refused_unless_the_user_may_have_registered_it(
    made: Made, tmp_path: Path
) -> None:
    command = [str(made(*PAIR)), "--inner-optimizer", "adamw"]
    with pytest.raises(ConfigurationError, match="^--inner-optimizer adamw: hybrid_async has adadelta, adafactor, "):
        check_inputs("hybrid_async", command)
    check_inputs("hybrid_async", [*command, "--user-dir", str(tmp_path)])
    with pytest.raises(ConfigurationError, match="none: no such directory"):
        check_inputs("hybrid_async", [*command, "--user-dir", str(tmp_path / "none")])


@pytest.mark.parametrize("given", ["other/checkpoint_last.pt", "checkpoint3.pt"])
def test_a_checkpoint_of_another_run_that_is_not_there_is_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """fairseq would train from the beginning, and write over the run in --save-dir."""
    monkeypatch.chdir(tmp_path)
    command = [str(made(*PAIR)), "--save-dir", "run", "--restore-file", given]
    with pytest.raises(ConfigurationError, match=f"^--restore-file {given}: no such file$"):
        check_inputs("hybrid_async", command)
    (tmp_path / "other").mkdir()
    (tmp_path / given).touch()
    check_inputs("hybrid_async", command)


@pytest.mark.parametrize(
    "given",
    [
        ["--restore-file", "run/checkpoint_last.pt"],  # not there at the first start
        ["--restore-file", "checkpoint_last.pt"],  # that in --save-dir
        ["--restore-file", "s3://models/checkpoint.pt"],
        ["--restore-file", "other/checkpoint.pt", "--checkpoint-suffix=-half"],
    ],
)
def test_a_checkpoint_that_may_be_right_is_left_to_fairseq(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoint-half.pt").touch()
    check_inputs("local_sgd", [str(made(*PAIR)), "--save-dir", "run", *given])


@pytest.mark.parametrize("suffix", ["", "-half"])
def test_a_model_to_fine_tune_that_is_not_there_is_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Where the tuning has a checkpoint of its own, fairseq goes on from that, and the model may be gone."""
    monkeypatch.chdir(tmp_path)
    own, model = [str(made(*PAIR)), "--save-dir", "run", f"--checkpoint-suffix={suffix}"], "--finetune-from-model"
    command = [*own, model, "model.pt"]
    with pytest.raises(ConfigurationError, match="^--finetune-from-model model.pt: no such file$"):
        check_inputs("hybrid_async", command)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"checkpoint_last{suffix}.pt").touch()
    check_inputs("hybrid_async", command)
    check_inputs("hybrid_async", [*own, model, "s3://models/model.pt"])


@pytest.mark.parametrize("method", ["hybrid_async", "local_sgd", "adasum", "adascale"])
def test_the_launcher_says_it_before_it_starts_or_writes_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, method: str
) -> None:
    monkeypatch.setattr(Launcher, "run", lambda _: pytest.fail("it was started"))
    monkeypatch.chdir(tmp_path)
    job = ["fairseq-train", "nowhere", "--optimizer", method, "--inner-optimizer", "sgd"]
    monkeypatch.setattr(sys, "argv", ["fairseq-async", "launch", "--workers", "2", "--", *job])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("fairseq-async: error: nowhere: no such directory of data; make it")
    assert said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_command_without_a_model_is_one_line(made: Callable[..., Path]) -> None:
    job = ["fairseq-train", str(made(*PAIR)), "--optimizer", "hybrid_async"]
    with pytest.raises(ConfigurationError, match="^--arch is missing: give the name of a model, as --arch t"):
        WorkerCommand(job).check_inputs()
    for given in (["--arch", "transformer"], ["-a", "lstm"], ["--arc=lstm"], ["--user-dir", "."]):
        WorkerCommand([*job, *given]).check_inputs()


def test_a_port_of_ranks_that_is_taken_is_one_line_before_they_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers are those of the tests
    command = WorkerCommand(["fairseq-train", "data", "--optimizer", "adasum", "--save-dir", str(tmp_path / "run")])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"^port {port} \(--port\) cannot be used: "):
            GroupLauncher(command, 2, port).run()
    assert not (tmp_path / "run").exists()


def test_a_directory_of_ranks_that_cannot_be_made_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers are those of the tests
    (tmp_path / "file").touch()
    save_dir = tmp_path / "file" / "run"
    command = WorkerCommand(["fairseq-train", "data", "--optimizer", "adasum", "--save-dir", str(save_dir)])
    with pytest.raises(ConfigurationError, match=rf"^{save_dir} \(--save-dir\) cannot be made: Not a directory"):
        GroupLauncher(command, 2, 0).run()


def test_of_ranks_that_failed_one_that_was_killed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others end because it is gone."""
    monkeypatch.setattr(synchronous, "_DYING", 0.1)
    command = WorkerCommand(["fairseq-train", "data", "--optimizer", "adasum", "--save-dir", str(tmp_path)])
    launcher = GroupLauncher(command, 3, 0)
    try:
        for worker, what in zip(launcher.processes.workers, ("exit 1", "kill -9 $$", "exec sleep 60"), strict=True):
            monkeypatch.setattr(command, "line", lambda _, what=what: ["sh", "-c", what])
            launcher.processes.start(worker, None, {})
        launcher.processes.wait(10.0, [0, 1])
        with pytest.raises(RunFailedError, match="worker 1 was killed by SIGKILL"):
            launcher._watch()
    finally:
        launcher.processes.end()


def test_ranks_that_go_on_are_told_of_every_ten_seconds_and_have_ten_to_end_after_one_has_died(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = WorkerCommand(["fairseq-train", "data", "--optimizer", "adasum", "--save-dir", str(tmp_path)])
    launcher, time, said, waits = GroupLauncher(command, 2, 0), Time(0.0), list[float](), list[float]()
    monkeypatch.setattr(synchronous, "time", time)
    monkeypatch.setattr(synchronous, "_say", lambda text: said.append(time.now))
    first, second = launcher.processes.workers
    first.process = MagicMock(poll=lambda: None)
    second.process = MagicMock(poll=lambda: None if time.now < 35.0 else 3, returncode=3)
    monkeypatch.setattr(launcher.processes, "wait", waits.append)
    monkeypatch.setattr(launcher.processes, "describe_end", lambda worker: f"worker {worker.id} died")
    monkeypatch.setattr(launcher.processes, "end", lambda: None)
    with pytest.raises(RunFailedError, match="worker 1 died"):
        launcher._watch()
    assert said == pytest.approx([10.0, 20.0, 30.0], abs=0.3) and waits == [10.0]
