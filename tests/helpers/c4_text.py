"""A small text in shards such as C4's."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

WORDS = "the cat saw a dog under that old tree while rain fell on roofs and nobody came".split()
TRAIN_TEXT = [f"{' '.join(WORDS[i % 7 :])}.\nStory {i} ends: {' '.join(WORDS[: i % 11 + 1])}." for i in range(300)]
VALIDATION_TEXT = [f"Another {' '.join(WORDS[i % 5 : 9])}, número {i} – 東京." for i in range(40)]


def write(path: Path, texts: Iterable[str]) -> Path:
    """A shard of JSON lines, packed where its name says so."""
    lines = "".join(json.dumps({"text": each, "url": "u"}, ensure_ascii=False) + "\n" for each in texts).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path
