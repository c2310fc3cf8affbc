"""Programs that the system cannot execute, though their files are there."""

import signal
import socket
import sys
from pathlib import Path

import pytest

from fairseq_async import cli
from fairseq_async.launch.join import join
from tests.helpers.commands import free_port
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
