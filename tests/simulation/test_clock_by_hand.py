"""When things happen in a simulation: clusters so small that the times are worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.simulation.cluster import Cluster, Speed, Trace
from tests.helpers.simulations import Log, tiny_trial


def run(tmp_path: Path, method: dict[str, Any], cluster: dict[str, Any], **changes: Any) -> tuple[Any, dict[int, Any]]:
    """The trial at its end, and each worker's events."""
    log = Log()
    simulated = tiny_trial(tmp_path, method, log, cluster=cluster, **changes)
    while simulated.advance():
        pass
    return simulated, {w: [e for e in log.events if e[1].worker == w] for w in range(cluster["workers"])}


def test_a_gradient_that_is_only_added_to_others_keeps_its_sender_until_it_is_added(tmp_path: Path) -> None:
    """Worker 0's update of t = 1 is worked off until 4; 1's, which steps, from 4 to 7, when 0's next is taken."""
    cluster = {"workers": 2, "seconds_per_step": [1.0, 1.5], "exchange": {"server_seconds": 3.0}}
    _, events = run(tmp_path, {"method": "hybrid_async", "updates_per_step": 2}, cluster, steps=3)
    assert [time for time, *_ in events[0]][:2] == [1.0, 7.0]
    assert events[0][1][2].waiting_seconds == 3.0
    assert events[1][0][0] == 4.0 and events[1][1][2].waiting_seconds == pytest.approx(7.0 - 1.5)


def test_an_update_that_stands_in_line_is_lost_with_its_sender(tmp_path: Path) -> None:
    """Worker 1's of t = 1.5 would be taken at 4; it dies at 2, comes back at 20, and sends the same number again."""
    cluster = {
        "workers": 2,
        "seconds_per_step": [1.0, 1.5],
        "exchange": {"server_seconds": 3.0},
        "absences": [{"worker": 1, "from": 2.0, "to": 20.0}],
    }
    simulated, events = run(tmp_path, {"method": "hybrid_async", "updates_per_step": 1}, cluster, steps=6)
    assert events[1][0][1].sequence == 0 and events[1][0][0] >= 21.5
    assert simulated.workers[1].incarnation == 3, "it came, died and came back"


def test_an_update_behind_the_barrier_is_lost_with_its_sender(tmp_path: Path) -> None:
    """Worker 1's of t = 1 waits for worker 2's of t = 4; it dies at 2, is back at 10, and has another at 11."""
    cluster = {
        "workers": 3,
        "seconds_per_step": [1.0, 1.0, 4.0],
        "absences": [{"worker": 1, "from": 2.0, "to": 10.0}],
    }
    _, events = run(tmp_path, {"method": "hybrid_async", "barrier": True}, cluster, steps=2)
    assert [[time for time, *_ in events[worker]] for worker in range(3)] == [[11.0, 15.0]] * 3


