"""Files of a server's state on a full disk."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.errors import RefusedError
from fairseq_async.server.run_files.state_files import write_state


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
