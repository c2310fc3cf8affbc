"""What ``rollbacks.jsonl`` says of a run's starts: which events are an earlier launch's, and when nothing ran."""

from collections.abc import Mapping
from pathlib import Path

from fairseq_async.records.event_log import EVENTS, ROLLBACKS
from fairseq_async.records.events import Event, LineReader, Rollback


class EarlierEvents:
    """The events that were in a run's directory before this launch, as far as its server has kept them.

    No time is compared: the server's machine may have another clock. A server that finds events says in
    ``rollbacks.jsonl`` which of them it keeps, before it adds its own.
    """

    def __init__(self, run_dir: Path) -> None:
        self._rollbacks = LineReader(run_dir / ROLLBACKS, Rollback.model_validate_json, skip=lambda _: None)
        self._rollbacks.skip_to_end()
        self._last_before = self._rollbacks.number
        self._any = _has_a_line(run_dir / EVENTS)
        # The number of each worker's last one; None until a server begins. Without any event before, the first start of
        # this launch's server says nothing, and what a later one says is of this launch's events.
        self._kept: Mapping[int, int] | None = None if self._any else {}

    def look(self) -> None:
        """Looks whether a server has begun; later starts of the same server take back only what is this launch's."""
        if self._kept is not None:
            return
        for rollback in self._rollbacks:
            if self._rollbacks.number > self._last_before:
                self._kept = rollback.sequences
                return

    def __contains__(self, event: Event) -> bool:
        if self._kept is None:
            return self._any
        return event.sequence <= self._kept.get(event.worker, -1)


class Pauses:
    """The time between the interruptions of a run and its resumptions, for a view of the whole run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ROLLBACKS
        self.begin_again()

    def begin_again(self) -> None:
        """Begins with the first event again."""
        self._rollbacks = LineReader(self._path, Rollback.model_validate_json, skip=lambda _: None)
        self._coming: list[Rollback] = []
        self.look()

    def look(self) -> None:
        """Reads the starts of servers that were added since the last call."""
        self._coming += self._rollbacks

    def before(self, event: Event, newest: float) -> float:
        """Returns for how many seconds the run stood still between its event of time ``newest`` and the next one."""
        begun = [start for start in self._coming if event.sequence > start.sequences.get(event.worker, -1)]
        self._coming = [start for start in self._coming if start not in begun]
        return max(0.0, *(start.time - newest for start in begun)) if begun else 0.0


def _has_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return False
