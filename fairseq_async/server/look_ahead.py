"""How far ahead of the server's parameters a worker starts whose updates will be stale."""

from fairseq_async.algorithms.rule import State

_NEWEST = 0.25  # weight of a worker's last update in the running mean of its staleness
_IN_STEP = 0.5  # a worker whose updates are less stale than this starts from the parameters as they are


class LookAhead:
    """For each worker, the number of the server's last steps that it is given ahead: the running mean of the staleness
    of its updates; 0 for a worker that is in step with the server.

    Args:
        versions: the same for all workers in place of their staleness; None follows it.
    """

    def __init__(self, versions: float | None) -> None:
        self.versions = versions
        self._staleness: dict[int, float] = {}

    def note(self, worker: int, staleness: int) -> None:
        """An update of the worker was settled."""
        before = self._staleness.get(worker, float(staleness))
        self._staleness[worker] = before + _NEWEST * (staleness - before)

    def of(self, worker: int) -> float:
        """Versions that the worker's next start is ahead."""
        if self.versions is not None:
            return self.versions
        staleness = self._staleness.get(worker, 0.0)
        return staleness if staleness >= _IN_STEP else 0.0

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._staleness.pop(worker, None)

    def state_dict(self) -> State:
        return {"staleness": self._staleness}

    def load_state_dict(self, state: State) -> None:
        self._staleness = dict(state["staleness"])
