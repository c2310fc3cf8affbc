"""Parses the flags of ``fairseq-async ray``: the workers' resources, the server's shards, a change of the number of
workers."""

import re
from dataclasses import dataclass

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.programs import is_fairseq

_GROUP = re.compile(r"([1-9]\d*)\*(CPU|GPU)(?::([1-9]\d*))?")
_SHARDS = "--server-shards"
_NEEDING_ONE_PROCESS = (
    "--compress",
    "--fragments",
    "--fragment-delay",
    "--upstream",
    "--staleness-power",
    "--delay-compensation",
)
_CHANGE = re.compile(r"[+-][1-9]\d*")


@dataclass(frozen=True)
class Resources:
    """The resources that one worker asks Ray for.

    Attributes:
        cpus: number of CPU cores, and of the threads with which the worker computes.
        gpus: number of GPUs; with 0 the worker sees none.
    """

    cpus: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.cpus} CPU" + (f" and {self.gpus} GPU" if self.gpus else "")


def parse_workers(text: str) -> list[Resources]:
    """Parses the resources of each worker: ``4*GPU,2*CPU:4`` is four with a GPU and a core, two with four cores.

    Raises:
        ConfigurationError: the text has another form.
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


def server_shards(command: list[str]) -> str:
    """Returns the value of ``--server-shards`` in a command, 1 by default."""
    words = [part for word in command for part in word.split("=", 1)]
    return dict(zip(words, words[1:], strict=False)).get(_SHARDS, "1")


def check_shards(command: list[str], shards: int) -> None:
    """Checks that the server of a command can have shards on other nodes.

    Raises:
        ConfigurationError: the command is a script, which gives its shards to its optimizer, or an option needs the
            whole model in one process.
    """
    if shards == 1:
        return
    if not is_fairseq(command):
        raise ConfigurationError(
            f"--shards {shards}: is for fairseq-train; give a script's optimizer server_shards={shards}, and "
            f'DeepSpeed\'s JSON "server_shards": {shards}, for shards on one node'
        )
    if ":" in server_shards(command):
        raise ConfigurationError(f"--shards {shards}: {_SHARDS} has addresses in the command; give one of them")
    for flag in (word.partition("=")[0] for word in command):
        if flag in _NEEDING_ONE_PROCESS:
            raise ConfigurationError(
                f"--shards {shards}: {flag} does not go with shards on other nodes; leave it out, or give the command "
                f"{_SHARDS} {shards} instead, for shards on one node"
            )


def parse_change(words: list[str]) -> int:
    """Parses a change of the number of workers, such as ``+2`` or ``-1``.

    Raises:
        ConfigurationError: the text has another form, or options follow it.
    """
    if any(word.startswith("--") for word in words):
        given = " ".join(words)
        raise ConfigurationError(f"scale {given}: options stand before scale, as in: ray --name training scale +2")
    if len(words) != 1 or not _CHANGE.fullmatch(words[0]):
        raise ConfigurationError(f"scale {' '.join(words) or '(nothing)'}: how many workers more or fewer, as +2 or -1")
    return int(words[0])
