"""``max_update_norm_ratio``: the running median is that of the updates that were taken."""

import math

import pytest
import torch

from fairseq_async.algorithms import NesterovMomentum, NormGate, Update
from fairseq_async.server import ParameterServer, Status


class Sender:
    """One worker of a server that takes norms of up to 10 times the median."""

    def __init__(self) -> None:
        rule = NesterovMomentum(lr=1e-9, momentum=0.0, workers=1)
        self.server, self.sequence = ParameterServer(torch.zeros(1), rule, gate=NormGate(10.0)), 0

    def send(self, norm: float, times: int = 1) -> set[Status]:
        statuses = set()
        for _ in range(times):
            update = Update(0, self.sequence, self.server.version, 1.0, torch.tensor([norm]))
            statuses.add(self.server.push(update).status)
            self.sequence += 1
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
    assert sender.send(100.0) == {Status.OUTLIER} and sender.send(9.0) == {Status.APPLIED}


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
