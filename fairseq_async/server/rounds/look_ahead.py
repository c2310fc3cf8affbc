"""How far ahead of the server's parameters a worker with stale updates starts."""

from torch import Tensor

from fairseq_async.algorithms.rule import State

_NEWEST = 0.25  # weight of a worker's last update in its running means
_IN_STEP = 0.5  # a worker whose updates are less stale than this starts from the parameters as they are
_MOST = 2.0  # times its staleness that a worker starts ahead: a tiny step says little about the next ones
_VERSIONS, _SAMPLE = 128, 1024  # versions kept, and parameters kept of each, for comparison; each snapshot has them

NOTHING_MEASURED: State = {"staleness": {}, "steps": {}, "path": {}}
"""The state at the beginning of a run."""


class LookAhead:
    """Decides how far ahead of the parameters each worker starts, in multiples of the server's last step: 0 for a
    worker whose updates are not stale.

    An update that is τ versions late should be computed where the parameters are τ versions later. Their last step
    predicts that place: the nearest point along it is s steps ahead, and s is measured when the update comes. If all
    steps go the same way, s is τ; it is less where they turn. A worker starts ahead by the running mean of its s, and
    before the first measurement of s by that of its τ: an update from the first version has no step before it. An
    update from before the versions that are kept is not counted: a worker's first update may be late by thousands of
    versions, once, and must not send the worker so far ahead.

    Args:
        look_ahead: versions ahead at which all workers start, in place of the measured ones; None measures.
    """

    def __init__(self, look_ahead: float | None) -> None:
        self.look_ahead = look_ahead
        self._staleness: dict[int, float] = {}
        self._steps: dict[int, float] = {}
        self._path: dict[int, Tensor] = {}  # a sample of the parameters at each of the last versions
        self._size: int | None = None  # number of the parameters that the samples are of; None where it was not saved

    def follow(self, version: int, parameters: Tensor) -> None:
        """Keeps a sample of the parameters at the server's present version."""
        if self._size not in (None, parameters.numel()):
            self._path = {}  # of a server that had another part of the model, or all of it
        self._size = parameters.numel()
        if self.look_ahead is None and version not in self._path:
            stride = max(1, parameters.numel() // _SAMPLE)
            # in memory: a GPU's library for products of vectors would take 32 MiB there
            self._path[version] = parameters[::stride].detach().to("cpu", copy=True)
            while len(self._path) > _VERSIONS:
                del self._path[min(self._path)]  # the oldest; some are missing: a round may take several at once

    def note(self, worker: int, base: int, staleness: int) -> None:
        """Measures with a settled update of the worker, which was computed from version ``base``."""
        if base not in self._path:
            return
        self._staleness[worker] = _moved(self._staleness.get(worker), float(staleness))
        steps = self._steps_between(base, base + staleness)
        if steps is not None:
            self._steps[worker] = _moved(self._steps.get(worker), min(steps, _MOST * staleness))

    def of(self, worker: int) -> float:
        """Returns how many steps ahead the worker's next start is."""
        if self.look_ahead is not None:
            return self.look_ahead
        staleness = self._staleness.get(worker, 0.0)
        return max(0.0, self._steps.get(worker, staleness)) if staleness >= _IN_STEP else 0.0

    def remove_worker(self, worker: int) -> None:
        """Forgets a worker that is gone."""
        self._staleness.pop(worker, None)
        self._steps.pop(worker, None)

    def _steps_between(self, base: int, now: int) -> float | None:
        """Returns the multiple of the step into version ``base`` that leads nearest to version ``now``; None if it is
        not known: argmin over s of |θ_now − θ_base − s · (θ_base − θ_(base−1))|."""
        before, start, end = (self._path.get(version) for version in (base - 1, base, now))
        if before is None or start is None or end is None:
            return None
        step = start.double() - before
        size = float(step @ step)
        return float((end.double() - start) @ step) / size if size > 0 else None

    def state_dict(self) -> State:
        kept = {"staleness": self._staleness, "steps": self._steps, "path": self._path}
        return kept | {"parameters": self._size}

    def load_state_dict(self, state: State) -> None:
        self._staleness, self._steps, self._path = (dict(state[key]) for key in ("staleness", "steps", "path"))
        self._size = state.get("parameters")  # not in an older snapshot


def _moved(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST * (newest - mean)