def test_diloco_without_a_dead_worker_takes_the_mean_of_the_others(tmp_path: Path) -> None:
    """Its outer step is that of two workers from then on, and of three when it is back."""
    method = {"method": "local_sgd", "outer": "diloco", "local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    cluster = {"workers": 3, "absences": [{"worker": 2, "from": 1.5, "to": 3.5}]}
    log = Log()
    simulated, sizes = tiny_trial(tmp_path, method, log, cluster=cluster), []
    while True:
        deltas = [worker.delta.clone() for worker in simulated.workers]
        before, seen = simulated.parameters.clone(), len(log.events)
        if not simulated.advance():
            break
        if who := [event[1].worker for event in log.events[seen:]]:
            mean = torch.stack([deltas[worker] for worker in who]).mean(0)
            torch.testing.assert_close(simulated.parameters - before, -mean, rtol=1e-4, atol=1e-6)
            sizes.append(len(who))
    assert sizes[:4] == [3, 2, 2, 3]


def test_a_worker_that_comes_back_has_a_new_inner_optimizer(tmp_path: Path) -> None:
    """Adam's first step is the learning rate in each direction, whatever the gradient; its later ones are not."""
    method = {"method": "local_sgd", "outer": "sgd", "outer_lr": 1.0, "local_steps": 1}
    cluster = {"workers": 1, "absences": [{"worker": 0, "from": 4.5, "to": 6.0}]}
    log = Log()
    simulated = tiny_trial(tmp_path, method, log, cluster=cluster, optimizer={"type": "adam", "lr": 0.01})
    first = []
    while True:
        delta, seen = simulated.workers[0].delta.abs(), len(log.events)
        if not simulated.advance():
            break
        if len(log.events) > seen:
            first.append(bool(((delta - 0.01).abs() < 1e-4).all()))
    assert first == [True, False, False, False, True, False]


def test_the_seconds_of_a_trace_are_used_one_after_the_other(tmp_path: Path) -> None:
    """Rounds of two steps: 1 + 2, then 3 + 1, then 2 + 3."""
    (tmp_path / "seconds.txt").write_text("1\n2\n3\n")
    method = {"method": "local_sgd", "outer": "sgd", "local_steps": 2}
    cluster = {"workers": 1, "seconds_per_step": {"trace": str(tmp_path / "seconds.txt")}}
    _, events = run(tmp_path, method, cluster)
    assert [time for time, *_ in events[0]] == [3.0, 7.0, 12.0]
    assert [report.step_seconds for _, _, report in events[0]] == [1.5, 2.0, 2.5]
    assert [receipt.weight for _, receipt, _ in events[0]] == [2.0] * 3, "local steps"
    (tmp_path / "uneven.txt").write_text("1\n2\n6\n")
    cluster = {"workers": 1, "seconds_per_step": {"trace": str(tmp_path / "uneven.txt")}}
    _, events = run(tmp_path, method | {"local_steps": 3}, cluster)
    assert [report.step_seconds for _, _, report in events[0]] == [2.0] * 2, "the median, whatever one step takes"


def test_an_update_that_arrives_at_the_end_of_a_grace_period_is_in_its_round(tmp_path: Path) -> None:
    """Worker 0 is there at 1, and waits until 2, when worker 1 comes."""
    method = {"method": "local_sgd", "outer": "sgd", "local_steps": 1, "grace_period": 1.0}
    _, events = run(tmp_path, method, {"workers": 2, "seconds_per_step": [1.0, 2.0]})
    first = [events[worker][0] for worker in (0, 1)]
    assert [(time, receipt.staleness) for time, receipt, _ in first] == [(2.0, 0), (2.0, 0)]


def test_a_run_whose_updates_have_nan_again_and_again_ends(tmp_path: Path) -> None:
    method = {"method": "local_sgd", "outer": "sgd", "local_steps": 4}
    simulated, events = run(tmp_path, method, {"workers": 1}, optimizer={"type": "sgd", "lr": 1e30}, steps=400)
    assert simulated.diverged and simulated.finished
    assert [receipt.status.value for _, receipt, _ in events[0]][-3:] == ["refused"] * 3
    assert simulated.server.refused == {0: 3}


def test_the_seconds_of_gradients_are_those_between_two_events_without_the_exchange(tmp_path: Path) -> None:
    """Worker 1's events are of t = 0, 2 and 5.5, with a quarter and half a second for the exchanges."""
    times = [(0, 9.0), (1, 0.0), (0, 9.5), (1, 2.0), (1, 5.5)]
    own = {"sequence": 0, "base_version": 0, "staleness": 0, "weight": 1, "version_after": 1, "status": "applied"}
    lines = [own | {"worker": w, "time": t, "push_seconds": 0.25, "pull_seconds": 0.5} for w, t in times]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    speed = Speed(Trace(trace=tmp_path / "events.jsonl", worker=1), 0, 1)
    assert [speed.of_step(number) for number in range(3)] == [1.25, 2.75, 1.25]
    (tmp_path / "again.jsonl").write_text(
        "".join(json.dumps(own | {"worker": 0, "time": t}) + "\n" for t in (0, 2, 2, 3))
    )
    again = Speed(Trace(trace=tmp_path / "again.jsonl"), 0, 1)
    assert [again.of_step(number) for number in range(3)] == [2.0, 1.0, 1.0], "where no time has passed, the mean"


def test_a_worker_may_be_away_twice_without_a_moment_between(tmp_path: Path) -> None:
    absences = [{"worker": 0, "from": 1.0, "to": 2.0}, {"worker": 0, "from": 2.0, "to": 3.0, "pause": True}]
    assert len(Cluster.model_validate({"workers": 1, "absences": absences}).absences) == 2
