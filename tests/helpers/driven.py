"""A coordinator that a test drives by hand."""

import torch

from fairseq_async.algorithms import Update
from fairseq_async.protocol import Report
from fairseq_async.server.coordinator import Coordinator
from fairseq_async.server.outcome import Outcome


class Driven:
    """A coordinator whose workers all are there; each names the number of its next update by itself."""

    def __init__(self, coordinator: Coordinator, workers: int) -> None:
        self.coordinator, self.sequences = coordinator, [0] * workers
        for worker in range(workers):
            coordinator.membership.connect(worker, "x", 0.0)
        coordinator.recount(0.0, changed=True)
        for worker in range(workers):
            coordinator.instruct(worker, None, 0.0)

    def push(
        self,
        worker: int,
        value: float,
        now: float,
        report: Report = Report(),  # noqa: B008  # frozen
        base: int | None = None,
    ) -> Outcome:
        """As the server does: the worker waits from its push to its answer; ``base`` is the present version."""
        self.coordinator.membership.wait(worker, "push")
        version = self.version if base is None else base
        update = Update(worker, self.sequences[worker], version, 1.0, torch.tensor([value]))
        self.sequences[worker] += 1
        return self.delivered(self.coordinator.push(update, report, now), now)

    def steps(self, worker: int, steps: int, now: float) -> Outcome:
        """Local steps of a second each."""
        return self.push(worker, 1.0, now, Report(local_steps=steps, step_seconds=1.0))

    def tick(self, now: float) -> Outcome:
        return self.delivered(self.coordinator.tick(now), now)

    def leave(self, worker: int, for_good: bool, now: float) -> Outcome:
        self.coordinator.membership.leave(worker, for_good, now)
        return self.delivered(self.coordinator.depart(worker, now), now)

    def delivered(self, outcome: Outcome, now: float) -> Outcome:
        for instruction in outcome.instructions:
            self.coordinator.membership.answered(instruction.worker, now)
        return outcome

    @property
    def version(self) -> int:
        return self.coordinator.server.version

    @property
    def parameter(self) -> float:
        return self.coordinator.server.parameters.item()
