"""The virtual clock: how long steps, exchanges, pauses and deaths take."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.simulation.cluster import Absence, Cluster, Distribution, Presence, Speed, Trace
from fairseq_async.simulation.records import first_time
from tests.helpers.simulations import DN, METHODS, run


def test_a_synchronous_step_takes_as_long_as_the_slowest_and_an_asynchronous_one_waits_for_nobody(
    tmp_path: Path,
) -> None:
    waiting, _ = run(tmp_path, METHODS["synchronous"])
    assert waiting.clock.now == pytest.approx(12 * 4.0)
    free, log = run(tmp_path, {"method": "hybrid_async", "updates_per_step": 1})
    speed = 1 / 1.0 + 1 / 1.5 + 1 / 4.0
    assert free.clock.now == pytest.approx(36 / speed, abs=1.5)
    assert all(time == pytest.approx(1.5 * (number + 1)) for number, time in enumerate(log.of(1)))


def test_exchanges_take_time_and_updates_stand_in_line(tmp_path: Path) -> None:
    parameters = 8 * 16 + 8 + 8 * 8 + 8
    exchange = {"seconds": 0.25, "seconds_per_byte": 0.5 / (4 * parameters), "server_seconds": 3.0}
    cluster = {"workers": 2, "seconds_per_step": 1.0, "exchange": exchange}
    _, log = run(tmp_path, {"method": "hybrid_async", "updates_per_step": 1}, cluster=cluster, steps=2)
    # pull 0.75, compute 1, push 0.75; the server takes 3 with each, worker 1 stands behind worker 0
    assert log.of(0) == pytest.approx([2.5, 8.5]) and log.of(1) == pytest.approx([5.5, 11.5])
    second = log.events[2]
    assert second[1].worker == 0 and second[1].staleness == 1
    assert second[2].waiting_seconds == pytest.approx(0.75 + 3.0 + 0.75)


def test_a_worker_that_dies_loses_what_it_was_at_and_comes_back(tmp_path: Path) -> None:
    cluster = {"workers": 2, "absences": [{"worker": 1, "from": 2.5, "to": 7.0}]}
    simulated, log = run(tmp_path, DN | {"local_steps": 2}, cluster=cluster, steps=8)
    assert log.of(1)[:2] == pytest.approx([2.0, 9.0])
    assert [receipt.sequence for _, receipt, _ in log.events if receipt.worker == 1] == list(range(len(log.of(1))))
    assert simulated.steps == 16 and simulated.workers[1].steps > sum(
        report.local_steps for _, receipt, report in log.events if receipt.worker == 1
    )


def test_a_worker_may_come_late_and_another_may_pause(tmp_path: Path) -> None:
    absences = [{"worker": 1, "from": 0, "to": 5}, {"worker": 0, "from": 1.5, "to": 3.5, "pause": True}]
    _, log = run(tmp_path, METHODS["hybrid"], cluster={"workers": 2, "absences": absences}, steps=5)
    assert log.of(0)[:3] == pytest.approx([1.0, 4.0, 5.0]) and log.of(1)[0] == pytest.approx(6.0)


def test_diloco_goes_on_without_a_dead_worker_and_a_synchronous_run_waits_for_it(tmp_path: Path) -> None:
    cluster = {"workers": 3, "absences": [{"worker": 2, "from": 4.5}]}
    going, log = run(tmp_path, METHODS["DiLoCo"], cluster=cluster)
    assert going.finished and len(log.of(2)) == 1 and going.steps == 36
    stuck, _ = run(tmp_path, METHODS["synchronous"], cluster=cluster)
    assert not stuck.finished and stuck.server.version == 4


def test_slow_workers_take_fewer_local_steps(tmp_path: Path) -> None:
    cluster = {"workers": 3, "seconds_per_step": [1.0, 2.0, 5.0]}
    _, log = run(tmp_path, DN | {"local_steps": 10, "dynamic_local_steps": True}, cluster=cluster, steps=40)
    taken = {w: [report.local_steps for _, r, report in log.events if r.worker == w] for w in range(3)}
    assert [taken[w][1] for w in range(3)] == [10, 5, 2]


def test_seconds_follow_their_distribution_or_trace_and_do_not_depend_on_the_method(tmp_path: Path) -> None:
    for kind in ("lognormal", "uniform", "exponential"):
        spread = {} if kind == "exponential" else {"spread": 0.5}
        speed = Speed(Distribution.model_validate({"distribution": kind, "mean": 2.0} | spread), worker=1, seed=3)
        drawn = torch.tensor([speed.of_step(number) for number in range(4000)])
        assert drawn.mean() == pytest.approx(2.0, rel=0.1) and drawn.min() > 0
        assert drawn.std() == pytest.approx(2.0 if kind == "exponential" else 1.0, rel=0.15)
        assert speed.of_step(17) == pytest.approx(float(drawn[17]))
    own = {"time": 1, "sequence": 0, "base_version": 0, "staleness": 0, "weight": 4, "version_after": 1}
    own |= {"status": "applied"}
    lines = [own | {"worker": w, "computing_seconds": 2.0 + w, "local_steps": 4} for w in (0, 1, 0)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Speed(Trace(trace=tmp_path / "events.jsonl", worker=1), 0, 1).of_step(9) == 0.75
    (tmp_path / "seconds.txt").write_text("0.5\n2\n")
    recorded = Speed(Trace(trace=tmp_path / "seconds.txt"), 0, 1)
    assert [recorded.of_step(n) for n in range(3)] == [0.5, 2.0, 0.5]


def test_work_is_as_much_later_as_its_pauses_last() -> None:
    pauses = [Absence(worker=0, from_=begin, to=end, pause=True) for begin, end in ((2.0, 3.0), (3.5, 9.0))]
    presence = Presence(pauses, 0)
    assert [presence.done(0.0, seconds) for seconds in (1.0, 2.0, 2.25, 2.6)] == pytest.approx([1.0, 2.0, 3.25, 9.1])
    assert presence.done(2.5, 0.25) == pytest.approx(3.25)
    standing = Presence([Absence(worker=0, from_=0.0, to=2.0, pause=True)], 0)
    assert (standing.arrivals(), standing.departures()) == ([0.0], []), "it is a member from the beginning"


def test_steps_together_take_the_sum_of_theirs(tmp_path: Path) -> None:
    """Of 16 draws with a spread of 0.8, the sum has one of 0.8/4."""
    (tmp_path / "seconds.txt").write_text("0.5\n2\n4\n")
    recorded = Speed(Trace(trace=tmp_path / "seconds.txt"), 0, 1)
    assert [recorded.of_steps(first, count) for first, count in ((1, 2), (2, 5), (0, 1))] == [6.0, 11.0, 0.5]
    assert recorded.mean == pytest.approx(6.5 / 3) and Speed(1.5, 0, 1).of_steps(7, 4) == 6.0
    for kind in ({"distribution": "lognormal", "spread": 0.8}, {"distribution": "exponential"}):
        speed = Speed(Distribution.model_validate(kind | {"mean": 0.5}), worker=1, seed=3)
        drawn = torch.tensor([speed.of_steps(16 * number, 16) for number in range(2000)])
        assert drawn.mean() == pytest.approx(16 * speed.mean, rel=0.02) and speed.of_steps(17, 1) == speed.of_step(17)
        assert drawn.std() / drawn.mean() == pytest.approx(kind.get("spread", 1.0) / 4, rel=0.07)


@pytest.mark.parametrize(("distribution", "spread"), [("lognormal", 0.5), ("uniform", 0.5), ("exponential", 1.0)])
def test_the_time_of_several_steps_together_varies_by_the_root_of_their_number(
    distribution: str, spread: float
) -> None:
    given = {"distribution": distribution, "mean": 2.0} | ({} if spread == 1.0 else {"spread": spread})
    assert Distribution.model_validate(given).of_sum(9) == Distribution(
        distribution="lognormal", mean=18.0, spread=spread / 3
    )


@pytest.mark.parametrize(("loss", "time"), [(3.0, 1.0), (2.0, 3.0), (1.5, 4.0), (0.5, None)])
def test_a_loss_is_reached_at_the_first_evaluation_with_at_most_that(loss: float, time: float | None) -> None:
    losses: Any = {1.0: 2.5, 2.0: None, 3.0: 2.0, 4.0: 1.0, 5.0: 1.0}  # NaN is None
    assert first_time([{"time": time, "loss": loss} for time, loss in losses.items()], loss) == time


def test_who_is_absent_in_a_region_has_the_number_that_it_has_there() -> None:
    absences = [Absence(worker=worker, from_=1.0, to=2.0) for worker in (0, 3)]
    whole = Cluster(workers=4, regions=2, absences=absences)
    assert [[each.worker for each in whole.region(number).absences] for number in (0, 1)] == [[0], [1]]
