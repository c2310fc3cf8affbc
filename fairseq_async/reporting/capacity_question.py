"""The question to ``fairseq-async capacity``, from its flags, which are read before anything slow is imported."""

import math
from dataclasses import dataclass
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.simulation.cluster import WIDEST
from fairseq_async.simulation.costs import Link

_FOR_TABLES = (1, 2, 4, 8)
_TO_CHOOSE_FROM = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Question:
    """A question about a run's server, or about the server that a cluster needs.

    Attributes:
        run_dir: directory of the run whose costs count; None where costs are assumed.
        sizes: numbers of parameters of the models; empty for the run's model.
        links: network links to look at; empty on one machine.
        shards: numbers of shards of the server to look at.
        apart: whether each shard is on a machine of its own.
        compress: codecs on the link; empty for those of the run.
        workers: number of workers of the cluster; None where only the run's server is asked about.
        step_seconds: mean and spread of the seconds per step, for the workers in turn; empty for the run's.
        at_most_waiting: share of the workers' time that may be lost by waiting.
    """

    run_dir: Path | None
    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    shards: tuple[int, ...]
    apart: bool
    compress: str
    workers: int | None
    step_seconds: tuple[tuple[float, float], ...]
    at_most_waiting: float


def read_question(
    run_dir: Path | None,
    parameters: str,
    link: str,
    shards: str,
    apart: bool,
    compress: str,
    workers: int | None,
    step_seconds: str,
    at_most_waiting: float | None,
) -> Question:
    """Reads a question from the flags.

    Raises:
        ConfigurationError: a flag has no such value, or the flags do not go together.
    """
    _check_run(run_dir)
    links = [Link(*pair) for pair in _pairs("--link", link, "as 10, or 0.1:50 with 50 ms one way")]
    seconds = _pairs("--step-seconds", step_seconds, "as 0.3, or 0.3:0.2 with deviation over mean", most=WIDEST)
    if compress and not links:
        raise ConfigurationError(f"--compress {compress}: of use on a link alone: give --link too")
    if apart and not links:
        raise ConfigurationError("--apart: machines exchange over a link: give --link too")
    sizes = _counts("--parameters", parameters)
    if workers is None:
        _check_without_cluster(run_dir, step_seconds, at_most_waiting)
    elif run_dir is None and not (sizes and seconds):
        missing = "--step-seconds" if sizes else "--parameters"
        raise ConfigurationError(f"--workers {workers}: without RUN_DIR, nothing says what they train: give {missing}")
    share = 0.05 if at_most_waiting is None else at_most_waiting
    if not 0 < share < 1:
        raise ConfigurationError(f"--at-most-waiting {share:g}: a share of the workers' time, above 0 and below 1")
    counts = _counts("--shards", shards) or (_FOR_TABLES if workers is None else _TO_CHOOSE_FROM)
    return Question(
        run_dir=run_dir,
        sizes=sizes,
        links=tuple(links),
        shards=tuple(sorted(counts)),
        apart=apart,
        compress=compress,
        workers=workers,
        step_seconds=tuple(seconds),
        at_most_waiting=share,
    )


def _check_run(run_dir: Path | None) -> None:
    """Refuses a directory without a run: at once, since reading the run imports torch."""
    try:
        if run_dir is not None:
            (run_dir / "run.json").stat()
    except OSError as error:
        raise ConfigurationError(f"{run_dir}: no run that can be read there (run.json): {error.strerror}") from error


def _check_without_cluster(run_dir: Path | None, step_seconds: str, at_most_waiting: float | None) -> None:
    """Refuses flags of a cluster where --workers is not given, and no flags at all."""
    if step_seconds:
        raise ConfigurationError(f"--step-seconds {step_seconds}: of a cluster: give --workers too")
    if at_most_waiting is not None:
        raise ConfigurationError(f"--at-most-waiting {at_most_waiting:g}: of a cluster: give --workers too")
    if run_dir is None:
        raise ConfigurationError("capacity: give RUN_DIR, or --workers, --parameters and --step-seconds of a cluster")


def _counts(flag: str, text: str) -> tuple[int, ...]:
    try:
        numbers = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        numbers = [0.0]
    if not all(1 <= number < math.inf and number.is_integer() for number in numbers):
        raise ConfigurationError(f"{flag} {text}: whole numbers of at least 1 with commas between them")
    return tuple(map(int, numbers))


def _pairs(flag: str, text: str, example: str, most: float = math.inf) -> list[tuple[float, float]]:
    """Parses numbers above 0, each with or without a second number, of at least 0, behind a colon."""
    pairs = []
    try:
        for part in text.split(",") if text else []:
            first, _, second = part.partition(":")
            pairs.append((float(first), float(second or 0)))
    except ValueError:
        pairs = [(0.0, 0.0)]
    if not all(0 < first < math.inf and 0 <= second <= most and second < math.inf for first, second in pairs):
        above = f" (at most {most:g})" if most < math.inf else ""
        raise ConfigurationError(f"{flag} {text}: numbers above 0 with commas between them, {example}{above}")
    return pairs
