"""Replays a recorded run in one process: computes each update again, and compares each state."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Protocol

import torch
from torch import Tensor

from fairseq_async.algorithms import Region, Rule, Update, in_turn
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, Push, Receipt, Report, ScheduleEvent
from fairseq_async.protocol.receipt import SETTLED, Status
from fairseq_async.records.description import RunDescription
from fairseq_async.records.event_log import EVENTS, Settled
from fairseq_async.records.events import Event, LineReader
from fairseq_async.records.recording import START, checksum, load_recorded, merge_path, read_vector
from fairseq_async.reporting import GIVE_A_RUN
from fairseq_async.server import Parameters
from fairseq_async.server import compressed_starts as starts
from fairseq_async.server.build import build_coordinator
from fairseq_async.server.compressed_changes import CompressedChanges
from fairseq_async.server.membership import Membership
from fairseq_async.server.plan import Plan
from fairseq_async.server.rounds.waiting import OPEN
from fairseq_async.server.shards.build import build_sharded, close_shards, shared_copy, shared_zeros


class DifferenceError(AsyncError):
    """The replay comes to another result than the recorded run."""


class RecordedWorker(Protocol):
    """A worker of the recorded run, which computes the same updates again."""

    @property
    def layout(self) -> Layout: ...

    def start_from(self, parameters: Tensor, version: int) -> None:
        """Starts from these parameters, which it must copy."""
        ...

    def compute(self) -> tuple[Push, Tensor]:
        """Computes the worker's next update: returns its message and its flat vector, which stays valid until the
        worker starts again."""
        ...


class RecordedRun(Protocol):
    """A recorded run as its framework provides it; ``threads`` is the number of threads with which a worker
    computed."""

    threads: int

    @property
    def workers(self) -> Mapping[int, RecordedWorker]: ...

    def build(self, spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]: ...


@dataclass(frozen=True)
class Recording:
    """The files of a run that was started with ``--record``.

    Attributes:
        events: the events of computed updates, in the order in which they were applied.
        cut: whether the log ends in the middle of a line; that line is ignored.
    """

    run_dir: Path
    spec: MethodSpec
    layout: Layout
    start: State
    events: list[Event]
    cut: bool

    @classmethod
    def read(cls, run_dir: Path) -> "Recording":
        """Reads the recording from a run's directory.

        Raises:
            ConfigurationError: a file is missing or broken, or the run was not recorded from its beginning.
        """
        if not run_dir.is_dir() or not any(run_dir.iterdir()):
            raise ConfigurationError(f"{run_dir}: no run there; {GIVE_A_RUN}")
        description = RunDescription.read(run_dir)
        spec, layout = description.spec, description.layout
        reader = LineReader(run_dir / EVENTS, Event.from_json)
        events = list(reader)
        if not events:
            raise ConfigurationError(f"{run_dir}: there is no update in {EVENTS}, so nothing to replay")
        if not any(event.checksum for event in events):
            raise ConfigurationError(f"{run_dir}: no checksums in events.jsonl; a run is recorded with --record")
        start = load_recorded(run_dir / START, "the run's first state")
        if not (isinstance(start, dict) and {"resumed", "server", "threads"} <= start.keys()):
            raise ConfigurationError(f"{run_dir / START}: not the first state of a run")
        if start["resumed"]:
            raise ConfigurationError(f"{run_dir}: the run went on from a checkpoint; a replay begins at the beginning")
        computed = [event for event in events if event.status in SETTLED]
        return cls(run_dir, spec, layout, start, computed, reader.cut)

    def rounds(self) -> Iterator[list[Event]]:
        """Yields the updates that were applied together: single ones, or those of one round of a barrier.

        The updates of a round met the same version, and are in the order of their workers. One that was not applied was
        settled at once: its worker may have gone on from the version that the round met.
        """
        group: list[Event] = []
        for event in self.events:
            same = self.spec.barrier and group and _met(group[-1]) == _met(event)
            applied = same and group[-1].status is event.status is Status.APPLIED
            if group and not (applied and group[-1].worker < event.worker):
                yield group
                group = []
            group.append(event)
        if group:
            yield group


def _met(event: Event) -> int:
    """The server's version when the update arrived."""
    return event.base_version + event.staleness


def _pulls_early(ahead: list[Event], version: int) -> bool:
    """Whether a worker took this version for its next update, while its present one waited for another worker's
    step."""
    if len(ahead) < 2:
        return False
    now, then = ahead[:2]
    return now.base_version < then.base_version == version < _met(now)


