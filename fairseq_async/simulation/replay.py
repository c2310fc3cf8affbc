"""A recorded run, repeated in one process: each update is computed again, and each state compared."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import Tensor

from fairseq_async.algorithms import Lateness, NormGate, Rule, Update
from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.server import Layout, Parameters, ParameterServer, Receipt
from fairseq_async.server.checksum import checksum
from fairseq_async.server.plan import Plan
from fairseq_async.server.recording import START

Event = dict[str, Any]


class DifferenceError(AsyncError):
    """The replay does not come to what was recorded."""


class Worker(Protocol):
    """One worker of the run, which computes what it computed then."""

    @property
    def layout(self) -> Layout: ...

    def take(self, parameters: Tensor, version: int) -> None:
        """Starts from these parameters, which it must copy."""
        ...

    def compute(self) -> tuple[dict[str, Any], Tensor]:
        """Its next update: the message that went with it, and the flat vector, which stays until it takes again."""
        ...


class Run(Protocol):
    """What a framework knows of its recorded run; ``threads`` are those with which its workers computed."""

    threads: int

    @property
    def workers(self) -> Mapping[int, Worker]: ...

    def build(self, layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]: ...


@dataclass(frozen=True)
class Recording:
    """The files of a run that was started with ``--record``.

    Attributes:
        events: those for which a worker computed something, in the order of their application.
        cut: the log ends in the middle of a line, which is left out.
    """

    run_dir: Path
    description: dict[str, Any]
    start: dict[str, Any]
    events: list[Event]
    cut: bool

    @classmethod
    def read(cls, run_dir: Path) -> "Recording":
        """Raises:
        ConfigurationError: something is missing, or was not recorded.
        """
        if not run_dir.is_dir() or not any(run_dir.iterdir()):
            raise ConfigurationError(f"{run_dir}: no run there; give the --run-dir (or --save-dir) of one")
        try:
            description = json.loads((run_dir / "run.json").read_text())
            lines = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            events = [json.loads(line) for line in whole]
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{run_dir}: the run there cannot be read: {error}") from error
        if not any("checksum" in event for event in events):
            raise ConfigurationError(f"{run_dir}: no checksums in events.jsonl; a run is recorded with --record")
        try:
            start = torch.load(run_dir / START, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
            why = f"{type(error).__name__}: {(str(error) or '-').splitlines()[0][:100]}"
            raise ConfigurationError(f"{run_dir / START}, the run's first state, cannot be read: {why}") from error
        if start["resumed"]:
            raise ConfigurationError(f"{run_dir}: the run went on from a checkpoint; a replay begins at the beginning")
        computed = [event for event in events if event["status"] in ("applied", "refused", "stale", "outlier")]
        return cls(run_dir, description, start, computed, cut=len(whole) < len(lines))

    def rounds(self) -> Iterator[list[Event]]:
        """Updates that were applied together: one by one, or what was behind the barrier at one time.

        Those of a round met the same version, and are in the order of their workers.
        """
        group: list[Event] = []
        for event in self.events:
            same = self.description["method"]["barrier"] and group and _met(group[-1]) == _met(event)
            if group and not (same and group[-1]["worker"] < event["worker"]):
                yield group
                group = []
            group.append(event)
        if group:
            yield group


def _met(event: Event) -> int:
    """The server's version when the update arrived."""
    return int(event["base_version"] + event["staleness"])


def _pulls_early(ahead: list[Event], version: int) -> bool:
    """Whether a worker took this version, not having had it, while its update in hand waited for another's step."""
    if len(ahead) < 2:
        return False
    now, then = ahead[:2]
    return bool(now["base_version"] < then["base_version"] == version < _met(now))


