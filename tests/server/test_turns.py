"""In which order peers are served whose messages take the server's time in different measure."""

from typing import Any

import pytest

from fairseq_async.server.network.connection_loop import Turns
from fairseq_async.server.network.connections import Peer


class Queue:
    """Peers by name, with what each message of theirs takes; those that ask on and on are always there."""

    def __init__(self, **greedy: float) -> None:
        self.turns = Turns()
        self.costs: dict[Peer, float] = {}
        self.greedy = [self.connect(cost) for cost in greedy.values()]

    def connect(self, cost: float) -> Peer:
        peer = Peer(channel=None)  # type: ignore[arg-type]
        self.turns.greet(peer)
        self.turns.charge(peer, 0.0)
        self.turns.admit(peer)
        self.costs[peer] = cost
        return peer

    def serve_one(self, *others: Peer) -> Peer:
        """The one who is served of these and those that ask on and on."""
        peer = self.turns.in_order([*self.greedy, *others])[0]
        self.turns.charge(peer, self.costs[peer])
        return peer

    def served_before(self, peer: Peer) -> int:
        """Messages of others, from the time when the peer asks."""
        before = 0
        while self.serve_one(peer) is not peer:
            before += 1
        return before


NINE = {f"greedy_{number}": 1.0 for number in range(9)}


def test_a_worker_that_asks_now_and_then_is_the_next_one() -> None:
    queue = Queue(**NINE)
    honest = queue.connect(0.1)
    queue.served_before(honest)
    for _ in range(20):
        for _ in range(9):  # it computes meanwhile
            queue.serve_one()
        assert queue.served_before(honest) == 0


def test_a_worker_that_asks_all_the_time_has_its_share_of_the_time_not_of_the_messages() -> None:
    queue = Queue(**NINE)
    honest = queue.connect(0.1)
    queue.served_before(honest)
    before = [queue.served_before(honest) for _ in range(100)]
    assert sum(before) <= 100 and max(before) <= 9


def test_a_worker_that_takes_less_than_its_share_is_always_the_next_one() -> None:
    queue = Queue(**NINE)
    honest = queue.connect(0.01)
    queue.served_before(honest)
    for _ in range(9):
        queue.serve_one()
    assert [queue.served_before(honest) for _ in range(20)] == [0] * 20


def test_nobody_saves_up_much_of_what_he_did_not_use() -> None:
    queue = Queue(**NINE)
    late = queue.connect(1.0)
    for _ in range(900):
        queue.serve_one()
    served = [queue.serve_one(late) is late for _ in range(100)]
    assert 10 <= sum(served) <= 12


def test_to_connect_again_is_no_way_to_the_front() -> None:
    """Each of them sends one message on each connection."""
    queue = Queue()
    honest = queue.connect(0.1)
    queue.greedy = [queue.connect(1.0) for _ in range(9)]
    before: list[int] = []
    for _ in range(50):
        waited = 0
        while (served := queue.serve_one(honest)) is not honest:
            queue.greedy[queue.greedy.index(served)] = queue.connect(1.0)
            waited += 1
        before.append(waited)
    assert max(before) <= 9 and sum(before) <= 60


def test_an_introduction_does_not_wait_for_what_others_ask() -> None:
    queue = Queue(**NINE)
    for _ in range(13):
        queue.serve_one()
    stranger: Any = Peer(channel=None)  # type: ignore[arg-type]
    queue.turns.greet(stranger)
    assert queue.turns.in_order([*queue.greedy, stranger]).index(stranger) <= 9
    queue.costs[stranger] = 0.0
    assert queue.served_before(stranger) <= 9


@pytest.mark.parametrize("cost", [0.0, 0.3])
def test_equal_peers_have_their_turns_one_after_another(cost: float) -> None:
    queue = Queue(a=cost, b=cost, c=cost)
    order = [queue.greedy.index(queue.serve_one()) for _ in range(9)]
    assert order == ([0, 1, 2] * 3 if cost else [0] * 9)


def test_who_comes_is_behind_all_others_whoever_was_served_last() -> None:
    turns = Turns()
    slow, quick, new = peers = [Peer(channel=None) for _ in range(3)]  # type: ignore[arg-type]
    turns.charge(slow, 5.0)
    turns.charge(quick, 0.1)
    turns.admit(new)
    assert turns.in_order(peers) == [quick, slow, new]
