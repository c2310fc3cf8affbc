"""What a storm has cost, worked out by hand for a run of two workers and a hundred seconds."""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.storm_figures import (
    Log,
    common_work,
    entrances,
    final_loss,
    gaps_after_kills,
    live_seconds,
    loss_ratio,
    useful_share,
    waits,
)


def moment(time: float, what: str, worker: int | None = None, **more: Any) -> dict[str, Any]:
    return {"time": time, "what": what, "worker": worker} | more


def push(time: float, worker: int, version: int) -> dict[str, Any]:
    fields = {"time": time, "worker": worker, "weight": 10.0, "version_after": version, "status": "applied"}
    return fields | {"loss": 5.0 - 0.01 * version}


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """A push a second of each; worker 1 is dead from 20 to 40 (started again at 21), worker 0 is paused from 60 to 70,
    and the server dies at 80: it takes back three seconds of work and comes back at 84."""
    timeline = [
        moment(0.0, "begin"),
        moment(20.0, "fault", 1, kind="kill"),
        moment(20.5, "death", 1),
        moment(21.0, "start", 1),
        moment(60.0, "fault", 0, kind="pause", seconds=10.0),
        moment(70.0, "wake", 0),
        moment(80.0, "fault", None, kind="kill"),
        moment(100.0, "end"),
    ]
    (tmp_path / "timeline.json").write_text(json.dumps(timeline))
    times = [(second + 0.25 + 0.5 * worker, worker) for second in range(100) for worker in (0, 1)]
    alive = [(t, w) for t, w in times if not (w == 1 and 20 < t < 40) and not (w == 0 and 60 < t < 70)]
    alive = [(t, w) for t, w in alive if not 80 < t < 84]
    kept = [push(t, w, n) for n, (t, w) in enumerate(alive) if not 77 < t < 80]
    lost = [push(t, w, 0) for t, w in alive if 77 < t < 80]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    (tmp_path / "events.rolled-back.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lost))
    (tmp_path / "rollbacks.jsonl").write_text(json.dumps({"time": 83.5}) + "\n")
    return Log(tmp_path)


def test_a_worker_could_have_worked_when_it_was_there(log: Log) -> None:
    assert live_seconds(log, 0) == pytest.approx(99.25 - 10)
    assert live_seconds(log, 1) == pytest.approx(99.75 - (40.75 - 20.5))
    # of 1 update a second each: 3 were taken back, 4 not made, of each worker
    assert useful_share(log) == pytest.approx((90 - 7 + 80 - 7) / (90 + 79.75), abs=0.01)


def test_entrances_waits_and_gaps_are_those_of_the_log(log: Log) -> None:
    assert entrances(log) == pytest.approx([40.75 - 21])
    assert waits(log, log.kills(None)) == pytest.approx([4.25])
    assert waits(log, log.rollbacks) == pytest.approx([0.75])
    assert gaps_after_kills(log) == pytest.approx([1.0])


def test_what_a_survivor_waited_for_others_is_told_apart(log: Log) -> None:
    log.all = log.inside = [replace(push, waited=0.25) for push in log.all]
    assert gaps_after_kills(log) == pytest.approx([1.0])
    assert gaps_after_kills(log, waits=False) == pytest.approx([0.75])


def test_the_loss_is_that_of_the_last_updates(log: Log) -> None:
    assert final_loss(log, 1000) == pytest.approx(5 - 0.01 * 92.5, abs=0.01)  # ten tokens an update


def test_losses_are_compared_after_the_same_work(log: Log) -> None:
    slower = replace_versions(log)
    assert common_work(log, slower) == 10 * sum(push.kept for push in log.all)
    assert loss_ratio(log, slower) == pytest.approx(1.0)


def replace_versions(log: Log) -> Log:
    """The same updates in twice as many steps, as where each has one gradient."""
    other = copy(log)
    other.all = [replace(push, version=2 * push.version) for push in log.all]
    return other
