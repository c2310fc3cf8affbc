"""The arithmetic of the program that measures runs over a slow line: seconds and bytes to a loss."""

import math
from pathlib import Path

import pytest

from fairseq_async.protocol import Status
from fairseq_async.records.events import Event
from scripts.bench.kept import Kept
from scripts.bench.slow_line_worker import Curve
from scripts.bench.slow_lines import Bench, Pair, Point, Run, exchange_of, first_at, losses, points_of, row


def event(time: float, worker: int, version: int, sent: int, received: int, waited: float = 0.0) -> Event:
    return Event(
        time=time,
        worker=worker,
        sequence=version,
        base_version=version,
        staleness=0,
        weight=1.0,
        version_after=version,
        status=Status.APPLIED,
        bytes_sent=sent,
        bytes_received=received,
        waiting_seconds=waited,
    )


def points(*given: tuple[float, float, int]) -> list[Point]:
    return [Point(*each) for each in given]


def test_a_loss_has_the_time_of_its_version_and_the_bytes_of_the_far_worker_till_then() -> None:
    """Two rounds of two workers: of the first update of each, the version is still the one before."""
    events = [event(103.5, 0, 0, 999, 999), event(103.5, 1, 1, 10, 1), event(108.0, 1, 1, 20, 2)]
    events.append(event(108.0, 0, 2, 999, 999))
    found = points_of(Curve(100.0, 50, [(0, 9.0), (1, 8.0), (2, 7.0)]), events)
    assert found == points((0.0, 9.0, 0), (3.5, 8.0, 11), (8.0, 7.0, 33))


def test_an_exchange_is_the_median_of_the_far_worker_whose_first_update_comes_after_none() -> None:
    waited = [(1, 0.0), (0, 50.0), (1, 2.0), (1, 3.0), (0, 50.0), (1, 40.0)]
    assert exchange_of([event(1.0, worker, 1, 0, 0, seconds) for worker, seconds in waited]) == 3.0


def test_a_run_is_at_a_loss_when_it_is_there_first_with_nothing_interpolated() -> None:
    """It may go up again afterwards."""
    run = points((0.0, 9.0, 0), (4.0, 7.0, 5), (8.0, 7.5, 10), (12.0, 6.0, 15))
    assert first_at(run, 7.4) == run[1]
    assert first_at(run, 7.0) == run[1]
    assert first_at(run, 6.9) == run[3]
    assert first_at(run, 5.9) is None


def test_what_counts_is_the_last_loss_in_fp32_also_where_that_run_had_it_before() -> None:
    """fp32 ends with 7.2, which it has had from second 40 on; the codec has it at second 10."""
    plain = points((0.0, 9.0, 0), (40.0, 7.1, 400), (80.0, 7.2, 800))
    coded = points((0.0, 9.0, 0), (5.0, 7.6, 20), (10.0, 7.15, 40), (15.0, 7.0, 60))
    pair = Pair(Run(plain, 9.0, 1.0), Run(coded, 2.0, 3.0))
    assert pair.reached() == (plain[1], coded[2])
    assert pair.sooner == 4.0
    found = row("e3m0", [pair, pair])
    assert (found["fp32, s"], found["codec, s"], found["rounds"]) == ("40.0, 40.0", "10.0, 10.0", "1:2, 1:2")
    assert (found["exchange, s"], found["loads"]) == ("9.00:2.00, 9.00:2.00", "1.0:3.0, 1.0:3.0")
    assert (found["times sooner"], found["fewer bytes to it"]) == pytest.approx((4.0, 10.0))


def test_a_codec_that_never_comes_to_the_loss_is_no_time_sooner() -> None:
    plain, coded = points((0.0, 9.0, 0), (40.0, 7.0, 400)), points((0.0, 9.0, 0), (9.0, 7.1, 9))
    found = row("topk", [Pair(Run(plain, 9.0, 1.0), Run(coded, 2.0, 1.0))])
    assert (found["codec, s"], found["times sooner"], found["rounds"]) == ("never", 0.0, "1:-")
    assert math.isnan(found["fewer bytes to it"])


def test_of_several_rates_each_side_has_the_best_by_the_mean_of_the_seeds(tmp_path: Path) -> None:
    """Of one seed 0.5 is best in fp32, of both 1 is; what is kept is read again."""
    made = {("fp32", 0.5): (6.0, 7.5), ("fp32", 1.0): (6.5, 6.5), ("topk", 0.5): (7.0, 7.0), ("topk", 1.0): (7.0, 7.2)}
    kept = Kept(tmp_path / "losses.jsonl", float)
    for (name, rate), seeds in made.items():
        for seed, loss in enumerate(seeds, start=1):
            kept.keep(f"{name}; 12 rounds of 10; outer rate {rate:g}; seed {seed}", loss)
    bench = Bench(tmp_path, tmp_path, rounds=12, local_steps=10, longer=2.0, seeds=2, rates=[1.0, 0.5])
    assert (bench.best_rate("fp32"), bench.best_rate("topk")) == (1.0, 0.5)
    assert losses(bench, "fp32") == {"codec": "fp32", "0.5": 6.75, "1": 6.5}


def test_a_single_rate_is_taken_without_a_search(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tmp_path, rounds=12, local_steps=10, longer=2.0, seeds=2, rates=[0.7])
    assert bench.best_rate("fp32") == 0.7
