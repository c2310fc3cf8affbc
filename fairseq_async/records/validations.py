"""``validations.jsonl``: one line for every validation of the server's parameters by worker 0."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fairseq_async.records.event_log import finite

VALIDATIONS = "validations.jsonl"


@dataclass(frozen=True)
class Validation:
    """One validation.

    Attributes:
        time: seconds since 1970.
        updates: number of the server's updates so far, as the front end counts them.
        loss: mean loss, in the front end's unit; None where it was not finite.
        metric: name of the score besides the loss, such as ``bleu``; None where there is none.
        score: value of the metric.
    """

    time: float
    updates: int
    epoch: int
    loss: float | None
    metric: str | None = None
    score: float | None = None

    def append(self, run_dir: Path) -> None:
        """Appends its line to the run's file. Raises an OSError where that cannot be written."""
        values = {key: finite(value) for key, value in asdict(self).items() if value is not None}
        with (run_dir / VALIDATIONS).open("a") as file:
            file.write(json.dumps({"loss": None} | values) + "\n")


_VALIDATION = TypeAdapter(Validation)


def parse_validation(line: bytes) -> Validation:
    """Parses one line of ``validations.jsonl``.

    Raises:
        pydantic.ValidationError: it is not such a line.
    """
    return _VALIDATION.validate_json(line)


def not_taken_back(validations: Sequence[Validation]) -> list[Validation]:
    """Returns, in their order, the validations that no restart has taken back: a restart may repeat updates."""
    kept: list[Validation] = []
    for validation in validations:
        while kept and kept[-1].updates >= validation.updates:
            kept.pop()
        kept.append(validation)
    return kept
