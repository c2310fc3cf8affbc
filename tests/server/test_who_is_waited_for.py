"""Whether a round behind a barrier waits for a worker whose connection has closed is for the method to say."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fairseq_async.method.spec import MethodSpec, local_sgd_spec
from fairseq_async.options.config import DiLoCoOptions, ServerOptions
from fairseq_async.protocol import Alive, Goodbye, Hello, Initialise, Leave, Push, Report, Welcome
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.programs import local_sgd_main as outer
from fairseq_async.server.service import Service
from tests.helpers import halving, in_process
from tests.helpers.halving import LAYOUT, halving_spec
from tests.helpers.in_process import Connection, end, new_service
from tests.helpers.stand_ins import Clock

SYNCHRONOUS = halving_spec(barrier=2, worker_timeout=60.0)
DILOCO = local_sgd_spec(DiLoCoOptions(local_steps=1), 2, [], ServerOptions(worker_timeout=60.0), {})


class Pair:
    """Two workers, the first of which has begun a round."""

    def __init__(self, run_dir: Path, spec: MethodSpec) -> None:
        self.clock, self.spec = Clock(1000.0), spec
        build = outer.build if spec.method == "local_sgd" else halving.build
        self.service: Service = new_service(2, run_dir, build, self.clock)
        self.first, self.second = self.enter(0), self.enter(1)

    def enter(self, worker: int) -> Connection:
        connection = Connection(self.service)
        connection.introduce(worker)
        if not connection.ask(Hello(self.spec, LAYOUT, remote=False), Welcome).initialised:
            in_process.slot(self.service, 0).zero_()
            connection.ask(Initialise(False), Welcome)
        return connection

    def leave_and_introduce(self, worker: int) -> Connection:
        """Another process in its place, which has still to make its model."""
        (self.first, self.second)[worker].close()
        connection = Connection(self.service)
        connection.introduce(worker)
        return connection

    def push(self, connection: Connection, sequence: int = 0) -> bool:
        """Whether it is answered at once."""
        in_process.slot(self.service, connection.peer.id).fill_(1.0)
        return connection.send(Push(sequence, 0, 1.0, Report(local_steps=1, step_seconds=0.0)))

    @property
    def server(self) -> ParameterServer:
        return in_process.server(self.service)

    def is_answered(self, connection: Connection) -> bool:
        return connection.last.get("status") == "applied" and not self.server.held


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, request.param)
    yield pair
    end(pair.service)


synchronous = pytest.mark.parametrize("pair", [SYNCHRONOUS], indirect=True, ids=["synchronous"])
diloco = pytest.mark.parametrize("pair", [DILOCO], indirect=True, ids=["DiLoCo"])


@synchronous
def test_a_synchronous_round_waits_for_a_dead_worker_until_its_time_is_over(pair: Pair) -> None:
    """It may be started again, and the run would not be the synchronous one without it."""
    assert not pair.push(pair.first)
    pair.second.close()
    pair.clock.now += 59.0
    pair.service.tick()
    assert not pair.is_answered(pair.first)
    pair.clock.now += 2.0
    pair.service.tick()
    assert pair.is_answered(pair.first) and pair.server.version == 1


@synchronous
def test_a_synchronous_round_is_complete_when_the_dead_worker_has_come_back(pair: Pair) -> None:
    assert not pair.push(pair.first)
    pair.second.close()
    pair.clock.now += 30.0
    again = pair.enter(1)
    assert not pair.is_answered(pair.first)
    assert pair.push(again) and pair.is_answered(pair.first)


@diloco
def test_diloco_goes_on_at_once_without_a_dead_worker(pair: Pair) -> None:
    assert not pair.push(pair.first)
    pair.second.close()
    assert pair.is_answered(pair.first) and pair.server.version == 1


@diloco
def test_diloco_waits_for_a_worker_that_has_come_back(pair: Pair) -> None:
    pair.second.close()
    again = pair.enter(1)
    assert not pair.push(pair.first)
    assert pair.push(again) and pair.is_answered(pair.first)


@pytest.mark.parametrize("pair", [SYNCHRONOUS, DILOCO], indirect=True, ids=["synchronous", "DiLoCo"])
def test_a_round_waits_for_a_worker_that_makes_its_model_and_says_nothing(pair: Pair) -> None:
    """It may compile something for minutes; one that does not come is given up like one that never came."""
    again = pair.leave_and_introduce(1)
    pair.clock.now += 500.0
    pair.service.handle(pair.first.peer, Alive())
    assert not pair.push(pair.first)
    pair.service.tick()
    assert not pair.is_answered(pair.first)
    again.ask(Hello(pair.spec, LAYOUT, remote=False), Welcome)
    pair.clock.now += 59.0
    pair.service.tick()
    assert not pair.is_answered(pair.first), "it is silent only from its hello on"
    assert pair.push(again) and pair.is_answered(pair.first)


@synchronous
def test_a_round_does_not_wait_for_ever_for_a_worker_that_makes_its_model(pair: Pair) -> None:
    pair.leave_and_introduce(1)
    assert not pair.push(pair.first)
    pair.clock.now += 601.0
    pair.service.tick()
    assert pair.is_answered(pair.first) and pair.server.version == 1


@pytest.mark.parametrize("pair", [SYNCHRONOUS, DILOCO], indirect=True, ids=["synchronous", "DiLoCo"])
def test_a_worker_that_leaves_for_good_is_waited_for_by_nobody(pair: Pair) -> None:
    """Nor does the step wait for its update."""
    assert not pair.push(pair.first)
    pair.second.ask(Leave(finished=False), Goodbye)
    assert pair.is_answered(pair.first) and pair.server.version == 1


@synchronous
def test_the_update_of_a_worker_that_dies_while_it_waits_is_not_in_the_round(pair: Pair) -> None:
    """Whoever takes its place sends it again, from the same memory."""
    assert not pair.push(pair.first)
    pair.first.close()
    assert not pair.push(pair.second), "the round waits for the first"
    again = pair.enter(0)
    assert pair.push(again) and pair.is_answered(pair.second)
    assert pair.server.version == 1


@pytest.mark.parametrize("pair", [SYNCHRONOUS, DILOCO], indirect=True, ids=["synchronous", "DiLoCo"])
def test_a_server_that_came_back_waits_for_those_for_whom_the_one_before_waited(pair: Pair) -> None:
    in_process.take_snapshot(pair.service)
    end(pair.service)
    pair.service = new_service(2, pair.service.run_dir, pair.service.build, pair.clock)
    pair.service.recover()
    pair.first, pair.second = pair.enter(0), pair.enter(1)
    assert not pair.push(pair.first)
    pair.second.close()
    assert pair.is_answered(pair.first) == (pair.spec is DILOCO)
    pair.clock.now += 61.0
    pair.service.tick()
    assert pair.is_answered(pair.first)


@pytest.mark.parametrize("pair", [SYNCHRONOUS, DILOCO], indirect=True, ids=["synchronous", "DiLoCo"])
def test_a_worker_that_says_nothing_is_waited_for_until_its_time_is_over(pair: Pair) -> None:
    assert not pair.push(pair.first)
    pair.clock.now += 59.0
    pair.service.tick()
    assert not pair.is_answered(pair.first)
    assert not pair.second.send(Alive()), "there is no answer"
    pair.clock.now += 59.0
    pair.service.tick()
    assert not pair.is_answered(pair.first)
    pair.clock.now += 2.0
    pair.service.tick()
    assert pair.is_answered(pair.first)


# Signs of life come from another thread than updates


def show_life(pair: Pair, connection: Connection, seconds: float) -> None:
    """It sends a sign of life four times a minute, and nothing else."""
    for _ in range(int(seconds / 15.0)):
        pair.clock.now += 15.0
        connection.send(Alive())
        pair.service.tick()


def joined(pair: Pair) -> Connection:
    """A worker that was not announced, and has not said hello."""
    connection = Connection(pair.service)
    connection.introduce(None, joins=True)
    return connection


@synchronous
@pytest.mark.parametrize("says_hello", [True, False])
def test_no_round_waits_for_the_first_update_of_a_worker_that_was_not_announced(pair: Pair, says_hello: bool) -> None:
    pair.second.ask(Leave(finished=False), Goodbye)
    joiner = joined(pair)
    if says_hello:
        joiner.ask(Hello(SYNCHRONOUS, LAYOUT, remote=False), Welcome)
    else:
        joiner.send(Push(0, 0, 1.0, Report()))  # which is refused
    joiner.send(Alive())
    assert pair.push(pair.first) and pair.is_answered(pair.first)


@synchronous
def test_a_round_waits_for_a_worker_that_was_not_announced_from_its_first_update_on(pair: Pair) -> None:
    pair.second.ask(Leave(finished=False), Goodbye)
    joiner = joined(pair)
    joiner.ask(Hello(SYNCHRONOUS, LAYOUT, remote=False), Welcome)
    assert not pair.push(joiner), "with it the round has two workers"
    assert pair.push(pair.first) and pair.is_answered(joiner)
    assert not pair.push(pair.first, 1)
    show_life(pair, joiner, 1200.0)
    assert pair.push(joiner, 1) and pair.is_answered(pair.first)


@synchronous
@pytest.mark.parametrize("connects_again", [False, True])
def test_signs_of_life_do_not_prolong_the_time_of_a_worker_that_sends_no_update(
    pair: Pair, connects_again: bool
) -> None:
    assert not pair.push(pair.first)
    show_life(pair, pair.second, 300.0)
    if connects_again:
        pair.second = pair.leave_and_introduce(1)
    show_life(pair, pair.second, 285.0)
    assert not pair.is_answered(pair.first)
    show_life(pair, pair.second, 30.0)
    assert pair.is_answered(pair.first) and pair.server.version == 1


@diloco
def test_a_first_round_that_takes_longer_than_loading_is_waited_for(pair: Pair) -> None:
    """Local steps of 20 minutes: that of the other worker is the measure."""
    for _ in range(80):
        show_life(pair, pair.first, 15.0)
        pair.second.send(Alive())
    assert not pair.push(pair.first)
    show_life(pair, pair.second, 1200.0)
    assert not pair.is_answered(pair.first)
    assert pair.push(pair.second) and pair.is_answered(pair.first)


@synchronous
def test_a_server_that_came_back_waits_for_whoever_had_sent_updates_before(pair: Pair) -> None:
    pair.push(pair.first)
    pair.push(pair.second)
    in_process.take_snapshot(pair.service)
    end(pair.service)
    pair.service = new_service(2, pair.service.run_dir, pair.service.build, pair.clock)
    pair.service.recover()
    pair.first, pair.second = pair.enter(0), pair.enter(1)
    assert not pair.push(pair.first, 1)
    show_life(pair, pair.second, 1200.0)
    assert not pair.is_answered(pair.first)
    assert pair.push(pair.second, 1) and pair.is_answered(pair.first)


@pytest.mark.parametrize("pair", [SYNCHRONOUS, DILOCO], indirect=True, ids=["synchronous", "DiLoCo"])
@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_server_that_came_back_does_not_wait_as_for_a_beginning(pair: Pair, says_goodbye: bool) -> None:
    """For who has left for good not at all; for who died meanwhile, as for anybody who died."""
    pair.push(pair.first)
    pair.push(pair.second)
    if says_goodbye:
        pair.second.ask(Leave(finished=False), Goodbye)
    in_process.take_snapshot(pair.service)
    end(pair.service)
    pair.service = new_service(2, pair.service.run_dir, pair.service.build, pair.clock)
    pair.service.recover()
    pair.first = pair.enter(0)
    assert pair.push(pair.first, 1) == says_goodbye
    pair.clock.now += 61.0
    pair.service.tick()
    assert pair.is_answered(pair.first)
