"""Gets the sentences of Multi30k from the user's directory, the data set's site, or a local copy."""

from __future__ import annotations

import gzip
import shutil
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from recipes.steps import RecipeError, once

SITE = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
NEARBY = Path(__file__).resolve().parents[3] / "shared" / "data" / "multi30k"
PAIR = ("en", "de")
RAW_FILES = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
BPE_FILES = {"train": "train", "valid": "valid", "test": "test.2016"}


def corpus(data: Path | None, files: Mapping[str, str], out: Path) -> Path:
    """Unpack the corpus into `out`; `files` maps train, valid and test to its file names."""

    def unpack(directory: Path) -> None:
        packed = data or fetch(out)
        for split, language in ((s, language) for s in files for language in PAIR):
            source = packed / f"{files[split]}.{language}.gz"
            if not source.exists():
                names = ", ".join(files.values())
                raise RecipeError(f"--data: {source} is missing; needed are .en.gz and .de.gz of {names}")
            with gzip.open(source) as lines, (directory / f"{split}.{language}").open("wb") as target:
                shutil.copyfileobj(lines, target)

    return once(out / "text", unpack)


def fetch(out: Path) -> Path:
    """Download the corpus into `out`; without a network, use the local copy."""

    def download(directory: Path) -> None:
        for name in (f"{stem}.{language}.gz" for stem in RAW_FILES.values() for language in PAIR):
            with urllib.request.urlopen(f"{SITE}/{name}", timeout=20) as source:
                (directory / name).write_bytes(source.read())

    try:
        return once(out / "download", download)
    except OSError as error:
        if NEARBY.is_dir():
            return NEARBY
        raise RecipeError(
            f"cannot fetch Multi30k from {SITE} ({error}): name a directory that holds it with --data"
        ) from None
