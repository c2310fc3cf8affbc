"""The question to ``fairseq-async capacity``, from its flags, which are read before anything slow is imported."""

import math
from dataclasses import dataclass
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.reporting import GIVE_A_RUN
from fairseq_async.simulation.costs import NetworkLink


@dataclass(frozen=True)
class Question:
    """The server that is asked about.

    Attributes:
        sizes: numbers of parameters of the models; empty for the run's model.
        links: network links to look at; empty on one machine.
        shards: numbers of shards of the server to look at.
        apart: whether each shard is on a machine of its own.
        compress: codecs on the link; empty for those of the run.
    """

    sizes: tuple[int, ...]
    links: tuple[NetworkLink, ...]
    shards: tuple[int, ...]
    apart: bool
    compress: str


def read_question(parameters: str, link: str, shards: str, apart: bool, compress: str) -> Question:
    """Reads a question from the flags.

    Raises:
        ConfigurationError: a flag has no such value, or the flags do not go together.
    """
    links = [NetworkLink(*pair) for pair in pairs("--link", link, "as 10, or 0.1:50 with 50 ms one way")]
    if compress and not links:
        raise ConfigurationError(f"--compress {compress}: of use on a link alone: give --link too")
    if apart and not links:
        raise ConfigurationError("--apart: machines exchange over a link: give --link too")
    return Question(
        sizes=_counts("--parameters", parameters),
        links=tuple(links),
        shards=tuple(sorted(_counts("--shards", shards))),
        apart=apart,
        compress=compress,
    )


def check_run(run_dir: Path) -> None:
    """Refuses a directory without a run: at once, since reading the run imports torch.

    Raises:
        ConfigurationError: there is no run.
    """
    try:
        (run_dir / "run.json").stat()
    except OSError as error:
        raise ConfigurationError(
            f"{run_dir}: no run that can be read there (run.json): {error.strerror}; {GIVE_A_RUN}"
        ) from error


def _counts(flag: str, text: str) -> tuple[int, ...]:
    try:
        numbers = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        numbers = [0.0]
    if not all(1 <= number < math.inf and number.is_integer() for number in numbers):
        raise ConfigurationError(f"{flag} {text}: whole numbers of at least 1 with commas between them")
    return tuple(map(int, numbers))


def pairs(flag: str, text: str, example: str, most: float = math.inf) -> list[tuple[float, float]]:
    """Parses numbers above 0, each with or without a second number, of at least 0, behind a colon.

    Raises:
        ConfigurationError: the text is something else.
    """
    found = []
    try:
        for part in text.split(",") if text else []:
            first, _, second = part.partition(":")
            found.append((float(first), float(second or 0)))
    except ValueError:
        found = [(0.0, 0.0)]
    if not all(0 < first < math.inf and 0 <= second <= most and second < math.inf for first, second in found):
        above = f" (at most {most:g})" if most < math.inf else ""
        raise ConfigurationError(f"{flag} {text}: numbers above 0 with commas between them, {example}{above}")
    return found
