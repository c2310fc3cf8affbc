"""The options for stale updates, from a worker's configuration to the server's parameters."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fairseq_async.protocol.receipt import Status
from tests.helpers.thread_workers import LAYOUT, local_sgd

HOSTS = pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])


@HOSTS
def test_an_update_of_staleness_s_weighs_1_plus_s_to_the_power(tmp_path: Path, host: str) -> None:
    """Every update is 1 and was computed from version 0: 1, 1/√2, 1/√3 and 1/2 of it are taken."""
    with local_sgd(tmp_path, host=host, staleness_power=-0.5) as (first, second):
        answers = [first.push(0, 1.0)]
        assert first.pull() == (1, 1.0)
        answers.append(second.push(0, 1.0))
        assert first.pull() == (2, pytest.approx(1 + 2**-0.5))
        answers += [second.push(1, 1.0), second.push(2, 1.0)]
        assert [answer.staleness for answer in answers] == [0, 1, 2, 3]
        assert first.pull() == (4, pytest.approx(1 + 2**-0.5 + 3**-0.5 + 4**-0.5))


def test_without_the_option_a_stale_update_is_taken_as_it_is(tmp_path: Path) -> None:
    with local_sgd(tmp_path) as (first, second):
        assert [first.push(0, 1.0).staleness, second.push(0, 1.0).staleness] == [0, 1]
        assert first.pull() == (2, 2.0)


def test_updates_of_one_round_are_0_1_2_stale_where_staleness_is_weighed(tmp_path: Path) -> None:
    """The answers say the staleness of the arrival. In the second round, 0 and then 1 + 2 versions are weighed."""
    with (
        local_sgd(tmp_path, grace_period=60.0, staleness_power=-0.5) as (first, second),
        ThreadPoolExecutor() as threads,
    ):
        held = threads.submit(first.push, 0, 1.0)
        assert second.push(0, 1.0).staleness == held.result(30).staleness == 0
        assert first.pull() == (2, pytest.approx(1 + 2**-0.5))
        held = threads.submit(first.push, 1, 1.0, 2)
        late = second.push(1, 1.0, 0)  # it had not pulled what the first round made
        assert (held.result(30).staleness, late.staleness) == (0, 2)
        assert first.pull() == (4, pytest.approx(2 + 2**-0.5 + 4**-0.5))


@HOSTS
def test_an_update_that_is_too_stale_uses_its_number_up(tmp_path: Path, host: str) -> None:
    """Else the worker could send it again, and would be one number behind after its own restart."""
    with local_sgd(tmp_path, host=host, staleness_limit=0) as (first, second):
        first.push(0, 1.0)
        assert second.push(0, 5.0, base=0, position={"seen": 7}).status is Status.STALE
        again = second.client.join(LAYOUT, second.spec)
        assert (again.sequence, again.position) == (1, {"seen": 7})
        assert second.push(0, 5.0, base=1).status is Status.DUPLICATE
        assert second.push(1, 1.0, base=1).status is Status.APPLIED
        assert first.pull() == (2, 2.0)


@HOSTS
def test_compensation_is_of_what_has_changed_since_the_worker_pulled(tmp_path: Path, host: str) -> None:
    """δ = −2 at θ = 1, computed at θ = 0: δ + λ·δ²·(1 − 0) = −2 + 0.25·4 = −1."""
    with local_sgd(tmp_path, host=host, delay_compensation=0.25) as (first, second):
        assert second.pull() == first.pull() == (0, 0.0)
        first.push(0, 1.0)
        assert first.pull() == (1, 1.0)
        second.push(0, 2.0)
        assert first.pull() == (2, 2.0)


@HOSTS
def test_the_norm_that_a_worker_says_is_believed_on_the_same_machine_only(tmp_path: Path, host: str) -> None:
    """What came over a network may not be what was sent: NaN would get in behind a good norm."""
    with local_sgd(tmp_path, host=host) as (first, second):
        answer = first.push(0, -2.0, norm=7.0)
        assert answer.norm == pytest.approx(7.0 if host == "127.0.0.1" else 2 * 3**0.5)
        if host != "127.0.0.1":
            assert second.push(0, float("nan"), norm=7.0).status is Status.REFUSED


def test_the_cosine_is_that_of_the_update_and_the_momentum_before_it(tmp_path: Path) -> None:
    """Zero momentum has none; then the second goes along with the first, and the third against both."""
    with local_sgd(tmp_path, outer="nesterov", outer_momentum=0.5) as (first, second):
        cosines = [first.push(0, 1.0).cosine, second.push(0, 3.0).cosine, first.push(1, -1.0).cosine]
        assert cosines[0] != cosines[0], "NaN"
        assert cosines[1:] == pytest.approx([1.0, -1.0], rel=1e-5)
