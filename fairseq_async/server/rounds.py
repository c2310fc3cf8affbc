"""The plan of local SGD: how many steps each worker takes, on which shard, and where the run stands."""

import math
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

import torch

from fairseq_async.algorithms import local_steps, shard_probabilities
from fairseq_async.server.plan import Message, checked_number

_NEWEST = 0.5  # weight of a worker's last round in its running speed


class Rounds:
    """Assigns local steps by measured speed (DyLU) and shards by need; ends the run after its local steps.

    Steps are counted when their update has arrived. A worker that has nothing left to do is idle until the others
    have delivered.

    Args:
        workers: k; the run has ``total_steps`` of each on average, whoever takes them.
        maximum: H, local steps of a round.
        total_steps: 0 for no end.
        dynamic: whether a slower worker takes fewer steps a round.
        max_epoch: passes over the data by all workers together; 0 for no end.
        shards: samples in each shard of the training set; empty where workers bring data of their own.
        seed: of the choice of shards.
    """

    def __init__(
        self,
        workers: int,
        maximum: int,
        total_steps: int,
        dynamic: bool,
        shards: list[int],
        seed: int,
        max_epoch: int = 0,
    ) -> None:
        self.workers, self.maximum, self.total_steps, self.dynamic = workers, maximum, total_steps, dynamic
        self.shards, self.max_epoch = shards, max_epoch
        self.epochs = 0.0
        self.speeds: dict[int, float] = {}
        self.gone: set[int] = set()
        self.steps = 0
        self.used = [0] * len(shards)  # local steps on each shard, which are as many batches
        self.assigned: dict[int, tuple[int | None, int, int]] = {}  # worker: shard, steps, and batches before them
        self.awaited: set[int] = set()  # those of them who have not come yet since a restart
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def finished(self) -> bool:
        over = self.max_epoch > 0 and self.epochs > self.max_epoch - 1e-6
        return over or (self.total_steps > 0 and self.steps >= self.total_steps * self.workers)

    def assign(self, worker: int) -> Message:
        """The next round: ``local_steps``, the ``shard`` and at which of its batches to begin (``offset``).

        For the schedule there is the ``progress`` in mean local steps per worker, which grows by ``pace`` with each of
        this worker's steps.
        """
        before = self.assigned.get(worker) if worker in self.awaited else None
        self._close(worker)
        self.gone.discard(worker)
        steps = self._steps_for(worker)
        if before is not None and before[0] is not None and steps:
            shard, _, offset = before
        else:
            shard = self._choose_shard(worker) if self.shards and steps else None
            offset = 0 if shard is None else self._counted()[shard]
        self.assigned[worker] = shard, steps, offset
        place = {"shard": shard, "offset": offset, "progress": self._progress(shard), "pace": self._pace(worker, shard)}
        return {"local_steps": steps, "total_progress": self.steps / self.workers, "idle": steps == 0, **place}

    def expected_seconds(self, worker: int) -> float | None:
        """Its steps at the speed of its last rounds; who has none is still to begin: it may be just behind in the first
        round, and will not be there in time in another."""
        if worker not in self.assigned:
            return math.inf if self.steps else None
        if worker not in self.speeds:
            return None
        return self.assigned[worker][1] / self.speeds[worker]

    def check(self, report: Message) -> None:
        for name in ("local_steps", "step_seconds"):
            checked_number(report[name], name)
        checked_number(report.get("epochs", 0.0), "epochs")
        if report.get("shard") not in (None, *range(len(self.shards))):
            raise ValueError(f"shard {report['shard']}: there are {len(self.shards)}")

    def record(self, worker: int, weight: float, report: Message) -> None:
        """Takes the worker's median seconds per step, which one slow step does not move."""
        steps = int(report["local_steps"])
        assigned = self.assigned.get(worker, (None,))[0]
        self._close(worker)
        shard = report.get("shard", assigned)  # one that has connected again is still at what it was told before
        self.steps += steps
        self.epochs += report.get("epochs", 0.0)
        if shard is not None:
            self.used[shard] += steps
        if report["step_seconds"] > 0:
            measured = 1.0 / report["step_seconds"]
            before = self.speeds.get(worker, measured)
            self.speeds[worker] = before + _NEWEST * (measured - before)

    def forget(self, worker: int) -> None:
        """What it was at is open again, and its speed counts no more, unless it comes back."""
        self._close(worker)
        self.gone.add(worker)

    def hear(self, worker: int, message: Message) -> Message:
        raise KeyError("kind")

    def state_dict(self) -> dict[str, Any]:
        """With what workers are at: after a restart each begins again there, in whatever order they come."""
        state = {"steps": self.steps, "epochs": self.epochs, "used": self.used, "speeds": self.speeds}
        return state | {"assigned": self.assigned, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There may be other workers and other shards than before: then what was used counts for each by its size."""
        self.steps, self.epochs = state["steps"], state["epochs"]
        self.used = list(state["used"])
        self.assigned = {worker: work for worker, work in state["assigned"].items() if worker < self.workers}
        if len(self.used) != len(self.shards):
            self.used, self.assigned = _by_share(self.steps, self.shards), {}
        self.awaited = set(self.assigned)
        self.speeds = {worker: speed for worker, speed in state["speeds"].items() if worker < self.workers}
        self._generator.set_state(state["generator"])

    def _close(self, worker: int) -> None:
        self.assigned.pop(worker, None)
        self.awaited.discard(worker)

    @property
    def _present(self) -> dict[int, float]:
        """The speeds of those who are there."""
        return {worker: speed for worker, speed in self.speeds.items() if worker not in self.gone}

    def _steps_for(self, worker: int) -> int:
        steps = self.maximum
        if self.dynamic and worker in self.speeds:
            steps = local_steps(self._present, self.maximum)[worker]
        if self.total_steps:
            promised = sum(work[1] for other, work in self.assigned.items() if other not in self.awaited)
            steps = min(steps, self.total_steps * self.workers - self.steps - promised)
        return max(0, steps)

    def _counted(self) -> list[int]:
        """Local steps on each shard, with those that workers are at."""
        counted = list(self.used)
        for shard, steps, _ in self.assigned.values():
            if shard is not None:
                counted[shard] += steps
        return counted

    def _choose_shard(self, worker: int) -> int:
        """By need; at the very beginning, where all are in the same need, each worker its own, whoever comes first."""
        if not any(self.used):
            return worker % len(self.shards)
        probabilities = shard_probabilities(self.shards, self._counted())
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _progress(self, shard: int | None) -> float:
        """In a run whose shards are used evenly, a shard's own steps say how far the run is."""
        if shard is None:
            return self.steps / self.workers
        share = self.shards[shard] / sum(self.shards)
        return self.used[shard] / share / self.workers

    def _pace(self, worker: int, shard: int | None) -> float:
        if shard is not None:
            return sum(self.shards) / self.shards[shard] / self.workers
        if worker not in self.speeds:
            return 1.0
        return fmean(self._present.values()) / self.speeds[worker]


def _by_share(total: int, sizes: list[int]) -> list[int]:
    """Whole numbers that add up to the total, each within 1 of its share."""
    ends = [total * end // sum(sizes) for end in accumulate(sizes)]
    return [end - start for start, end in pairwise([0, *ends])]
