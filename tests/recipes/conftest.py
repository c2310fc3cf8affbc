"""A small text in shards, and its tokens."""

from pathlib import Path

import pytest

from recipes.c4_lm import text, tokens
from recipes.c4_lm.tokens import Prepared
from tests.helpers.c4_text import TRAIN_TEXT, VALIDATION_TEXT, write


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write(directory / "c4-train.00000-of-00002.json.gz", TRAIN_TEXT[:200])
    write(directory / "c4-train.00001-of-00002.jsonl", TRAIN_TEXT[200:])
    write(directory / "c4-validation.00000-of-00001.json.gz", VALIDATION_TEXT)
    return directory


@pytest.fixture(scope="session")
def prepared(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return tokens.prepare(text.find(data), 320, tmp_path_factory.mktemp("out"))
