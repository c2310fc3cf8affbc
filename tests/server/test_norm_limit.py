"""``max_update_norm_ratio``: the running medians are those of the updates that were taken."""

import math
from collections import Counter

import pytest
import torch

from fairseq_async.algorithms import NesterovMomentum, NormGate, Update
from fairseq_async.protocol import Status
from fairseq_async.server import ParameterServer


class Sender:
    """Workers of a server that takes norms of up to 10 times the median."""

    def __init__(self) -> None:
        rule = NesterovMomentum(lr=1e-9, momentum=0.0, workers=1)
        self.server, self.sequences = ParameterServer(torch.zeros(1), rule, gate=NormGate(10.0)), Counter[int]()

    def send(self, norm: float, times: int = 1, worker: int = 0) -> set[Status]:
        statuses = set()
        for _ in range(times):
            update = Update(worker, self.sequences[worker], self.server.version, 1.0, torch.tensor([norm]))
            statuses.add(self.server.push(update).status)
            self.sequences[worker] += 1
        return statuses

    def restart(self) -> None:
        state, self.server = self.server.state_dict(), Sender().server
        self.server.load_state_dict(state)


@pytest.mark.parametrize(
    ("wrong", "status"),
    [(100.0, Status.OUTLIER), (math.inf, Status.REFUSED), (math.nan, Status.REFUSED)],
)
def test_what_was_refused_does_not_move_the_median(wrong: float, status: Status) -> None:
    """A worker that has gone wrong sends many: if they counted, they would soon be the usual ones."""
    sender = Sender()
    assert sender.send(1.0, times=11) == {Status.APPLIED}
    assert sender.send(wrong, times=40) == {status}
    assert sender.send(10.5) == {Status.OUTLIER} and sender.send(10.0) == {Status.APPLIED}


def test_stale_and_repeated_updates_do_not_move_the_median() -> None:
    sender = Sender()
    sender.send(1.0, times=11)
    for _ in range(40):
        again = Update(0, 0, 0, 1.0, torch.tensor([100.0]))
        assert sender.server.push(again).status is Status.DUPLICATE
    assert sender.send(100.0) == {Status.OUTLIER}


def test_the_first_ten_updates_are_taken_whatever_their_norm() -> None:
    sender = Sender()
    assert sender.send(1.0, times=10) | sender.send(100.0) == {Status.APPLIED}
    assert sender.send(100.0) == {Status.OUTLIER}


@pytest.mark.parametrize("restarts", [False, True])
def test_the_median_is_that_of_the_last_101(restarts: bool) -> None:
    """Norms that grow slowly are right: 81 is more than 10 times the mean of 1 and 9, and less than 10 times 9."""
    sender = Sender()
    sender.send(1.0, times=101)
    if restarts:
        sender.restart()
    sender.send(9.0, times=50)
    assert sender.send(81.0) == {Status.OUTLIER}
    sender.send(9.0)
    assert sender.send(81.0) == {Status.APPLIED}


@pytest.mark.parametrize("others", [1, 2, 3])
def test_tiny_updates_of_one_worker_make_no_outliers_of_those_of_others(others: int) -> None:
    sender = Sender()
    for worker in range(1, 1 + others):
        sender.send(1.0, times=20, worker=worker)
    assert sender.send(1e-20, times=101) == {Status.APPLIED}
    for worker in range(1, 1 + others):
        assert sender.send(9.0, worker=worker) == {Status.APPLIED}
        assert sender.send(11.0, worker=worker) == {Status.OUTLIER}


@pytest.mark.parametrize("others", [1, 2, 3])
def test_huge_updates_of_one_worker_let_no_outliers_of_others_through(others: int) -> None:
    sender = Sender()
    for worker in range(1, 1 + others):
        sender.send(1.0, times=20, worker=worker)
    sender.send(1e9, times=101)
    assert [sender.send(11.0, worker=worker) for worker in range(1, 1 + others)] == [{Status.OUTLIER}] * others


@pytest.mark.parametrize("restarts", [False, True])
def test_a_new_worker_is_measured_by_those_that_are_there(restarts: bool) -> None:
    """It may be the one that is wrong; when it has eleven norms of its own, they are its measure."""
    sender = Sender()
    sender.send(1.0, times=11)
    if restarts:
        sender.restart()
    assert sender.send(11.0, worker=1) == {Status.OUTLIER}
    assert sender.send(5.0, worker=1, times=11) == {Status.APPLIED}
    assert sender.send(11.0, worker=1) == {Status.APPLIED} and sender.send(11.0) == {Status.OUTLIER}


@pytest.mark.parametrize("restarts", [False, True])
def test_three_workers_are_the_measure_of_a_new_one_and_of_one_whose_norms_were_tiny(restarts: bool) -> None:
    sender = Sender()
    for _ in range(11):
        for worker, norm in enumerate((1e-3, 1.0, 2.0)):
            sender.send(norm, worker=worker)
    sender.send(1e-3, times=44)  # most norms are of worker 0, and each worker counts once
    if restarts:
        sender.restart()
    assert sender.send(11.0, worker=3) == {Status.OUTLIER} and sender.send(9.0, worker=3) == {Status.APPLIED}
    assert sender.send(9.0) == {Status.APPLIED}, "the last layers of its model may just have been unfrozen"


def test_a_state_with_one_median_for_all_workers_has_it_for_new_ones() -> None:
    gate = NormGate(10.0)
    gate.load_state_dict({"norms": [1.0] * 101})
    assert gate.refuses(0, 100.0) and not gate.refuses(0, 9.0)
