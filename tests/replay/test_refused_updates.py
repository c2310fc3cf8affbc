"""Replays of runs in which an update of a round was refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Rule, Update
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, Receipt, Report, Segment, Status
from fairseq_async.records.event_log import EventLog, Settled
from fairseq_async.records.events import Event
from fairseq_async.replay.replay import Recording, Replay, _pulls_early, _recorded_report
from fairseq_async.server.build import build_coordinator
from fairseq_async.server.membership import Membership
from fairseq_async.server.outcome import Outcome
from fairseq_async.server.plan import EpochPlan, Plan
from fairseq_async.server.run import Recorder
from scripts.faults.sgd_server import Constant, sgd_spec
from tests.helpers.replayed import HalvingRun, HalvingWorker
from tests.helpers.run_files import events

LAYOUT = Layout((Segment("w", (3,), "float32"),))
SPEC = sgd_spec(updates_per_step=3, workers=3, barrier=3, closes_early=True, waits_for_dead=False)


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]:
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=0.5), 3, partial_steps=True)
    return rule, EpochPlan(Constant(), 0)


def three(bad: int) -> HalvingRun:
    """Of which the bad one's second gradient is NaN."""
    return HalvingRun({worker: HalvingWorker(LAYOUT, 1 if worker == bad else -1) for worker in range(3)}, build)


def record(run_dir: Path, bad: int, late: bool) -> Tensor:
    """Four rounds of three workers, of which the bad one misses the second if it is late; returns the last
    parameters."""
    run, parameters, membership = three(bad), torch.tensor([1.0, -2.0, 3.0]), Membership(3, 0.0)
    coordinator = build_coordinator(SPEC, *run.build(SPEC, LAYOUT, parameters), parameters, membership)
    recorder, log = Recorder(run_dir, coordinator.server, False), EventLog(run_dir, {}, "the beginning", 0.0)

    def deliver(outcome: Outcome) -> None:
        for each in outcome.settled:
            log.write(0.0, each.receipt, each.report, each.recorded | recorder.of(each))
        for told in outcome.instructions:
            membership.answered(told.worker, 0.0)
            if coordinator.server.version != run.workers[told.worker].version:
                run.workers[told.worker].start_from(parameters, coordinator.server.version)

    for number, worker in run.workers.items():
        membership.connect(number, str(number), 0.0)
        coordinator.instruct(number, None, 0.0)
        worker.start_from(parameters, 0)
    for now in (1.0, 2.0, 3.0, 4.0):
        for number, worker in run.workers.items():
            if late and number == bad and now == 2.0:
                continue
            push, gradient = worker.compute()
            membership.wait(number, "push")
            update = Update(number, push.sequence, push.base_version, push.weight, gradient)
            deliver(coordinator.push(update, push.report, now))
        if coordinator.deadline is not None:
            deliver(coordinator.tick(coordinator.deadline))
    return parameters


@pytest.mark.parametrize("late", [False, True], ids=["in step", "late"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_round_with_a_refused_gradient_is_repeated_with_its_own_size(tmp_path: Path, bad: int, late: bool) -> None:
    """A worker that was late goes on, after its gradient was refused, from the version that the others' round met."""
    last = record(tmp_path, bad, late)
    described = {"method": SPEC.to_json(), "layout": LAYOUT.to_json(), "workers": 3}
    (tmp_path / "run.json").write_text(json.dumps(described))
    assert [event["worker"] for event in events(tmp_path) if event["status"] == "refused"] == [bad]
    replay = Replay(Recording.read(tmp_path), three(bad))
    assert len(list(replay.steps())) >= 4 and torch.equal(replay.parameters, last)


def test_of_updates_that_were_applied_together_the_last_alone_has_a_checksum(tmp_path: Path) -> None:
    """There is none of the parameters in between, and one takes a pass over all of them."""
    server: Any = SimpleNamespace(version=0, state_dict=dict, checksum=lambda: "of the last")
    recorder, server.version = Recorder(tmp_path, server, False), 2
    receipts = [Receipt(n, 0, 0, 1.0, Status.APPLIED, n, 1.0, version) for n, version in enumerate((1, 2, 2))]
    found = [recorder.of(Settled(receipt, Report())) for receipt in receipts]
    assert [each.get("checksum") for each in found] == [None, "of the last", None]


def event(worker: int, base: int, staleness: int) -> Any:
    return SimpleNamespace(worker=worker, base_version=base, staleness=staleness, status=Status.APPLIED)


def test_rounds_that_have_met_one_version_are_repeated_one_after_the_other() -> None:
    """A step of four gradients, in rounds of two."""
    spec, made = sgd_spec(updates_per_step=4, workers=2, barrier=2), [event(number % 2, 0, 0) for number in range(4)]
    recording = Recording(Path(), spec, LAYOUT, {}, made, cut=False)
    assert [[each.worker for each in group] for group in recording.rounds()] == [[0, 1], [0, 1]]


def test_the_plan_of_a_replay_counts_what_that_of_the_run_has_counted() -> None:
    own = {"epochs": 0.5, "local_steps": 10, "step_seconds": 0.25, "shard": 1}
    assert _recorded_report(Event(0.0, 0, 0, 0, 0, 1.0, 1, Status.APPLIED, **own)) == Report(**own)  # type: ignore[arg-type]


def test_a_start_is_kept_where_a_worker_took_it_before_its_update_was_settled_and_nowhere_else() -> None:
    """A copy of it has the size of the model."""
    assert _pulls_early([event(0, 0, 2), event(0, 1, 1)], 1)
    assert not _pulls_early([event(0, 0, 2), event(0, 0, 3)], 0), "it goes on from what it has"
    assert not _pulls_early([event(0, 0, 1), event(0, 1, 1)], 1), "it takes it now"


def test_a_start_that_is_kept_is_a_copy_of_that_of_the_next_update() -> None:
    """Its look-ahead may be another than that of the present one."""
    present, following, start = event(0, 0, 2), event(0, 1, 1), torch.ones(2)
    asked = list[Any]()
    replay: Any = SimpleNamespace(
        server=SimpleNamespace(version=1),
        _starts=None,
        _ahead={0: [present, following]},
        _kept={},
        _start=lambda each: (asked.append(each), start)[1],
    )
    Replay._begin(replay)
    start.zero_()
    assert asked == [following] and replay._kept[0].version == 1 and replay._kept[0].values.tolist() == [1.0, 1.0]
