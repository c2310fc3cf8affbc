"""Replays a global server's recorded run: reads its regions' updates from files, since no region computes here."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fairseq_async.algorithms import Rule
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, Push, Report
from fairseq_async.records.events import Event
from fairseq_async.records.recording import read_vector, update_path
from fairseq_async.replay.replay import Recording
from fairseq_async.server.plan import Plan
from fairseq_async.server.programs import local_sgd_main


class RecordedRegion:
    """One region as a :class:`~fairseq_async.replay.replay.RecordedWorker`: its recorded updates, in the order in which
    it sent them."""

    def __init__(self, run_dir: Path, layout: Layout, events: Sequence[Event]) -> None:
        self.layout, self._run_dir, self._left = layout, run_dir, list(events)

    def start_from(self, parameters: Tensor, version: int) -> None:
        """Does nothing: the recorded update does not depend on it."""

    def compute(self) -> tuple[Push, Tensor]:
        """Reads the region's next update, and makes its message.

        Raises:
            ConfigurationError: the update cannot be read.
        """
        event = self._left.pop(0)
        push = Push(event.sequence, event.base_version, event.weight, Report(event.position))
        return push, read_vector(update_path(self._run_dir, event.worker, event.sequence), self.layout.size)


class RecordedRegions:
    """A global server's run as a :class:`~fairseq_async.replay.replay.RecordedRun`."""

    threads = 1

    def __init__(self, recording: Recording) -> None:
        self.workers = {
            region: RecordedRegion(
                recording.run_dir, recording.layout, [event for event in recording.events if event.worker == region]
            )
            for region in range(recording.spec.workers)
        }

    def build(self, spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]:
        return local_sgd_main.build(spec, layout, parameters)
