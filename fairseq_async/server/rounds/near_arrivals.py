"""How long a step stays open for gradients that are about to come."""

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

from fairseq_async.algorithms.rule import State
from fairseq_async.server.membership import Membership
from fairseq_async.server.rounds.waiting import Waiting

_REMEMBERED = 5  # last steps of a worker: one odd batch among them does not move their median
_DEVIATION = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
_ROUNDING = 1e-9  # of the time that work takes
_MEASURED = 3  # first steps, for which shares wait until all speeds are known
_SLOWEST = 8.0  # times the fastest worker's time: for one slower than that, the first step does not wait
_OVERDUE = 2.0  # times a worker's own time, for which the other two wait
_UNEVEN = 2.0  # standard deviations of a worker's own time, for which a step of unequal shares waits longer
_BUSY = 0.8  # of its workers' time, that a step of unequal shares has to use to be waited for as a whole


@dataclass(frozen=True)
class StepTime:
    """The time that a micro-batch of a worker takes in its steps, from the last ones.

    Attributes:
        seconds: their median.
        spread: how uneven they are, in seconds: an estimate of the standard deviation.
    """

    seconds: float
    spread: float = 0.0

    @classmethod
    def of(cls, took: list[float]) -> "StepTime":
        seconds = median(took)
        return cls(seconds, _DEVIATION * median(abs(each - seconds) for each in took))


