"""Reads documents from a directory of shards, or C4 over the network, and splits them into training and validation."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from recipes.steps import RecipeError, once

TRAIN, VALIDATION = SPLITS = ("train", "validation")
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")  # C4's own files are called .json.gz
HELD_OUT = 50  # without a validation file, one document in 50 is held out
DIGESTED = 1 << 20  # bytes at each end of a file
STREAMED = 50_000  # documents of C4 that a run downloads by default


@dataclass(frozen=True)
class Corpus:
    """The shards of both splits. No training document is also a validation document, whatever the files hold.

    Where there is no validation file, the hash of a document's text decides whether it is held out, so that all
    copies of a document are on one side, in every run.
    """

    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    limit: int | None = None

    def documents(self, split: str) -> Iterator[str]:
        """Return the texts of a split, at most `limit` for training and a tenth of that for validation."""
        texts = self._validation() if split == VALIDATION else self._train()
        limit = self.limit if split == TRAIN or self.limit is None else max(1, self.limit // 10)
        return islice(texts, limit)

    def _validation(self) -> Iterator[str]:
        if self.validation:
            return read(self.validation)
        return (text for text in read(self.train) if held_out(text))

    def _train(self) -> Iterator[str]:
        if not self.validation:
            return (text for text in read(self.train) if not held_out(text))
        known = {digest(text) for text in self.documents(VALIDATION)}
        return (text for text in read(self.train) if digest(text) not in known)

    def source(self) -> dict[str, Any]:
        """Return what identifies this text without reading all of it: names, sizes and digests of its files, the limit.

        The time of a file does not: another machine, or a new copy, has another one.
        """
        files = [[path.name, path.stat().st_size, digest_of_ends(path)] for path in self.train + self.validation]
        return {"files": files, "documents": self.limit}


def digest_of_ends(path: Path) -> str:
    """Return a hash of the first and of the last mebibyte of a file."""
    with path.open("rb") as file:
        first = file.read(DIGESTED)
        file.seek(max(0, path.stat().st_size - DIGESTED))
        return blake2b(first + file.read(DIGESTED), digest_size=16).hexdigest()


def digest(text: str) -> bytes:
    """Return a hash of the text, without the blanks around it."""
    return blake2b(text.strip().encode(), digest_size=16).digest()


def held_out(text: str) -> bool:
    """Return whether a document belongs to validation in a corpus that has no validation file."""
    return int.from_bytes(digest(text), "big") % HELD_OUT == 0


def find(data: Path, limit: int | None = None) -> Corpus:
    """Return the shards of a directory: those with "valid" in their names are validation, the others training."""
    if not data.is_dir():
        raise RecipeError(f"--data {data}: there is no such directory")
    shards = [path for path in sorted(data.iterdir()) if path.is_file() and path.name.lower().endswith(SUFFIXES)]
    validation = tuple(path for path in shards if "valid" in path.name.lower())
    train = tuple(path for path in shards if path not in validation)
    if not train:
        what = "only validation files" if validation else "no shards"
        raise RecipeError(f"--data {data}: {what} there; needed are training files ending in {', '.join(SUFFIXES)}")
    return Corpus(train, validation, limit)


def read(shards: tuple[Path, ...]) -> Iterator[str]:
    """Yield the texts of these files, one after another; blank texts are left out."""
    for shard in shards:
        rows = parquet_rows(shard) if shard.suffix.lower() == ".parquet" else json_rows(shard)
        empty = True
        for where, record in rows:
            empty = False
            text = checked(record, where)
            if text.strip():
                yield text
        if empty:
            raise RecipeError(f"{shard}: no documents in it")


def checked(text: object, where: str) -> str:
    """Return a record's text; raise if it is not a string or cannot be encoded as UTF-8."""
    if not isinstance(text, str):
        raise RecipeError(f'{where}: no "text" in this record' if text is None else f'{where}: "text" is not a string')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RecipeError(f'{where}: "text" holds half a character (an unpaired surrogate)') from None
    return text


def json_rows(shard: Path) -> Iterator[tuple[str, object]]:
    """Yield the place (file and line) and the text of each record of a JSON lines file."""
    number, openers = 0, {".gz": gzip.open}
    try:
        with openers.get(shard.suffix.lower(), open)(shard, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield f"{shard}, line {number}", text_of(line, f"{shard}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise RecipeError(f"{shard}, after line {number}: broken or cut off ({error})") from None


def text_of(line: bytes, where: str) -> object:
    """Return the text in one line of JSON; None if the record has none."""
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise RecipeError(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise RecipeError(f'{where}: not a JSON object with a "text"')
    return record.get("text")


def parquet_rows(shard: Path) -> Iterator[tuple[str, object]]:
    """Yield the place (file and row) and the text of each record of a parquet file, read part by part."""
    number = 0
    try:
        with closing(parquet.ParquetFile(shard)) as file:
            if "text" not in file.schema_arrow.names:
                raise RecipeError(
                    f'{shard}: no column "text" in it (its columns: {", ".join(file.schema_arrow.names)})'
                )
            for batch in file.iter_batches(1024, columns=["text"]):
                for text in batch.column(0):
                    number += 1
                    yield f"{shard}, row {number}", text.as_py()
    except (OSError, pyarrow.ArrowException) as error:
        raise RecipeError(f"{shard}, after row {number}: broken or cut off ({error})") from None


def stream(out: Path, limit: int) -> Path:
    """Download the first documents of C4's English part into `out`; a later call with the same `limit` reuses them."""

    def fetch(directory: Path) -> None:
        for split, count in ((TRAIN, limit), (VALIDATION, max(1, limit // 10))):
            with gzip.open(directory / f"c4-{split}.jsonl.gz", "wt", encoding="utf-8", compresslevel=6) as file:
                for record in islice(c4(split), count):
                    file.write(json.dumps({"text": record["text"]}, ensure_ascii=False) + "\n")

    try:
        return once(out / f"c4-{limit}", fetch)
    except RecipeError:
        raise
    except Exception as error:  # the network, the hub and its library raise many types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(
            f"cannot fetch allenai/c4 ({reason}): give a directory of .jsonl.gz or .parquet shards with --data"
        ) from None


def c4(split: str) -> Iterator[dict[str, Any]]:
    """Return the records of C4, streamed from the hub."""
    from huggingface_hub import HfApi, logging  # only here: a run with --data needs neither
    from huggingface_hub.errors import HfHubHTTPError

    logging.set_verbosity_error()
    try:
        HfApi().dataset_info("allenai/c4", timeout=20)  # fails at once; load_dataset would try for half a minute
    except HfHubHTTPError:
        pass  # the network works: the library's own error says what is wrong
    from datasets import load_dataset

    return iter(load_dataset("allenai/c4", "en", split=split, streaming=True))
