"""Results of a long benchmark, kept in a file: one that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

Outcome = TypeVar("Outcome")


class Kept(dict[str, Outcome]):
    """Outcomes by key. The file has a line for each; they are read at the start.

    Args:
        file: the file; its directory is made if it is not there.
        kind: the type of an outcome: a number, or a dataclass, also of dataclasses.
    """

    def __init__(self, file: Path, kind: type[Outcome]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._type = file, TypeAdapter[Any](kind)
        for line in file.read_text().splitlines() if file.exists() else []:
            read = json.loads(line)
            self[read["key"]] = self._type.validate_python(read["outcome"])

    def keep(self, key: str, outcome: Outcome) -> None:
        """Adds an outcome, here and in the file."""
        self[key] = outcome
        with self._file.open("a") as file:
            file.write(json.dumps({"key": key, "outcome": self._type.dump_python(outcome)}) + "\n")