class NearArrivals(Waiting):
    """Keeps a step open while another worker is near, and closes it when no worker is.

    A worker is *due* at the time when it was given its work plus the median time of its last steps; where the number of
    micro-batches in a step changes, in proportion to it. A step's time is taken from an answer of the server to the
    arrival of the next gradient. A worker is *near* if it is due within the
    *grace* of each waiting gradient, which begins at the gradient's arrival. The grace is a share of the sender's own
    step, and longer if the sender's steps are uneven: by the spread of its last ones (1.48 times their median absolute
    deviation, which is the standard deviation of normal ones), up to the share again.

    So workers of about equal speed step together, however uneven their batches are; a fast worker never waits for one
    that is much slower; and a slow worker, for which half a step is long, waits for the fast ones.

    Workers of unequal numbers of micro-batches were given them to be done together, as nearly as whole micro-batches
    allow. All workers that have begun since the last step are then near, whenever they are due, if their step uses at
    least four fifths of their time until the last of them is due. Otherwise one of them, with its single micro-batch,
    is too slow for the others to wait for it. Where the times of such a worker are uneven, it is due two of their
    standard deviations later: the others would be done hardly sooner without it, and a late gradient is dear.

    A near worker that does not come is waited for until a grace after it was due. A wrong estimate costs that much
    once: afterwards the worker is not near any more. In the first step no time is known, and all workers are taken to
    be as fast as the first that comes; later no step waits for a worker's first gradient.

    Where shares are divided by speed, all workers that have begun are near in the first three steps, in which speeds
    are measured: these steps, of the largest learning rate, then have the batches of synchronous ones. In the first of
    them a worker may be eight times slower than the first that comes, in the others it may take twice its own time.

    Args:
        grace_share: the grace as a share of a worker's own step.
        grace_period: the grace of all workers in seconds, in place of the share.
        shares: whether micro-batches are divided by the workers' speeds.
    """

    steps_together = True

    def __init__(self, grace_share: float, grace_period: float | None = None, shares: bool = False) -> None:
        self.grace_share, self.grace_period, self.shares = grace_share, grace_period, shares
        self.deadline: float | None = None
        self._begun: dict[int, float] = {}
        self._took: dict[int, list[float]] = {}  # seconds a micro-batch
        self._micro_batches: dict[int, int] = {}  # of each worker's present or waiting gradient
        self._step_times: dict[int, StepTime] = {}  # from _took; kept, since each arrival needs those of all workers
        self._waiting: dict[int, float] = {}  # since when the gradient of each worker waits
        self._first_step = True
        self._in_step: set[int] = set()  # workers that have begun their present work since the last step

    def awaited(self, membership: Membership, now: float) -> set[int]:
        """Here also those that have sent nothing yet: about first gradients this class decides by itself."""
        return membership.expected(now)

    def limit(self, awaited: int) -> None:
        """Does nothing: no number of updates completes a step."""

    def begin_work(self, worker: int, now: float, micro_batches: int = 1) -> None:
        """If a worker asks again without a gradient, the first time counts."""
        self._begun.setdefault(worker, now)
        self._micro_batches[worker] = micro_batches
        self._in_step.add(worker)

    def _arrive(self, worker: int, now: float) -> None:
        if worker in self._begun:
            took = self._took.setdefault(worker, [])
            took.append((now - self._begun.pop(worker)) / self._number(worker))
            del took[:-_REMEMBERED]
            self._step_times[worker] = StepTime.of(took)
        self._waiting[worker] = now

    def continues(self, arrived: int | None, others: Collection[int], now: float, held: int = 0) -> bool:
        if arrived is not None:
            self._arrive(arrived, now)
        fastest = self._fastest()
        graces = {worker: self._grace(worker, self._step_times.get(worker, fastest)) for worker in self._waiting}
        until = min((since + graces[worker] for worker, since in self._waiting.items()), default=now)
        grace = min(graces.values(), default=0.0)
        expected = [worker for worker in others if worker in self._begun and self._is_known(worker)]
        measures = self.shares and max(map(len, self._took.values()), default=0) <= _MEASURED
        together = self._in_step if measures or self._is_balanced() else set[int]()
        times = {worker: self._expected_seconds(worker, measures, worker in together) for worker in expected}
        due = {worker: self._begun[worker] + self._number(worker) * seconds for worker, seconds in times.items()}
        in_time = [at for worker, at in due.items() if worker in together or at <= until + _ROUNDING * grace]
        near = [at + grace for at in in_time if at + grace > now]
        self.deadline = max(near, default=now)
        return bool(near)

    def remove_worker(self, worker: int) -> None:
        """The successor of a worker may have another speed."""
        for known in (self._begun, self._took, self._step_times, self._waiting, self._micro_batches):
            known.pop(worker, None)
        self._in_step.discard(worker)
        if not self._waiting:
            self.deadline = None

    def close(self) -> None:
        if self._waiting:  # else no step was taken
            self._first_step = False
            self.deadline, self._waiting, self._in_step = None, {}, set()

    def _is_balanced(self) -> bool:
        """Whether the workers of the step have unequal shares, with which they are done at about the same time."""
        numbers = {worker: self._number(worker) for worker in self._in_step}
        if len(set(numbers.values())) < 2 or not self._step_times.keys() >= numbers.keys():
            return False
        times = {worker: self._step_times[worker].seconds for worker in numbers}
        longest = max(numbers[worker] * times[worker] for worker in numbers)
        return sum(numbers.values()) >= _BUSY * sum(longest / seconds for seconds in times.values())

    def _is_known(self, worker: int) -> bool:
        return self._first_step or worker in self._took

    def _expected_seconds(self, worker: int, measures: bool, together: bool) -> float:
        """Returns the time of a micro-batch, at most, of a worker that is near."""
        if worker in self._step_times:
            step = self._step_times[worker]
            if measures:
                return _OVERDUE * step.seconds
            return step.seconds + (_UNEVEN * step.spread if together else 0.0)
        return self._fastest().seconds * (_SLOWEST if measures else 1.0)

    def _number(self, worker: int) -> int:
        return self._micro_batches.get(worker, 1)

    def _grace(self, worker: int, step: StepTime) -> float:
        if self.grace_period is not None:
            return self.grace_period
        share = self.grace_share * step.seconds
        return self._number(worker) * (share + min(step.spread, share))

    def _fastest(self) -> StepTime:
        """Returns the step time of the fastest worker, for workers without one in the first step."""
        return StepTime(min((each.seconds for each in self._step_times.values()), default=0.0))

    def state_dict(self) -> State:
        waiting = {"deadline": self.deadline, "waiting": self._waiting, "first_step": self._first_step}
        work = {"begun": self._begun, "micro_batches": self._micro_batches, "in_step": sorted(self._in_step)}
        return waiting | work | {"took": self._took}

    def load_state_dict(self, state: State) -> None:
        self.deadline, self._begun, self._waiting = state["deadline"], dict(state["begun"]), dict(state["waiting"])
        self._first_step = state["first_step"]
        self._micro_batches = dict(state.get("micro_batches", {}))  # not in an older one
        self._in_step = set(state.get("in_step", ()))  # likewise
        self._took = {worker: list(took) for worker, took in state["took"].items()}
        self._step_times = {worker: StepTime.of(took) for worker, took in self._took.items()}
