"""How many micro-batches each worker accumulates in a step, by the workers' speeds."""

from collections.abc import Collection
from itertools import repeat

from fairseq_async.algorithms.rule import State
from fairseq_async.server.rounds.dealer import Dealer
from fairseq_async.server.rounds.near_arrivals import StepTime

_MEASURED = 3  # steps of a worker before its time counts: one odd batch says nothing
_REMEMBERED = 5
_EQUAL = 0.1  # speeds that differ by no more, or by no more than their spread, are equal
_WORTH = 0.95  # of the present step's time, that another division has to take at most
_JUMP = 1.5  # times the median: two steps in a row beyond it are a new speed
_OVERDUE = 2.0  # times its expected time, after which a worker's work is given to the others


class Shares:
    """Divides the micro-batches of each step among the workers so that all need about the same time.

    A step has k · U micro-batches, with k workers and U micro-batches of each on average. Workers of equal speed have U
    each. Otherwise each micro-batch in turn goes to the worker that would be done with it first, which makes the step
    as short as whole micro-batches allow. A worker whose speed is not known yet has U. A worker that is gone, or takes
    twice the time that it should, leaves its share to the others from the next step on.

    Related: LB-BSP (Chen et al. 2018, "Semi-Dynamic Load Balancing", arXiv 1806.02508), which sizes the batches of
    synchronous workers by their speeds.

    Args:
        micro_batches: U; 0 where every worker decides by itself.
        workers: number of workers that were announced.

    Attributes:
        dealer: says which micro-batches they are.
        begun: the time when each worker was given its present work, and the number of micro-batches in it.
    """

    def __init__(self, micro_batches: int, workers: int = 1) -> None:
        self.micro_batches, self.dealer = micro_batches, Dealer(workers, micro_batches)
        self.begun: dict[int, tuple[float, int]] = {}
        self._took: dict[int, list[float]] = {}  # seconds a micro-batch, in each worker's last steps
        self._given: dict[int, int] = {}

    def begin(self, worker: int, now: float) -> int:
        """Returns the number of micro-batches of the work that a worker begins now."""
        number = self._given.get(worker, self.micro_batches)
        self.begun[worker] = self.begun.get(worker, (now, 0))[0], number  # asked again without a gradient: the first
        return number

    def deal(self, worker: int, sequence: int, now: float) -> tuple[int, int]:
        """Returns the first micro-batch of the work that a worker begins now, its gradient ``sequence``, and their
        number."""
        first, number = self.dealer.deal(worker, sequence, self.begin(worker, now))
        self.begun[worker] = self.begun[worker][0], number
        return first, number

    def arrive(self, worker: int, now: float) -> None:
        """Measures with a worker's gradient that has come."""
        since, number = self.begun.pop(worker, (now, 0))
        if number:
            took = self._took.setdefault(worker, [])
            before = StepTime.of(took).seconds if took else 0.0
            took.append((now - since) / number)
            if len(took) > 2 and (min(took[-2:]) > _JUMP * before or max(took[-2:]) * _JUMP < before):
                took[:] = [took[-1]] * _MEASURED  # the older ones are of another speed
            del took[:-_REMEMBERED]

    def divide(self, workers: Collection[int], total: int, now: float) -> None:
        """Divides the micro-batches of the coming step.

        Args:
            workers: those that take part.
            total: k, the number of workers whose micro-batches a step has.
        """
        times = {worker: StepTime.of(self._took[worker]) for worker in workers if self._is_measured(worker)}
        unknown = len(workers) - len(times)
        times = {worker: time for worker, time in times.items() if not self._is_overdue(worker, time, now)}
        rest = max(len(times), (total - unknown) * self.micro_batches)
        if not times:
            self._given = {}
        elif rest == len(times) * self.micro_batches and _are_equal(times):
            self._given = dict(zip(times, repeat(self.micro_batches)))
        else:
            self._given = self._unless_about_as_fast(times, _divided(times, rest))

    def remove_worker(self, worker: int) -> None:
        """Forgets a worker that is gone: its successor may have another speed."""
        for known in (self.begun, self._took, self._given):
            known.pop(worker, None)

    def _is_measured(self, worker: int) -> bool:
        return len(self._took.get(worker, ())) >= _MEASURED

    def _is_overdue(self, worker: int, time: StepTime, now: float) -> bool:
        since, number = self.begun.get(worker, (now, 0))
        return now - since > _OVERDUE * number * time.seconds

    def _unless_about_as_fast(self, times: dict[int, StepTime], new: dict[int, int]) -> dict[int, int]:
        old = {worker: self._given.get(worker, self.micro_batches) for worker in times}
        same_step = sum(old.values()) == sum(new.values())
        return old if same_step and _seconds(times, new) > _WORTH * _seconds(times, old) else new

    def state_dict(self) -> State:
        """Returns what another server needs; the times in ``begun`` are of this one's clock."""
        return {"took": self._took, "given": self._given, "dealer": self.dealer.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._took = {worker: list(took) for worker, took in state["took"].items()}
        self._given = dict(state["given"])
        if "dealer" in state:  # not in an older snapshot
            self.dealer.load_state_dict(state["dealer"])


def _are_equal(times: dict[int, StepTime]) -> bool:
    fastest = min(times.values(), key=lambda time: time.seconds)
    slowest = max(times.values(), key=lambda time: time.seconds)
    return slowest.seconds - fastest.seconds <= max(_EQUAL * fastest.seconds, slowest.spread + fastest.spread)


def _divided(times: dict[int, StepTime], number: int) -> dict[int, int]:
    """Gives each worker one micro-batch, and each further one to the worker that is done with it first."""
    given = dict.fromkeys(sorted(times), 1)
    for _ in range(number - len(times)):
        given[min(given, key=lambda worker: (given[worker] + 1) * times[worker].seconds)] += 1
    return given


def _seconds(times: dict[int, StepTime], given: dict[int, int]) -> float:
    return max(given[worker] * time.seconds for worker, time in times.items())
