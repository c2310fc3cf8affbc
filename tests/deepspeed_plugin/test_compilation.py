"""A job that waits for the lock of a compiler that was killed says so."""

import time
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event, Timer
from unittest.mock import MagicMock

import pytest

pytest.importorskip("deepspeed")

from fairseq_async.deepspeed_plugin import compilation  # noqa: E402
from fairseq_async.deepspeed_plugin.compilation import waiting_for_compilers  # noqa: E402


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock where torch compiles."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "fused_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    return path


def test_waiting_for_a_lock_names_the_file_and_the_remedy(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = Event()
    Timer(0.5, said.set).start()
    with waiting_for_compilers(seconds=0.01):
        said.wait(10)
    printed = capsys.readouterr().err
    assert "fused_adam" in printed
    assert f"delete {lock}" in printed


def test_nothing_is_said_where_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = MagicMock()
    monkeypatch.setattr(compilation, "Timer", timer)
    with waiting_for_compilers():
        assert [each[0] for each in timer.mock_calls] == ["", "().start"]
    assert timer.call_args.args[0] == 60.0, "an operator compiles for about half a minute"
    timer.return_value.cancel.assert_called_once_with()
    assert capsys.readouterr().err == ""


def test_waiting_where_torch_distributed_starts_is_said_too(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On CPUs, DeepSpeed compiles an operator there, before any engine."""
    initialize = import_module("fairseq_async.deepspeed_plugin.initialize")  # the package has a function of this name
    monkeypatch.setattr(initialize, "waiting_for_compilers", partial(waiting_for_compilers, 0.01))
    monkeypatch.setattr(initialize.deepspeed, "init_distributed", lambda: time.sleep(0.5))
    monkeypatch.setattr(initialize, "unlink_reduction_buffer", removed := MagicMock())
    initialize._init_distributed()
    assert f"delete {lock}" in capsys.readouterr().err and removed.called