class Replay:
    """Repeats a recording.

    An update was computed from the server's parameters of its base version: each worker takes them when the server has
    come to that version, so that no older state is kept, but for a worker that had them while its update before waited
    for another's step. Updates of one round are computed first, then applied.

    Attributes:
        compared: how many states were found equal.

    Raises:
        ConfigurationError: the model here is another than the recorded one.
    """

    def __init__(self, recording: Recording, run: Run) -> None:
        self.recording, self.run, self.compared = recording, run, 0
        method, layout = recording.description["method"], Layout.from_json(recording.description["layout"])
        for worker in run.workers.values():
            if difference := layout.difference(worker.layout):
                raise ConfigurationError(f"{recording.run_dir}: the recorded model is not this command's: {difference}")
        self.parameters: Tensor = recording.start["server"]["parameters"].clone()
        rule, self.plan = run.build(layout, self.parameters)
        # where there is a barrier, the log says when a round is complete
        barrier = recording.description["workers"] + 1 if method["barrier"] else 0
        lateness = Lateness(**method.get("lateness", {}))
        gate = NormGate(method.get("max_update_norm_ratio"))
        self.server = ParameterServer(self.parameters, rule, barrier, method.get("last_version"), lateness, gate)
        self.server.load_state_dict(recording.start["server"])
        self._ahead = {w: [event for event in recording.events if event["worker"] == w] for w in run.workers}
        self._kept: dict[int, Parameters] = {}  # by worker: what it goes on from once its update in hand is settled
        self._begin()

    def steps(self, until: int | None = None) -> Iterator[int]:
        """Repeats the run up to this version; yields each version that was reached and found equal.

        Raises:
            DifferenceError: names the first update that differs.
        """
        for group in self.recording.rounds():
            if until is not None and self.server.version >= until:
                return
            computed = [self._computed(event) for event in group]
            with _threads(self.recording.start["threads"]):
                self._tell(group)
                receipts = [self.server.push(update, norm) for update, norm in computed]
                if self.server.held:
                    self.server.complete_round()
                    receipts = self.server.released()
            for event, receipt in zip(group, receipts, strict=True):
                self._compare(event, receipt)
            self._begin()
            if "checksum" in group[-1]:
                self.compared += 1
                yield self.server.version

    def _begin(self) -> None:
        """Whoever computed from this version takes it now, or when its update in hand is settled."""
        version = self.server.version
        for worker, ahead in self._ahead.items():
            kept = self._kept.get(worker)
            if ahead and ahead[0]["base_version"] == version:
                self.server.note_pull(worker)
                self.run.workers[worker].take(self.parameters, version)
            elif ahead and kept and ahead[0]["base_version"] == kept.version:
                self.run.workers[worker].take(kept.values, kept.version)
            if _pulls_early(ahead, version):
                self._kept[worker] = Parameters(version, self.parameters.clone())

    def _computed(self, event: Event) -> tuple[Update, float | None]:
        """The update, and its norm where its worker knew it."""
        worker = event["worker"]
        with _threads(self.run.threads):
            message, vector = self.run.workers[worker].compute()
        self._ahead[worker].pop(0)
        recorded = {name: event[name] for name in ("sequence", "base_version", "weight")}
        here = {name: message[name] for name in recorded}
        if here != recorded or message["report"]["position"] != event["position"]:
            raise DifferenceError(
                f"{_name(event)} is of another place in the data than here: the worker was started again before it, "
                "and a replay goes no further"
            )
        norm = message.get("norm")  # to workers on other machines the server has not listened
        return Update(worker=worker, delta=vector, **recorded), norm if norm == event["norm"] else None

    def _tell(self, group: list[Event]) -> None:
        """What the rule heard since the round before."""
        for message in group[0].get("told", []):
            if message["event"] == "limit_round":
                self.server.rule.limit_round(message["updates"])
            else:
                self.plan.hear(0, message)

    def _compare(self, event: Event, receipt: Receipt) -> None:
        if event["norm"] is not None and event["norm"] != receipt.norm:
            raise _first(event, f"its norm was {event['norm']}, is {receipt.norm}")
        if event["status"] != receipt.status.value or event["version_after"] != receipt.version:
            was, is_ = (event["status"], event["version_after"]), (receipt.status.value, receipt.version)
            raise _first(event, f"it was {was[0]} to {was[1]}, is {is_[0]} to {is_[1]}")
        if "checksum" in event and event["checksum"] != (here := checksum(self.parameters)):
            raise _first(event, f"the parameters' checksum after it was {event['checksum']}, is {here}")


def _first(event: Event, how: str) -> DifferenceError:
    return DifferenceError(f"{_name(event)} is the first that differs: {how}")


def _name(event: Event) -> str:
    return f"update {event['version_after']} (number {event['sequence']} of worker {event['worker']})"


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Sums over a tensor depend on how many threads share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
