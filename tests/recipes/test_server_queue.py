"""The queue of workers at a server, against closed forms and against the simulator that computes gradients."""

from pathlib import Path
from typing import Any

import pytest

from fairseq_async.simulation.cluster import Cluster, Distribution, Seconds
from fairseq_async.simulation.costs import Costs, NetworkLink
from scripts.bench.server_queue import Exchanges, Load, ServerQueue
from tests.helpers.simulations import Log, tiny_trial

EXACT = 1e-6


def queue(workers: int, step: Seconds | list[Seconds], costs: Costs, **given: Any) -> Load:
    updates = given.pop("updates", None)
    return ServerQueue(Cluster(workers=workers, seconds_per_step=step), costs, **given).run(updates)


@pytest.mark.parametrize(
    "costs",
    [
        Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000),
        Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000, shards=5),
        Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000, push=1.0, shards=5).over(NetworkLink(1e-5, 20)),
        Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000, shards=5, apart=True).over(NetworkLink(1e-5, 20)),
    ],
)
def test_one_worker_takes_its_steps_and_exchanges_one_after_another(costs: Costs) -> None:
    found = queue(1, costs.step, costs)
    assert found.updates_per_second == pytest.approx(1 / costs.alone, rel=EXACT)
    assert found.waiting == pytest.approx(costs.exchanging / costs.alone, rel=EXACT)
    assert found.server == pytest.approx(costs.server / costs.shards / costs.alone, rel=EXACT)
    assert found.incoming == pytest.approx(costs.pushing / costs.links / costs.alone, abs=EXACT)
    assert found.outgoing == pytest.approx(costs.pulling / costs.links / costs.alone, abs=EXACT)
    assert found.staleness == 0.0


