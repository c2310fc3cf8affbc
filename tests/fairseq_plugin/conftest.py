"""Workers in fairseq in the process of the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fairseq_trainers import Trainers


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Trainers]:
    made = Trainers(monkeypatch, tmp_path)
    yield made
    made.end()