class Replay:
    """Repeats a recording.

    An update was computed from the server's parameters of its base version: each worker takes them when the replayed
    server has come to that version, so that no older state is kept. The exception is a worker that took them while its
    previous update waited for a step of other workers' updates. Updates of one round are computed first, then applied.

    Attributes:
        compared: number of states that were compared and found equal.

    Raises:
        ConfigurationError: the model here differs from the recorded one.
    """

    def __init__(self, recording: Recording, run: RecordedRun) -> None:
        self.recording, self.run, self.compared = recording, run, 0
        spec, layout = recording.spec, recording.layout
        for worker in run.workers.values():
            if difference := layout.difference(worker.layout):
                raise ConfigurationError(f"{recording.run_dir}: the recorded model is not this command's: {difference}")
        self.parameters, rule, plan = _built(recording, run)
        # the log says when a round is complete: here no round is complete or ends by itself
        held = replace(spec, barrier=OPEN if spec.barrier else 0, grace_period=None, closes_early=False, quorum=0)
        membership = Membership(spec.workers, now=0.0)
        self.coordinator = build_coordinator(held, rule, plan, self.parameters, membership)
        self.server = self.coordinator.server
        self.server.load_state_dict(recording.start["server"])
        self._region = Region(self.parameters, merge=spec.upstream.above.merge) if spec.upstream else None
        self._starts, self._fragments = starts.compressed_starts(spec, layout), layout.fragments(spec.fragments)
        self._started: dict[int, tuple[int, Tensor | None]] = {}  # by worker: an update's number, its compressed start
        self._recorded = {w: [event for event in recording.events if event.worker == w] for w in run.workers}
        self._ahead = {w: list(events) for w, events in self._recorded.items()}
        self._kept: dict[int, Parameters] = {}  # by worker: the start of its next update, taken before this one settled
        self._begun: set[int] = set()  # the workers that have started
        self._begin()

    def steps(self, until: int | None = None) -> Iterator[int]:
        """Repeats the run up to this version; yields each version that was reached and found equal.

        Raises:
            DifferenceError: the replay differs; the message names the first update that does.
        """
        for group in self.recording.rounds():
            if until is not None and self.server.version >= until:
                return
            try:
                self._repeat(group)
            except DifferenceError as error:
                known = all(event.worker in self.run.workers for event in group)
                raise (self._missing() if known else None) or error from None
            if group[-1].checksum is not None:
                self.compared += 1
                yield self.server.version

    def _repeat(self, group: list[Event]) -> None:
        self._repeat_merges(group)
        computed = [self._computed(event) for event in group]
        with _threads(self.recording.start["threads"]):
            for event in group:
                self._repeat_control_events(event)
            settled = self._push(computed)
        for event, each in zip(group, settled, strict=True):
            self._compare(event, each.receipt)
        self._begin()

    def _missing(self) -> DifferenceError | None:
        """Returns the error of an update that should have come by now and has no line, if there is one."""
        for worker, recorded in self._recorded.items():
            until = len(recorded) - len(self._ahead[worker]) + 1
            for number, event in enumerate(recorded[:until]):
                if event.sequence > number:
                    return DifferenceError(
                        f"{EVENTS} has no line of update {number} of worker {worker}: a replay goes no further than "
                        f"update {self.server.version}"
                    )
        return None

    def close(self) -> None:
        """Ends the processes of a server in shards."""
        close_shards(self.server.rule)

    def _begin(self) -> None:
        """Lets each worker that computed from the present version take it: now, or, as a copy that is kept, when its
        present update is settled."""
        version = self.server.version
        if self._starts is not None:
            self._starts.follow(self.server)
        for worker, ahead in self._ahead.items():
            kept = self._kept.get(worker)
            if ahead and ahead[0].base_version == version:
                start = self._start(ahead[0])
                self.server.note_pull(worker, start)
                self.run.workers[worker].start_from(start, version)
                self._begun.add(worker)
            elif ahead and kept and ahead[0].base_version == kept.version:
                self.run.workers[worker].start_from(kept.values, kept.version)
            if _pulls_early(ahead, version):
                self._kept[worker] = Parameters(version, self._start(ahead[1]).clone())

    def _start(self, event: Event) -> Tensor:
        """Returns the parameters that the worker started this update from: the present ones, or ahead of them."""
        if self._starts is not None:
            sequence, start = self._started.get(event.worker, (-1, None))
            taken = sequence != event.sequence and event.bytes_received != 0  # a compressed start was sent only once
            if start is None or taken:
                start = self._compressed_start(event, self._starts)
            self._started[event.worker] = event.sequence, start
            return start
        if not event.look_ahead:
            return self.server.dispatch()
        return self._ahead_by(event.look_ahead)

    def _ahead_by(self, versions: float) -> Tensor:
        ahead = torch.empty_like(self.parameters)
        self.server.write_ahead(ahead, versions)
        return ahead

    def _compressed_start(self, event: Event, given: starts.CompressedFragments | CompressedChanges) -> Tensor:
        """Returns the start of an update in a new tensor: the parameters, of which all, or the fragment of the previous
        update, are replaced by those of the payload that the worker received."""
        before = event.sequence - 1
        start = self._ahead_by(event.look_ahead) if event.look_ahead else self.server.dispatch().clone()
        if event.start_payload is None:
            given.note_taken(event.worker, start, None)
            return start
        fragment = in_turn(self._fragments, before).of(start)
        for _ in ("as the worker goes on", "as it takes all parameters anew"):
            encoded = given.of(event.worker, before)
            payload = None if encoded is None else encoded.payload(self.server, event.look_ahead or 0.0)
            if encoded is not None and payload is not None and starts.checksum(payload) == event.start_payload:
                fragment.copy_(encoded.decode(payload))
                return start
            given.remove_worker(event.worker)
        here = starts.checksum(payload)
        raise _first(event, f"the checksum of what it started from was {event.start_payload}, is {here}")

    def _computed(self, event: Event) -> tuple[Update, Report, float | None]:
        """Computes an update again: returns it with its report, and its norm where the server took it from the
        worker."""
        worker = event.worker
        if worker not in self.run.workers:
            raise _first(event, "this run has no such worker")
        if worker not in self._begun or event.base_version > self.server.version:
            raise _first(event, f"it started from version {event.base_version}, which the replay has not come to")
        with _threads(self.run.threads):
            push, vector = self.run.workers[worker].compute()
        self._ahead[worker].pop(0)
        recorded = event.sequence, event.base_version, event.weight
        here = push.sequence, push.base_version, push.weight
        if here != recorded or push.report.position != event.position:
            raise DifferenceError(
                f"{_name(event)} is of another place in the data than here: the worker was started again before it, "
                "and a replay goes no further"
            )
        if push.report.missing != event.missing:
            raise _first(event, f"its tensors without a gradient were {event.missing}, are {push.report.missing}")
        if push.report.payload != event.payload:
            raise _first(event, f"the checksum of its payload was {event.payload}, is {push.report.payload}")
        norm = push.norm if push.norm == event.norm else None  # the server does not trust norms from other machines
        missing, micro_batches = int(event.missing or "0", 16), event.micro_batches or 1
        update = Update(worker, *here, vector, event.tokens or 0.0, missing, micro_batches, event.share or 1.0)
        return update, _recorded_report(event), norm

    def _push(self, computed: list[tuple[Update, Report, float | None]]) -> list[Settled]:
        settled: list[Settled] = []
        for update, report, norm in computed:
            settled += self.coordinator.push(update, report, now=0.0, norm=norm).settled
        if self.server.held:
            settled += self.coordinator.close_round(now=0.0).settled
        return settled

    def _repeat_merges(self, group: list[Event]) -> None:
        """Repeats the merges of a global server's parameters since the previous round; workers started from their
        results."""
        for version in [version for event in group for version in event.merged]:
            if self._region is None:
                raise _first(group[0], "it comes after a merge, and the run has no global server")
            path = merge_path(self.recording.run_dir, version)
            self.coordinator.merge(self._region, read_vector(path, self.recording.layout.size))
            self._begin()

    def _repeat_control_events(self, event: Event) -> None:
        """Repeats the events that the rule and the schedule received since the previous round."""
        for control in event.control_events:
            match control.event:
                case "limit_round":
                    self.server.rule.limit_round(control.updates or 0)
                case "begin_epoch" | "end_epoch":
                    self.coordinator.plan.follow(ScheduleEvent("", control.event, control.epoch or 0, control.loss))

    def _compare(self, event: Event, receipt: Receipt) -> None:
        if event.norm is not None and event.norm != receipt.norm:
            raise _first(event, f"its norm was {event.norm}, is {receipt.norm}")
        was, is_ = (event.status.value, event.version_after), (receipt.status.value, receipt.version)
        if was != is_:
            raise _first(event, f"it was {was[0]} to {was[1]}, is {is_[0]} to {is_[1]}")
        if event.checksum is not None and event.checksum != (here := checksum(self.parameters)):
            raise _first(event, f"the parameters' checksum after it was {event.checksum}, is {here}")


