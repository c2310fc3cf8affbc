"""A run as reports see it: what each worker did when, its loss along each axis, and every cell of the tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from fairseq_async.protocol.receipt import Status
from fairseq_async.records.events import Event
from fairseq_async.reporting import page
from fairseq_async.reporting.runs import (
    AWAY,
    COMPUTING,
    WAITING,
    Activity,
    Evaluation,
    LoadedRun,
    _activities,
    load,
    running_mean,
)
from scripts.faults.sgd_server import sgd_spec


def line(worker: int, sequence: int, time: float, base: int, after: int, **more: Any) -> dict[str, Any]:
    event = {"worker": worker, "sequence": sequence, "time": time, "base_version": base, "version_after": after}
    return event | {"staleness": 0, "weight": 100.0, "status": "applied"} | more


# Two workers, and one that joined later, exchange two fragments in turn: of 3 values, and of 5.
EVENTS = [
    line(0, 0, 102.0, 0, 0, computing_seconds=2.0, tokens=4.0, loss=5.0, payload="a", bytes_sent=6, bytes_received=100),
    line(2, 0, 103.0, 0, 1, computing_seconds=3.0, weight=20.0, loss=4.0, payload="b", bytes_sent=4, residual_norm=2.0),
    line(0, 1, 106.0, 1, 1, computing_seconds=2.0, push_seconds=0.25, pull_seconds=0.75, status="refused", tokens=9.0),
    line(0, 2, 110.0, 1, 2, computing_seconds=1.0, waiting_seconds=1.5, tokens=6.0, look_ahead=1.5, held_seconds=0.5)
    | {"payload": "c", "bytes_sent": 2, "residual_norm": 0.25, "micro_batches": 6, "ranks": 2},
    line(2, 1, 111.0, 0, 3, staleness=2, waiting_seconds=0.25, loss=2.0, payload="d", bytes_sent=4, residual_norm=0.5),
]


@pytest.fixture
def run(tmp_path: Path) -> LoadedRun:
    method = sgd_spec(workers=2).to_json() | {"framework": {"inner_optimizer": {}}, "options": {"fragments": 2}}
    layout = [["a", [3], "float32"], ["b", [5], "float32"]]
    (tmp_path / "run.json").write_text(json.dumps({"workers": 2, "method": method, "layout": layout}))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    (found,) = load([tmp_path])
    return found


def test_a_worker_computes_waits_or_is_away(run: LoadedRun) -> None:
    assert run.activities == [
        Activity(0, COMPUTING, 0.0, 2.0),
        Activity(0, WAITING, 2.0, 2.5),
        Activity(0, COMPUTING, 2.5, 4.5),
        Activity(0, WAITING, 4.5, 6.0),
        Activity(0, AWAY, 6.0, 9.0),
        Activity(0, COMPUTING, 9.0, 10.0),
        Activity(2, COMPUTING, 0.0, 3.0),
        Activity(2, COMPUTING, 3.0, 11.0),
    ]
    assert run.shares(0) == {COMPUTING: 0.5, WAITING: 0.2, AWAY: 0.3}
    assert run.shares(1) == {COMPUTING: 0.0, WAITING: 0.0, AWAY: 0.0}


def event(time: float, **more: Any) -> Event:
    return Event(time, 1, 0, 0, 0, 1.0, 0, Status.APPLIED, **more)


def test_a_gap_of_more_than_three_usual_cycles_is_no_computing() -> None:
    """Where the worker does not say how long it computed."""
    events = [event(1.0), event(2.0), event(3.0), event(13.0, waiting_seconds=0.25)]
    assert list(_activities(events, barrier=False)) == [
        Activity(1, COMPUTING, 0.0, 1.0),
        Activity(1, COMPUTING, 1.0, 2.0),
        Activity(1, COMPUTING, 2.0, 2.75),
        Activity(1, WAITING, 2.75, 3.0),
        Activity(1, AWAY, 3.0, 10.0),
        Activity(1, COMPUTING, 10.0, 13.0),
    ]


def test_after_its_last_update_a_worker_waits_at_a_barrier_for_all_that_is_left() -> None:
    assert list(_activities([event(4.0, computing_seconds=1.0)], barrier=True)) == [
        Activity(1, COMPUTING, 0.0, 1.0),
        Activity(1, WAITING, 1.0, 4.0),
    ]
    assert not list(_activities([], barrier=True))


def test_the_loss_of_applied_updates_along_each_axis(run: LoadedRun) -> None:
    losses = [5.0, 4.0, 2.0]
    assert run.losses("updates") == ([0.0, 1.0, 3.0], losses)
    assert run.losses("time") == ([2.0, 3.0, 11.0], losses)
    assert run.losses("tokens") == ([4.0, 24.0, 130.0], losses)
    assert (run.measured, run.steps, run.step_sizes, run.workers) == ("training loss", 3, [2, 1, 1], 3)


def test_evaluations_take_the_place_of_losses_and_of_the_steps_of_several_servers(run: LoadedRun) -> None:
    curve = [Evaluation(1.0, 2, 3.0, 9.0), Evaluation(4.0, 5, 6.0, None), Evaluation(7.0, 8, 10.0, 8.5)]
    found = LoadedRun("x", "", 0, 2, False, run.events, curve, regions=True)
    assert [found.losses(by) for by in ("updates", "time", "tokens")] == [
        ([2.0, 8.0], [9.0, 8.5]),
        ([1.0, 7.0], [9.0, 8.5]),
        ([3.0, 10.0], [9.0, 8.5]),
    ]
    assert (found.measured, found.steps, found.step_sizes) == ("validation loss", 8, [])


def test_the_running_mean_is_over_a_fiftieth_of_the_values_and_those_before_it() -> None:
    assert running_mean([float(n) for n in range(149)])[:4] == [0.0, 0.5, 1.5, 2.5]
    assert running_mean([2.0, 4.0]) == [2.0, 4.0] and running_mean([]) == []


def test_every_cell_of_a_runs_row_and_of_its_workers(run: LoadedRun) -> None:
    """In fp32 the four payloads had 12, 12, 12 and 20 bytes; 16 were sent, in 11 seconds."""
    assert page.row(run) == {
        "run": run.name,
        "workers": 3,
        "last training loss": "2.0000",
        "steps of the server": "3",
        "time (s)": "11.0",
        "target tokens": "130",
        "target tokens/s": "12",
        "updates in a step": "1.33",
        "mean staleness (versions)": "0.50",
        "sent by workers (MB)": "0.00",
        "received by workers (MB)": "0.00",
        "sent (kB/s)": "0.00145",
        "times fewer bytes than fp32": "3.5",
        "residual (L2 norm)": "0.5",
        "time computing": "50%",
        "refused updates": 1,
    }
    assert page.worker_row(run, 0) == {
        "run": run.name,
        "worker": 0,
        "ranks": 2,
        "updates": 2,
        "staleness (versions)": "0.00",
        "ahead at its start (versions)": "0.75",
        "held for others, mean (s)": "0.25",
        "longest (s)": "0.50",
        "time computing": "50%",
        "in an update (kB)": "0.00",
        "micro-batches, last": 6,
        "sent (kB/s)": "0.000727",
        "times fewer bytes than fp32": "3.0",
        "residual (L2 norm)": "0.25",
    }
    second = page.worker_row(run, 2)
    assert (second["staleness (versions)"], second["times fewer bytes than fp32"]) == ("1.00", "4.0")
    assert "ranks" not in second and "micro-batches, last" not in second
