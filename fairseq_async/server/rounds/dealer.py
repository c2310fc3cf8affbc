"""Which batches of the data each worker accumulates in a step, where workers have unequal numbers of them."""

from fairseq_async.algorithms.rule import State


class Dealer:
    """Deals the batches of one order to the workers, so that no part is trained more often because its worker is fast.

    The order is that of a synchronous run: step after step, and in each step the batches of every worker's part in
    turn (:func:`~fairseq_async.worker.shards.place`). A worker's first work is of its own part, so that it does not
    matter who joins first. All further work is of the batches that follow those dealt last. The batches of a worker
    that dies are its successor's; where it has none, they are left out.

    Args:
        workers: k, the number of workers that were announced, which is the number of parts.
        micro_batches: U, the number of batches of each part in a step.
    """

    def __init__(self, workers: int, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self._next = workers * micro_batches
        self._reserved = set(range(workers))  # parts whose first batches no worker has had yet
        self._dealt: dict[int, tuple[int, int, int]] = {}  # of each worker: sequence, first batch and number of batches

    def deal(self, worker: int, sequence: int, number: int) -> tuple[int, int]:
        """Returns the number, in the order, of the first batch of a worker's gradient ``sequence``, and how many they
        are. If the worker has not sent that gradient since it was dealt batches for it, these are dealt again, however
        many it would be given now."""
        dealt = self._dealt.get(worker)
        if dealt is not None and dealt[0] == sequence:
            return dealt[1:]
        if worker in self._reserved and number <= self.micro_batches:
            self._reserved.remove(worker)
            first = worker * self.micro_batches
        else:
            first, self._next = self._next, self._next + number
        self._dealt[worker] = sequence, first, number
        return first, number

    def state_dict(self) -> State:
        return {"next": self._next, "reserved": sorted(self._reserved), "dealt": self._dealt}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`, which may be of another number of workers: a worker that the run did not
        have begins with the batches that follow, not with the first ones, which were trained."""
        self._next = state["next"]
        self._reserved = set(state.get("reserved", ()))  # not in an older snapshot
        self._dealt = {worker: tuple(dealt) for worker, dealt in state["dealt"].items()}
