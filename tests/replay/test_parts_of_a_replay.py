"""What a replay takes of a line, and of the files that stand for regions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_async.protocol import Layout, Push, Report, ScheduleEvent, Segment
from fairseq_async.protocol.receipt import Status
from fairseq_async.records.event_log import ControlEvent
from fairseq_async.records.events import Event
from fairseq_async.records.recording import record_vector, update_path
from fairseq_async.replay.regions import RecordedRegions
from fairseq_async.replay.replay import Replay


@pytest.mark.parametrize("trusted", [False, True])
def test_an_update_is_that_of_its_line(trusted: bool) -> None:
    """No two numbers are equal; the norm is the worker's where the server took that."""
    more: dict[str, Any] = {"tokens": 6.0, "missing": "a", "micro_batches": 7, "share": 0.5, "payload": "c0ffee"}
    line = Event(0.0, 1, 2, 3, 8, 4.0, 12, Status.APPLIED, norm=5.0 if trusted else 9.0, position={"seen": 1}, **more)
    push = Push(2, 3, 4.0, Report(position={"seen": 1}, missing="a", payload="c0ffee"), norm=5.0)
    worker, vector = SimpleNamespace(compute=lambda: (push, vector)), torch.ones(2)
    replay: Any = SimpleNamespace(
        run=SimpleNamespace(workers={1: worker}, threads=1), server=SimpleNamespace(version=3)
    )
    replay._begun, replay._ahead = {1}, {1: [line]}
    update, _, norm = Replay._computed(replay, line)
    assert (update.worker, update.sequence, update.base_version, update.weight) == (1, 2, 3, 4.0)
    assert (update.tokens, update.missing, update.micro_batches, update.share) == (6.0, 10, 7, 0.5)
    assert update.delta is vector and norm == (5.0 if trusted else None) and replay._ahead == {1: []}


def test_rule_and_schedule_are_told_what_they_were_told_before_the_update() -> None:
    told = list[Any]()
    server = SimpleNamespace(rule=SimpleNamespace(limit_round=told.append))
    replay: Any = SimpleNamespace(server=server, coordinator=SimpleNamespace(plan=SimpleNamespace(follow=told.append)))
    controls = (
        ControlEvent("limit_round", 2),
        ControlEvent("begin_epoch", epoch=3),
        ControlEvent("end_epoch", None, 3, 0.5),
    )
    Replay._repeat_control_events(replay, SimpleNamespace(control_events=controls))  # type: ignore[arg-type]
    assert told == [2, ScheduleEvent("", "begin_epoch", 3, None), ScheduleEvent("", "end_epoch", 3, 0.5)]


def test_each_region_has_its_own_updates_in_the_order_in_which_it_sent_them(tmp_path: Path) -> None:
    layout, sent = Layout((Segment("w", (2,), "float32"),)), [(1, 0), (0, 0), (1, 1)]
    lines = [Event(0.0, *each, 5, 0, 2.0, 6, Status.APPLIED, position={"seen": n}) for n, each in enumerate(sent)]
    for number, each in enumerate(sent):
        record_vector(update_path(tmp_path, *each), torch.full((2,), float(number)))
    recording: Any = SimpleNamespace(run_dir=tmp_path, layout=layout, events=lines, spec=SimpleNamespace(workers=2))
    regions = RecordedRegions(recording).workers
    for region, number in ((0, 1), (1, 0), (1, 2)):
        push, vector = regions[region].compute()
        assert push == Push(sent[number][1], 5, 2.0, Report({"seen": number})) and vector.tolist() == [number] * 2
