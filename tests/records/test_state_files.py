"""Files of a server's state on a full disk."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.errors import BrokenFileError, RefusedError
from fairseq_async.records.recording import record_vector
from fairseq_async.records.snapshots import Snapshots
from fairseq_async.records.state_files import load_checked, write_state


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_half_of_a_state_does_not_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception) -> None:
    """It would keep the last room that a full disk has."""

    def full(state: Any, file: Any) -> None:
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RefusedError, match="the server's state cannot be written to"):
        write_state(tmp_path / "state.pt", {})
    assert not list(tmp_path.iterdir())
    with pytest.raises(type(error)):
        record_vector(tmp_path / "merges" / "version-1.pt", torch.zeros(3))
    assert not list((tmp_path / "merges").iterdir())


@pytest.mark.usefixtures("small_files")
def test_the_systems_error_is_told_and_not_the_one_that_torch_raises_behind_it(tmp_path: Path) -> None:
    state, told = {"parameters": torch.zeros(1 << 18)}, list[str]()
    with pytest.raises(RefusedError, match="cannot be written to .*state.pt: .*File too large"):
        write_state(tmp_path / "state.pt", state)
    Snapshots(tmp_path, tell=told.append).take_last(state, 1)
    (line,) = told
    assert line.startswith("the last snapshot could not be written: ") and "File too large" in line


@pytest.mark.parametrize("content", [b"", b"abc"], ids=["empty", "shorter than a checksum"])
def test_a_state_that_was_cut_at_its_very_beginning_is_broken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(BrokenFileError):
        load_checked(tmp_path / "state.pt")
