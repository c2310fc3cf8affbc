"""The planned length of a run, as ``run.json`` describes it, how much of it is done, and what its weights count."""

from dataclasses import dataclass
from pathlib import Path

from fairseq_async.records.description import RunDescription


@dataclass
class Work:
    """Totals of the applied updates of a run so far."""

    updates: int = 0
    version: int = 0
    local_steps: int = 0
    epochs: float = 0.0


@dataclass(frozen=True)
class RunLength:
    """The limits at which a run ends, whichever comes first.

    Attributes:
        workers: number of workers that the run was started with.
        steps: number of steps of the server, or, if ``local``, mean local steps of a worker; 0 for no such limit.
        max_epoch: passes over the data by all workers together; 0 for no such limit.
        local: whether steps are the workers' local steps.
        partial: whether the update of one of k workers is 1/k of a step.
        unit: what the weights of updates count; see :attr:`RunDescription.unit`.
        optimizers: number of optimizers, each of which makes updates and versions.
    """

    workers: int
    steps: int = 0
    max_epoch: int = 0
    local: bool = False
    partial: bool = False
    unit: str = "tokens"
    optimizers: int = 1

    @classmethod
    def read(cls, run_dir: Path) -> "RunLength":
        """Reads the length from a run's directory.

        Raises:
            ConfigurationError: there is no run in the directory, or none that can be read.
        """
        description = RunDescription.read(run_dir)
        spec = description.spec
        local = spec.method == "local_sgd"
        steps = spec.options.get("total_steps", 0) if local else spec.last_version or spec.whole_steps
        workers = description.workers or 1
        limit = steps if isinstance(steps, int) else 0
        optimizers = spec.framework.get("parts")
        several = len(optimizers) if isinstance(optimizers, list) else 1
        return cls(workers, limit, spec.max_epoch, local, spec.closes_early, description.unit, several)

    def steps_of(self, work: Work) -> int:
        """Returns the number of whole steps, as ``num_updates`` counts them."""
        if self.local:
            return work.local_steps // self.workers
        steps = work.updates // self.workers if self.partial else work.version
        # an estimate: one of several optimizers may step more often than the others
        return steps if self.optimizers == 1 else min(self.steps or steps, steps // self.optimizers)

    def fraction(self, work: Work) -> float:
        """Returns the part of the run that is done, from 0 to 1; 0 where the run has no limit."""
        by_steps = self.steps_of(work) / self.steps if self.steps else 0.0
        return min(1.0, max(by_steps, work.epochs / self.max_epoch if self.max_epoch else 0.0))

    def describe(self, work: Work) -> str:
        """Returns how far the run is, in words: ``update 120 of 5,000, epoch 3 of 10``."""
        name, steps = "step" if self.local else "update", self.steps_of(work)
        text = f"{name} {steps:,}" + (f" of {self.steps:,}" if self.steps else "")
        if work.epochs or self.max_epoch:
            epoch = 1 + int(min(work.epochs + 1e-6, (self.max_epoch or 10**9) - 1))
            text += f", epoch {epoch}" + (f" of {self.max_epoch}" if self.max_epoch else "")
        return text
