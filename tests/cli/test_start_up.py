"""What ``fairseq-async`` answers before anything slow is imported."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import fairseq_async
from fairseq_async import cli
from fairseq_async.cli import program
from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.join import _line
from tests.helpers.commands import ROOT

SCRIPT = """
import sys
from fairseq_async import cli
sys.argv = ["fairseq-async", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as end:
    slow = [name for name in ("torch", "fairseq", "deepspeed", "matplotlib") if name in sys.modules]
    print("code", end.code, "imported", slow)
"""
JOB = ["--", "fairseq-train", "data", "--optimizer"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "Asynchronous training of Transformers"),
        (["--version"], 0, f"fairseq-async {fairseq_async.__version__}\n"),
        (["launch", "--help"], 0, "Number of workers on this machine"),
        (["launch", "--no-such-flag"], 2, "No such option"),
        (["launch", "--workers"], 2, "requires an argument; fairseq-async launch --help has the options"),
        (["lunch"], 2, "Did you mean 'launch'? fairseq-async --help has the options"),
        (["launch", "--workers", "2", *JOB, "local_sgd", "--outer", "adagrad"], 2, "--outer: Input should be 'diloco'"),
        (["launch", "--workers", "2", *JOB, "hybrid_async", "--look-ahead", "x"], 2, "--look-ahead: must be auto, off"),
        (["launch", "--workers", "2", *JOB, "adasum", "--adasum-form", "x"], 2, "--adasum-form: Input should be"),
        (
            ["launch", "--workers", "2", "--slowdown", "fast", *JOB, "local_sgd"],
            2,
            "--slowdown fast: give numbers separated by commas",
        ),
        (["launch", "--workers", "2", "--host", "::", *JOB, "local_sgd"], 2, "--host ::: IPv6 addresses are not"),
        (["join", "[::1]:29400", "--token-file", __file__, *JOB, "local_sgd"], 2, "[::1]:29400: IPv6 addresses are"),
        (["join", "a", "--token-file", __file__, *JOB, "local_sgd"], 2, "a: an address is written HOST:PORT"),
        (
            ["join", "a:1", "--token-file", "none", *JOB, "local_sgd"],
            2,
            "none: cannot be read: No such file or directory",
        ),
        (
            ["join", "127.0.0.1:1", "--token-file", ".", *JOB, "local_sgd"],
            2,
            "error: --token-file .: cannot be read: Is",
        ),
        (["simulate", "none.yaml"], 2, "none.yaml cannot be read: No such file or directory"),
        (["audit", "none"], 2, "none: there is no events.jsonl"),
        (
            ["capacity", "none"],
            2,
            "none: no run that can be read there (run.json): No such file or directory; give the",
        ),
        (["report", "none"], 2, "none: no run and no simulation there (no run.json); give the --run-dir or --save-dir"),
        (["watch", "none"], 2, "none: no run there yet (run.json: No such file or directory); give the --run-dir or"),
        (["replay", "none"], 2, "none: no run there; give the --run-dir or --save-dir of a run"),
        (["export", "none", "out"], 2, "none: No such file or directory; give the directory of a run"),
        (["user-dir"], 0, str(ROOT / "fairseq_async")),
    ],
)
def test_help_a_wrong_flag_and_a_missing_file_need_no_torch(
    tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    line = [sys.executable, "-c", SCRIPT, *arguments]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
    assert said in ended.stdout + ended.stderr
    assert f"code {code} imported []" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["launch", "--workers", "2", *JOB, "local_sgd", "--save-dir", ""], "--save-dir is empty"),
        (
            ["launch", "--workers", "2", *JOB, "local_sgd", "--tls", ""],
            "--optimizer local_sgd: --tls: give a path, or",
        ),
        (
            ["launch", "--workers", "2", *JOB, "local_sgd", "--run-dir="],
            "--optimizer local_sgd: --run-dir: give a path",
        ),
        (["launch", "--workers", "2", "--tls", "", "--", "python", "x.py"], "--tls is empty: give a value, or leave"),
        (["launch", "--token-file=", "--workers", "2", "--", "python", "x.py"], "--token-file is empty: give a value"),
        (["launch", "--workers", "2", "--", "fairseq-generate", "x"], "fairseq-generate: only a training has workers"),
        (["launch", "--workers", "2", "--", ""], "(empty): no such program"),
        (["capacity", ".", "--shards", "1.5,1.4,1"], "--shards 1.5,1.4,1: whole numbers of at least 1 with commas"),
        (["capacity", ".", "--shards", "0"], "--shards 0: whole numbers of at least 1 with commas"),
        (["capacity", ".", "--parameters", "0.3"], "--parameters 0.3: whole numbers of at least 1 with commas"),
        (["capacity", ".", "--link", "0"], "--link 0: numbers above 0 with commas"),
        (
            ["capacity", ".", "--link", "1:-5"],
            "--link 1:-5: numbers above 0 with commas between them, as 10, or 0.1:50",
        ),
        (["replay", "circle"], "{here}/circle: no run there; give the --run-dir"),
    ],
)
def test_a_mistake_in_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    said: str,
) -> None:
    (tmp_path / "run.json").touch()
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fairseq-async", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    error, expected = capsys.readouterr().err, f"fairseq-async: error: {said.format(here=tmp_path)}"
    assert end.value.code == 2 and error.startswith(expected) and error.count("\n") == 1


def test_too_few_open_files_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def app(*given: object, **options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(program, "app", app)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (12, 4096))
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = "fairseq-async: error: this process may have 12 open files at a time, which is not enough: ulimit -n 1024"
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_a_rank_of_a_synchronous_method_cannot_be_joined() -> None:
    with pytest.raises(ConfigurationError, match="^join: a synchronous method has no server to join"):
        _line(["fairseq-train", "data", "--optimizer", "adasum"], 1)


@pytest.mark.usefixtures("executed")  # a fork has imported it all
def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run([sys.executable, "-m", "fairseq_async"], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_the_package_is_a_program_too(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "fairseq_async", "audit", "none"]
    ended = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert ended.returncode == 2 and ended.stderr.startswith("fairseq-async: error: none: there is no events.jsonl")


def test_help_is_shown_where_the_terminal_lacks_a_character() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    line = [sys.executable, "-m", "fairseq_async", "launch", "--help"]
    ended = subprocess.run(line, capture_output=True, encoding="latin-1", env=environment)
    assert ended.returncode == 0 and "A,B,?" in ended.stdout, ended.stderr


def test_a_working_directory_that_was_removed_is_one_line(tmp_path: Path) -> None:
    line = f"rmdir {tmp_path} && exec {sys.executable} -m fairseq_async audit none"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert ended.returncode == 2 and ended.stderr.splitlines()[-1].startswith(
        "fairseq-async: error: the working directory"
    )


@pytest.mark.parametrize(("argument", "unbuffered"), [("--help", "1"), ("user-dir", "")])
def test_output_that_finds_no_room_is_one_line_and_one_that_nobody_reads_is_none(
    argument: str, unbuffered: str
) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    reader, pipe = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    no_room = "fairseq-async: error: the output cannot be written: its disk is full; make room there\n"
    for output, said in ((full, no_room), (pipe, "")):
        line = [sys.executable, "-m", "fairseq_async", argument]
        ended = subprocess.run(line, stdout=output, stderr=subprocess.PIPE, text=True, env=environment)
        os.close(output)
        assert (ended.returncode, ended.stderr) == (1, said)


def test_every_argument_and_option_is_explained_in_a_sentence() -> None:
    for name, command in get_command(program.app).commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            assert text.endswith("."), (name, parameter.name, text)
            assert text.startswith("fairseq-train") or text[:1].isupper(), (name, parameter.name, text)


def test_the_command_by_its_module_imports_nothing_else_from_the_working_directory(
    tmp_path: Path, executed: None
) -> None:
    for name in ("queue", "random", "typer"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the module of this project')\n")
    line = [sys.executable, "-m", "fairseq_async", "launch", "--workers", "1", *JOB, "adasum", "--adasum-form", "x"]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2 and "--adasum-form: Input should be" in ended.stderr, ended.stderr