def _built(recording: Recording, run: RecordedRun) -> tuple[Tensor, Rule, Plan]:
    """Builds the first parameters, the rule and the plan; in shards where the run's server was in shards."""
    spec, layout, parameters = recording.spec, recording.layout, recording.start["server"]["parameters"]
    if spec.server.shards == 1:
        own = parameters.clone()
        rule, plan = run.build(spec, layout, own)
    else:
        own = shared_copy(parameters)
        slots = {worker: shared_zeros(layout.size) for worker in run.workers}
        rule, plan = build_sharded(run.build, spec, layout, own, slots.__getitem__, Path(gettempdir()))
    return own, rule, plan


def _recorded_report(event: Event) -> Report:
    """Returns the parts of the recorded report that the plan counts, on which the end of the run depends."""
    return Report(
        epochs=event.epochs or 0.0, local_steps=event.local_steps, step_seconds=event.step_seconds, shard=event.shard
    )


def _first(event: Event, how: str) -> DifferenceError:
    return DifferenceError(f"{_name(event)} is the first that differs: {how}")


def _name(event: Event) -> str:
    return f"update {event.version_after} (number {event.sequence} of worker {event.worker})"


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Sets the number of threads within a context: the result of a sum depends on how many threads compute it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings within a context, since the recorded run has printed them; restores logging at the end."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
