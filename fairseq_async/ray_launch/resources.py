"""What the workers of a run ask a Ray cluster for, and its server."""

import re
from dataclasses import dataclass

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.programs import is_fairseq

_GROUP = re.compile(r"([1-9]\d*)\*(CPU|GPU)(?::([1-9]\d*))?")
_SHARDS = "--server-shards"
_CHANGE = re.compile(r"[+-][1-9]\d*")


@dataclass(frozen=True)
class Resources:
    """Of one worker.

    Attributes:
        cpus: which are also the threads of its computation.
        gpus: 0 for a worker that sees none.
    """

    cpus: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.cpus} CPU" + (f" and {self.gpus} GPU" if self.gpus else "")


def parse_workers(text: str) -> list[Resources]:
    """Of each worker, from ``4*GPU,2*CPU:4``: four with a GPU and a core, two with four cores.

    Raises:
        ConfigurationError: it is not written so.
    """
    found: list[Resources] = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(
                f'--workers "{text}": groups COUNT*CPU or COUNT*GPU, each with :AMOUNT for more than one, as in '
                '"4*GPU,2*CPU:4"'
            )
        count, amount = int(match[1]), int(match[3] or 1)
        found += [Resources(amount, 0) if match[2] == "CPU" else Resources(1, amount)] * count
    return found


def with_shards(command: list[str], shards: int | None) -> list[str]:
    """The command of the workers, of which worker 0 says in how many shards the server is.

    Raises:
        ConfigurationError: the command says it already, or is a script, which gives it to its optimizer.
    """
    if shards is None:
        return command
    if not is_fairseq(command):
        raise ConfigurationError(
            f"--shards {shards}: is for fairseq-train; give a script's optimizer server_shards={shards}, and "
            f'DeepSpeed\'s JSON "server_shards": {shards}'
        )
    if any(word.partition("=")[0] == _SHARDS for word in command):
        raise ConfigurationError(f"--shards {shards}: the command has {_SHARDS}; give one of them")
    return [*command, _SHARDS, str(shards)]


def parse_change(words: list[str]) -> int:
    """How many workers ``+2`` or ``-1`` adds or takes.

    Raises:
        ConfigurationError: it is not written so.
    """
    if len(words) != 1 or not _CHANGE.fullmatch(words[0]):
        raise ConfigurationError(f"scale {' '.join(words) or '(nothing)'}: how many workers more or fewer, as +2 or -1")
    return int(words[0])
