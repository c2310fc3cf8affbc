"""What ``job.py`` has come to with each front end, which runs once for all the tests that need it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.helpers.commands import DEEPSPEED, FRONT_ENDS, Processes, command


class Ended(NamedTuple):
    """A worker: its exit code, the lines that say why, and where it has come to its end, the parameters that each batch
    found, and the last ones; ``files`` begins the names of what it left."""

    code: int
    errors: list[str]
    output: str
    trace: Tensor | None
    files: Path


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """``ended(front_end, case, method, worker)``."""

    @cache
    def run(front_end: str) -> Path:
        out = tmp_path_factory.mktemp(front_end)
        line = [command("python"), "-m", "tests.helpers.contract.job", front_end, out]
        with Processes() as processes:
            code, output = processes.run(line, seconds=600, **FRONT_ENDS.get(front_end, DEEPSPEED))
        assert code == 0, output[-3000:]
        return out

    def of(front_end: str, case: str, method: str, worker: int = 0) -> Ended:
        files = run(front_end) / f"{case}.{method}"
        path = f"{files}-{worker}"
        output, saved = Path(f"{path}.log").read_text(), Path(f"{path}.pt")
        trace = torch.load(saved, weights_only=True)["trace"] if saved.exists() else None
        errors = [text for text in output.splitlines() if "error: " in text]
        return Ended(int(Path(f"{path}.code").read_text()), errors, output, trace, files)

    return of
