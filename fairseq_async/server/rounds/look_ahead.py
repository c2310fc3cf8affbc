"""How far ahead of the server's parameters a worker starts whose updates will be stale."""

from torch import Tensor

from fairseq_async.algorithms.rule import State

_NEWEST = 0.25  # weight of a worker's last update in its running means
_IN_STEP = 0.5  # a worker whose updates are less stale than this starts from the parameters as they are
_MOST = 2.0  # times its staleness that a worker starts ahead: a tiny step says little of those behind it
_VERSIONS, _SAMPLE = 128, 1024  # of the parameters, that are kept to be compared; they are in each snapshot

NOTHING_MEASURED: State = {"staleness": {}, "steps": {}, "path": {}}
"""The state of a run that begins."""


class LookAhead:
    """For each worker, by how many of the server's last steps it starts ahead; 0 for one that is in step with it.

    An update that is τ versions late should be computed where the parameters are τ versions later. Their last step
    predicts that place: the nearest point along it is s steps ahead, and s is measured when the update comes. Of steps
    that all go the same way it is τ; it is less where they turn. A worker starts ahead by the running mean of its own
    s, and before the first measurement by that of its τ: an update that began at the first version has no step before
    it. One that began before the versions that are kept says nothing: a worker's first update may be late by thousands
    of versions, once, and must not send its worker so far away.

    Args:
        versions: the same for all workers in place of what is measured; None measures.
    """

    def __init__(self, versions: float | None) -> None:
        self.versions = versions
        self._staleness: dict[int, float] = {}
        self._steps: dict[int, float] = {}
        self._path: dict[int, Tensor] = {}  # a sample of the parameters at each of the last versions

    def follow(self, version: int, parameters: Tensor) -> None:
        """The server is at this version."""
        if self.versions is None and version not in self._path:
            stride = max(1, parameters.numel() // _SAMPLE)
            self._path[version] = parameters[::stride].detach().clone()
            while len(self._path) > _VERSIONS:
                del self._path[min(self._path)]  # a round may take several versions at once: not always the same ones

    def note(self, worker: int, base: int, staleness: int) -> None:
        """An update of the worker was settled, which it had computed from version ``base``."""
        if base not in self._path:
            return
        self._staleness[worker] = _moved(self._staleness.get(worker), float(staleness))
        steps = self._steps_between(base, base + staleness)
        if steps is not None:
            self._steps[worker] = _moved(self._steps.get(worker), min(steps, _MOST * staleness))

    def of(self, worker: int) -> float:
        """Steps that the worker's next start is ahead."""
        if self.versions is not None:
            return self.versions
        staleness = self._staleness.get(worker, 0.0)
        return max(0.0, self._steps.get(worker, staleness)) if staleness >= _IN_STEP else 0.0

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._staleness.pop(worker, None)
        self._steps.pop(worker, None)

    def _steps_between(self, base: int, now: int) -> float | None:
        """The multiple of the step into version ``base`` that leads nearest to version ``now``; None where it is not
        known: argmin over s of |θ_now − θ_base − s · (θ_base − θ_(base−1))|."""
        before, start, end = (self._path.get(version) for version in (base - 1, base, now))
        if before is None or start is None or end is None:
            return None
        step = start.double() - before
        size = float(step @ step)
        return float((end.double() - start) @ step) / size if size > 0 else None

    def state_dict(self) -> State:
        return {"staleness": self._staleness, "steps": self._steps, "path": self._path}

    def load_state_dict(self, state: State) -> None:
        self._staleness, self._steps, self._path = (dict(state[key]) for key in ("staleness", "steps", "path"))


def _moved(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST * (newest - mean)