@pytest.mark.parametrize(("shards", "apart"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("link", [None, NetworkLink(1e-3), NetworkLink(1e-6)], ids=str)
@pytest.mark.parametrize("workers", [2, 5, 16, 300])
def test_steady_times_reach_the_asymptotic_bound_of_a_closed_queue(
    workers: int, link: NetworkLink | None, shards: int, apart: bool
) -> None:
    """What ``capacity`` says of a run's server, in the unsaturated and in the saturated end."""
    costs = Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000, shards=shards, apart=apart)
    costs = costs if link is None else costs.over(link)
    found = queue(workers, costs.step, costs)
    assert found.updates_per_second == pytest.approx(costs.updates_per_second(workers), rel=0.002)
    assert max(found.server, found.incoming, found.outgoing) == pytest.approx(
        min(1.0, workers / costs.workers_held), rel=0.002
    )


def mean_value_analysis(workers: int, thinking: float, service: float) -> tuple[float, float]:
    """Updates a second of a closed queue with exponential times, and how busy its server is.

    Reiser & Lavenberg 1980, one station: who comes finds those that there are with one worker fewer.
    """
    waiting_there = rate = 0.0
    for count in range(1, workers + 1):
        response = service * (1 + waiting_there)
        rate = count / (thinking + response)
        waiting_there = rate * response
    return rate, rate * service


@pytest.mark.parametrize("workers", [2, 8, 20])
def test_exponential_times_are_those_of_mean_value_analysis(workers: int) -> None:
    step, served = (Distribution(distribution="exponential", mean=mean) for mean in (1.0, 0.1))
    found = queue(workers, step, Costs(1.0, 0.1, 0.1, 1000), served=served, updates=12_000)
    rate, busy = mean_value_analysis(workers, 1.0, 0.1)
    assert found.updates_per_second == pytest.approx(rate, rel=0.03)
    assert found.server == pytest.approx(busy, rel=0.03)
    assert found.waiting == pytest.approx(1 - rate * 1.0 / workers, abs=0.02)


@pytest.mark.parametrize("step", [1.0, Distribution(distribution="lognormal", mean=1.0, spread=0.2)], ids=str)
@pytest.mark.parametrize("workers", [1, 4, 60])
def test_between_two_updates_of_a_worker_each_other_sends_one(workers: int, step: Seconds) -> None:
    found = queue(workers, step, Costs(1.0, 0.1, 0.05, 1000))
    assert found.staleness == pytest.approx(workers - 1, abs=0.02)
    assert found.staleness_95 >= workers - 1


def test_a_slow_worker_is_stale_and_the_fast_ones_are_not() -> None:
    """Of 11 updates in 10 seconds, the slow worker's one has passed ten, and each other none or the slow one's."""
    found = queue(2, [1.0, 10.0], Costs(1.0, 0.0, 1e-9, 1000))
    assert found.updates_per_second == pytest.approx(1.1, rel=0.01)
    assert found.staleness == pytest.approx((10 + 1) / 11, rel=0.02)


@pytest.mark.parametrize("slowest", [30.0, 300.0, 700.0, 5000.0])
def test_each_worker_counts_with_its_own_rate_however_slow_it_is(slowest: float) -> None:
    """Also where it takes longer for a step than the rest of the simulation lasts."""
    found = queue(3, [1.0, 1.0, slowest], Costs(1.0, 0.0, 1e-9, 1000))
    assert found.updates_per_second == pytest.approx(2 + 1 / slowest, rel=1e-3)


def test_only_the_sender_of_a_steps_last_gradient_waits_for_it() -> None:
    """Four workers at once, N = 4, a second each and 0.1 s in the server: the fourth has its answer after 0.4 s."""
    found = queue(4, 1.0, Costs(1.0, 0.1, 0.1, 1000), exchanges=Exchanges(updates_per_step=4))
    assert found.waiting < 0.05 and found.server == pytest.approx(0.1 * found.updates_per_second, rel=0.01)
    assert found.updates_per_second == pytest.approx(4 / 1.0, rel=0.05)
    assert found.staleness <= 2.0


def test_equal_workers_whose_steps_close_step_together() -> None:
    """Four gradients, 0.01 s each in the server, and all go on from the same parameters."""
    found = queue(4, 1.0, Costs(1.0, 0.01, 0.01, 1000), exchanges=Exchanges(close_within=0.5))
    assert found.updates_per_second == pytest.approx(4 / 1.04, rel=0.01)
    assert found.staleness == found.staleness_95 == 0 and found.waiting == pytest.approx(0.04 / 1.04, rel=0.01)


def test_fragments_hide_an_exchange_behind_the_steps_that_are_taken_meanwhile() -> None:
    """Whole: four steps of a second, then four seconds. In two fragments, two seconds each, of which one is hidden."""
    costs = Costs(step=1.0, exchange=4.0, server=0.0, parameters=1000)
    whole = queue(1, 1.0, costs, exchanges=Exchanges(local_steps=4))
    assert (whole.updates_per_second, whole.steps_per_second) == pytest.approx((1 / 8, 4 / 8), rel=0.01)
    assert whole.waiting == pytest.approx(1 / 2, rel=0.01)
    parts = queue(1, 1.0, costs, exchanges=Exchanges(local_steps=4, fragments=2, delay=1))
    assert (parts.updates_per_second, parts.steps_per_second) == pytest.approx((1 / 3, 2 / 3), rel=0.01)
    assert parts.waiting == pytest.approx(1 / 3, rel=0.01)
    hidden = queue(1, 1.0, costs, exchanges=Exchanges(local_steps=4, fragments=4, delay=1))
    assert hidden.waiting == pytest.approx(0.0, abs=0.001)


def test_equal_seeds_give_equal_queues() -> None:
    step = Distribution(distribution="lognormal", mean=1.0, spread=0.5)
    one, again, other = (queue(5, step, Costs(1.0, 0.1, 0.05, 1000), seed=seed) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    ("method", "exchanges"),
    [
        ({"updates_per_step": 1, "look_ahead": "off"}, Exchanges()),
        ({"updates_per_step": 3, "look_ahead": "off"}, Exchanges(updates_per_step=3)),
        ({"updates_per_step": "auto", "look_ahead": "off"}, Exchanges(close_within=0.5)),
    ],
    ids=["asynchronous", "three a step", "steps that close"],
)
def test_the_queue_is_that_of_the_simulator_that_computes_gradients(
    tmp_path: Path, method: dict[str, Any], exchanges: Exchanges
) -> None:
    """Where no link is shared, which is what that one has."""
    seconds: list[Seconds] = [1.0, 1.3, 2.9]
    log = Log()
    exchange = {"seconds": 0.1, "server_seconds": 0.01}
    cluster = {"workers": 3, "seconds_per_step": seconds, "exchange": exchange}
    simulated = tiny_trial(tmp_path, {"method": "hybrid_async"} | method, log, cluster=cluster, steps=70)
    while simulated.advance():
        pass
    late = [(time, receipt.staleness) for time, receipt, _ in log.events][len(log.events) // 3 :]
    rate = (len(late) - 1) / (late[-1][0] - late[0][0])
    found = queue(3, seconds, Costs(1.0, 0.21, 0.01, 1000), exchanges=exchanges)
    assert found.updates_per_second == pytest.approx(rate, rel=0.04)
    assert found.staleness == pytest.approx(sum(stale for _, stale in late) / len(late), abs=0.15)
