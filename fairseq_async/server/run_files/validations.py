"""``validations.jsonl``: one line for every validation of the server's parameters by worker 0."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fairseq_async.server.run_files.finite import finite

VALIDATIONS = "validations.jsonl"


@dataclass(frozen=True)
class Validation:
    """One validation.

    Attributes:
        time: seconds since 1970.
        updates: of the server so far, as the front end counts them.
        loss: mean, in the front end's unit; None where it was not finite.
        metric: name of the score beside the loss, such as ``bleu``; None where there is none.
        score: its value.
    """

    time: float
    updates: int
    epoch: int
    loss: float | None
    metric: str | None = None
    score: float | None = None

    def append(self, run_dir: Path) -> None:
        """Adds its line to the file of the run. Raises an OSError where that cannot be written."""
        values = {key: finite(value) for key, value in asdict(self).items() if value is not None}
        with (run_dir / VALIDATIONS).open("a") as file:
            file.write(json.dumps({"loss": None} | values) + "\n")


_VALIDATION = TypeAdapter(Validation)


def parse_validation(line: bytes) -> Validation:
    """
    Raises:
        pydantic.ValidationError: it is not a line of such a file.
    """
    return _VALIDATION.validate_json(line)


def not_taken_back(validations: Sequence[Validation]) -> list[Validation]:
    """Those that the run has not gone back behind since, in their order: a restart may repeat updates."""
    kept: list[Validation] = []
    for validation in validations:
        while kept and kept[-1].updates >= validation.updates:
            kept.pop()
        kept.append(validation)
    return kept
