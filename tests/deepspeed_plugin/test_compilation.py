"""A job that waits for the lock of a compiler that was killed says so."""

import os
import time
from pathlib import Path
from threading import Event, Timer

import pytest

pytest.importorskip("deepspeed")

from fairseq_async.deepspeed_plugin.compilation import locks, waiting_for_compilers  # noqa: E402


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of an hour ago, where torch compiles."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "fused_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_a_lock_counts_from_an_age_on(lock: Path) -> None:
    assert locks(older_than=60) == [lock]
    assert locks(older_than=7200) == []


def test_waiting_for_a_lock_names_the_file_and_the_remedy(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = Event()
    Timer(0.5, said.set).start()
    with waiting_for_compilers(seconds=0.01):
        said.wait(10)
    printed = capsys.readouterr().err
    assert "fused_adam" in printed
    assert f"delete {lock}" in printed


def test_nothing_is_said_where_nothing_is_waited_for(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with waiting_for_compilers(seconds=60):
        pass
    assert capsys.readouterr().err == ""
