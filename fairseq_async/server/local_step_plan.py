"""The plan of local SGD: how many steps each worker takes, on which shard of the data, and the run's progress."""

import math
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import NamedTuple

import torch

from fairseq_async.algorithms import local_steps, shard_probabilities
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError
from fairseq_async.protocol import Assignment, Report, ScheduleEvent
from fairseq_async.server.plan import check_epochs, no_schedule

_NEWEST = 0.5  # weight of a worker's last round in its running mean speed
_IN_FLIGHT = 16  # rounds of steps in one update, at most: with overlap, steps go on while an update is on its way
_ROUNDING = 1e-6  # of steps: a third of one, three times
_SHORTEST = 1e-6  # seconds of a step; a shorter time was not measured
_FASTEST = 16.0  # times the median speed, at most: one worker's report cannot take the others' steps away


class AssignedWork(NamedTuple):
    """The present work of one worker: its shard, its local steps, and the batches of the shard before them."""

    shard: int | None
    steps: int
    offset: int


class _Beginning(NamedTuple):
    """Where the run was when it came to have as many workers as it has now: its local steps, its progress, which is
    mean local steps of a worker, and the local steps on each shard."""

    steps: int
    progress: float
    used: list[int]


class LocalStepPlan:
    """Assigns local steps by measured speed (DyLU) and shards by need; ends the run after its local steps.

    Steps are counted when their update has arrived. A worker that has nothing left to do is idle until the others
    have delivered.

    Args:
        workers: k; the run has k times ``total_steps`` local steps, whichever workers take them. Of a run that goes on
            with another k, those that are left of ``total_steps`` count so.
        local_steps: H, the most local steps of a round.
        total_steps: local steps of a worker on average; 0 for no end.
        dynamic_local_steps: whether a slower worker takes fewer steps a round.
        max_epoch: passes over the data by all workers together; 0 for no end.
        shards: samples in each shard of the training set; empty where workers bring data of their own.
        seed: seed of the choice of shards.
        barrier: whether nobody begins a round before all have ended the one before: then a step of any worker is one
            step of the schedule, however fast the worker is.
    """

    def __init__(
        self,
        workers: int,
        local_steps: int,
        total_steps: int,
        dynamic_local_steps: bool,
        shards: list[int],
        seed: int,
        max_epoch: int = 0,
        barrier: bool = False,
    ) -> None:
        self.workers, self.local_steps, self.total_steps = workers, local_steps, total_steps
        self.dynamic_local_steps = dynamic_local_steps
        self.shards, self.max_epoch, self.barrier = shards, max_epoch, barrier
        self.epochs = 0.0
        self.speeds: dict[int, float] = {}
        self.gone: set[int] = set()
        self.steps = 0
        self.used = [0] * len(shards)  # local steps on each shard, which are as many batches
        self._beginning = _Beginning(0, 0.0, [0] * len(shards))
        self.assigned: dict[int, AssignedWork] = {}
        self.awaited: set[int] = set()  # workers with assigned work who have not come yet since a restart
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def finished(self) -> bool:
        over = self.max_epoch > 0 and self.epochs > self.max_epoch - 1e-6
        return over or (self.total_steps > 0 and self._left <= 0)

    def assign(self, worker: int) -> Assignment:
        """Assigns the next round. A worker that comes back after a restart of the server begins its round again."""
        before = self.assigned.get(worker) if worker in self.awaited else None
        self._close(worker)
        self.gone.discard(worker)
        steps = self._steps_for(worker)
        if before is not None and before.shard is not None and steps:
            work = before._replace(steps=steps)
        else:
            chosen = self._choose_shard(worker) if self.shards and steps else None
            work = AssignedWork(chosen, steps, 0 if chosen is None else self._counted()[chosen])
        self.assigned[worker] = work
        return Assignment(
            local_steps=steps,
            shard=work.shard,
            offset=work.offset,
            progress=self._progress(work.shard),
            progress_per_step=self._progress_per_step(worker, work.shard),
            total_progress=self._progress(None),
            idle=steps == 0,
        )

    def expected_seconds(self, worker: int) -> float | None:
        """Returns the time of the worker's steps at the speed of its last rounds; None where the speed is not known.

        A worker without work is still to begin. In the first round it may be only just behind the others (None); in a
        later round it will not be in time (Inf).
        """
        if worker not in self.assigned:
            return math.inf if self.steps else None
        if worker not in self.speeds:
            return None
        return self.assigned[worker].steps / self.speeds[worker]

    def check(self, report: Report) -> None:
        """Checks the report of local steps.

        Raises:
            RefusedError: it lacks its steps, has more than there can be, or names a shard that does not exist.
        """
        if report.local_steps is None or report.step_seconds is None:
            raise RefusedError("the report of local steps lacks local_steps or step_seconds")
        most = _IN_FLIGHT * self.local_steps
        if report.local_steps > most:
            raise RefusedError(f"local_steps {report.local_steps}: a round has {self.local_steps}; {most} are the most")
        check_epochs(report.epochs, report.local_steps)
        if report.shard is not None and report.shard >= len(self.shards):
            raise RefusedError(f"shard {report.shard}: there are {len(self.shards)}")

    def record(self, worker: int, report: Report) -> None:
        """Counts the steps, and takes the report's median seconds per step, which one slow step does not move."""
        steps, seconds = report.local_steps or 0, report.step_seconds or 0.0
        work, shard = self.assigned.get(worker), report.shard
        if shard is None and work is not None:
            shard = work.shard
        self._close(worker)
        self.steps += steps
        self.epochs += report.epochs
        if shard is not None:  # the report's first: a worker that reconnected did the work before
            self.used[shard] += steps
        if seconds >= _SHORTEST:
            measured = 1.0 / seconds
            before = self.speeds.get(worker, measured)
            self.speeds[worker] = before + _NEWEST * (measured - before)

    def release(self, worker: int) -> None:
        """Gives up the work of a worker that is gone; its speed does not count unless it comes back."""
        self._close(worker)
        self.gone.add(worker)

    def follow(self, event: ScheduleEvent) -> float:
        return no_schedule(event)

    def state_dict(self) -> State:
        """Returns the state, with each worker's work: after a restart each begins it again, in any order."""
        state = {"steps": self.steps, "epochs": self.epochs, "used": self.used, "speeds": self.speeds}
        assigned = {worker: tuple(work) for worker, work in self.assigned.items()}  # of a type that torch trusts
        state |= {"workers": self.workers, "beginning": tuple(self._beginning)}
        return state | {"gone": sorted(self.gone), "assigned": assigned, "generator": self._generator.get_state()}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`. If the number of shards differs, steps so far count for each by its size. If
        the number of workers differs, the progress is what it was."""
        self.steps, self.epochs = state["steps"], state["epochs"]
        self.used = list(state["used"])
        self.assigned = {
            worker: AssignedWork(*work) for worker, work in state["assigned"].items() if worker < self.workers
        }
        steps, progress, used = state.get("beginning", (0, 0.0, [0] * len(self.used)))  # not in an older state
        if (before := state.get("workers", self.workers)) != self.workers:
            steps, progress, used = self.steps, progress + (self.steps - steps) / before, self.used
        if len(self.used) != len(self.shards):
            self.used, used, self.assigned = _by_share(self.steps, self.shards), _by_share(steps, self.shards), {}
        self._beginning = _Beginning(steps, progress, list(used))
        self.awaited = set(self.assigned)
        self.speeds = {worker: speed for worker, speed in state["speeds"].items() if worker < self.workers}
        self.gone = set(state.get("gone", ()))  # not in an older state; a worker that comes back is taken out
        self._generator.set_state(state["generator"].cpu())  # a simulation on a GPU loads its state there

    def _close(self, worker: int) -> None:
        self.assigned.pop(worker, None)
        self.awaited.discard(worker)

    @property
    def _present(self) -> dict[int, float]:
        """The speeds of the workers that are there, limited to a multiple of their median."""
        speeds = {worker: speed for worker, speed in self.speeds.items() if worker not in self.gone}
        most = _FASTEST * median(speeds.values()) if speeds else 0.0
        return {worker: min(speed, most) for worker, speed in speeds.items()}

    def _steps_for(self, worker: int) -> int:
        steps = self.local_steps
        if self.dynamic_local_steps and worker in self.speeds:
            steps = local_steps(self._present, self.local_steps)[worker]
        if self.total_steps:
            promised = sum(work.steps for other, work in self.assigned.items() if other not in self.awaited)
            steps = min(steps, self._left - promised)
        return max(0, steps)

    @property
    def _left(self) -> int:
        """The local steps from here to ``total_steps``, of all workers."""
        since, left = self.steps - self._beginning.steps, self.total_steps - self._beginning.progress
        return math.ceil(left * self.workers - _ROUNDING) - since

    def _counted(self) -> list[int]:
        """Returns the local steps on each shard, those of the present work included."""
        counted = list(self.used)
        for work in self.assigned.values():
            if work.shard is not None:
                counted[work.shard] += work.steps
        return counted

    def _choose_shard(self, worker: int) -> int:
        """Chooses a shard by need. At the very beginning, when all need the same, each worker gets its own, whoever
        comes first."""
        if not any(self.used):
            return worker % len(self.shards)
        probabilities = shard_probabilities(self.shards, self._counted())
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _progress(self, shard: int | None) -> float:
        """Returns the position of the schedule: by the steps on the shard, if there is one, since shards are used
        evenly; else by the steps of the run."""
        began = self._beginning
        if shard is None:
            return began.progress + (self.steps - began.steps) / self.workers
        share = self.shards[shard] / sum(self.shards)
        return began.progress + (self.used[shard] - began.used[shard]) / share / self.workers

    def _progress_per_step(self, worker: int, shard: int | None) -> float:
        if shard is not None:
            return sum(self.shards) / self.shards[shard] / self.workers
        if self.barrier or worker not in self.speeds:
            return 1.0
        present = self._present
        return fmean(present.values()) / present.get(worker, self.speeds[worker])


def _by_share(total: int, sizes: list[int]) -> list[int]:
    """Divides the total into whole numbers by the sizes, each within 1 of its share."""
    ends = [total * end // sum(sizes) for end in accumulate(sizes)]
    return [end - start for start, end in pairwise([0, *ends])]
