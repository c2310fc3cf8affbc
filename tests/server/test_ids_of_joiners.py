"""The ids of workers that were not announced: one that may connect again finds its own free."""

from pathlib import Path

import pytest

from fairseq_async.errors import RefusedError
from fairseq_async.server.membership import Membership
from scripts.faults.sgd_server import build
from tests.helpers.in_process import Connection, end, new_service


def joined(now: float = 0.0) -> Membership:
    """Two announced workers, and worker 2, which has joined."""
    membership = Membership(2, now, timeout=60.0)
    membership.connect(membership.assign_id(None, joins=True, instance="A", now=now), "A", now)
    return membership


def id_of_another(membership: Membership, now: float) -> int:
    return membership.assign_id(None, joins=True, instance="B", now=now)


def test_a_joiner_whose_connection_breaks_finds_its_id_free_for_the_timeout() -> None:
    membership = joined()
    membership.leave(2, for_good=False, now=10.0)
    assert id_of_another(membership, 70.0) == 3
    assert membership.assign_id(2, joins=True, instance="A", now=70.0) == 2
    assert id_of_another(membership, 71.0) == 2


def test_a_joiner_finds_its_id_free_after_the_server_was_started_again() -> None:
    membership = Membership(2, now=100.0, timeout=60.0)
    membership.expect_back([0, 1, 2, 3])
    membership.note_left([3])
    assert id_of_another(membership, 160.0) == 3
    assert id_of_another(membership, 161.0) == 2


def test_the_id_of_a_joiner_that_has_left_for_good_is_free_at_once() -> None:
    membership = joined()
    membership.leave(2, for_good=True, now=10.0)
    assert id_of_another(membership, 11.0) == 2


def test_where_no_other_id_is_free_that_of_a_joiner_that_may_come_back_is_taken() -> None:
    membership = joined()
    membership.leave(2, for_good=False, now=10.0)
    for worker in range(3, 2 + 16):
        membership.connect(worker, "C", 11.0)
    assert id_of_another(membership, 12.0) == 2
    membership.connect(2, "C", 12.0)
    with pytest.raises(RefusedError, match="16 workers have joined this run already; there is room for no more"):
        id_of_another(membership, 13.0)


def test_a_joiner_takes_the_place_of_no_worker_that_was_announced() -> None:
    with pytest.raises(RefusedError, match="this run has 2 workers; there is no worker 1"):
        Membership(2, now=0.0).assign_id(1, joins=True, instance="A", now=0.0)


def test_another_process_may_be_a_worker_that_has_been_silent_for_its_timeout() -> None:
    membership = joined()
    membership.connect(1, "A", 10.0)
    with pytest.raises(RefusedError, match="worker 1 is here already"):
        membership.assign_id(1, joins=False, instance="B", now=70.0)
    assert membership.assign_id(1, joins=False, instance="B", now=71.0) == 1


def test_a_worker_that_connects_again_has_one_connection(tmp_path: Path) -> None:
    service = new_service(2, tmp_path, build, lambda: 1000.0)
    before, now = Connection(service), Connection(service)
    before.introduce(1), now.introduce(1)
    assert [each.peer.replaced for each in (before, now)] == [each.channel.closed for each in (before, now)]
    assert before.peer.replaced and not now.peer.replaced and service.peers == {1: now.peer}
    before.close()
    assert service.peers == {1: now.peer} and 1 in service.membership.members, "the end of the one before"
    end(service)


def test_of_the_name_that_a_process_gives_itself_a_part_is_kept(tmp_path: Path) -> None:
    """The server keeps one for each worker, and a message may bring a longer one."""
    service = new_service(2, tmp_path, build, lambda: 1000.0)
    connection = Connection(service)
    connection.introduce(1, instance="x" * 100)
    assert service.membership.members[1].instance == "x" * 64
    end(service)


def test_a_worker_comes_anew_though_the_end_of_its_last_process_was_not_read_yet(tmp_path: Path) -> None:
    """The server was in a long step."""
    service = new_service(2, tmp_path, build, lambda: 1000.0)
    killed, again = Connection(service), Connection(service)
    killed.introduce(1, instance="killed")
    killed.channel.end()
    again.introduce(1, instance="again")
    assert service.peers == {1: again.peer}
    end(service)
