"""A replay names the first line of a log that says something else than what is computed, and what it cannot repeat."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.algorithms import Update
from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import Layout, Segment
from fairseq_async.records.event_log import EventLog, Settled
from fairseq_async.replay.replay import DifferenceError, Recording, Replay
from fairseq_async.server import ParameterServer
from fairseq_async.server.run import Recorder
from scripts.faults.sgd_server import build, sgd_spec
from tests.helpers.replayed import HalvingRun, HalvingWorker
from tests.helpers.run_files import events

LAYOUT = Layout((Segment("w", (3,), "float32"),))
SPEC = sgd_spec(updates_per_step=2, workers=3)
Lines = list[dict[str, Any]]


def three() -> HalvingRun:
    return HalvingRun({worker: HalvingWorker(LAYOUT, weight=lambda n: 1.0 + n) for worker in range(3)}, build)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three steps, each of two updates. One update comes twice, and one after the end."""
    run, parameters = three(), torch.tensor([1.0, -2.0, 3.0])
    server = ParameterServer(parameters, build(SPEC, LAYOUT, parameters)[0], last_version=3)
    recorder, log = Recorder(tmp_path, server, resumed=False), EventLog(tmp_path, {}, "the beginning", 0.0)
    for worker in run.workers.values():
        worker.start_from(parameters, 0)
    for number, pusher in enumerate((0, 2, 1, 2, 2, 0, 1)):
        push, gradient = run.workers[pusher].compute()
        update = Update(pusher, push.sequence, push.base_version, push.weight, gradient)
        for _ in range(2 if number == 2 else 1):
            receipt = server.push(update)
            log.write(0.0, receipt, push.report, recorder.of(Settled(receipt, push.report)))
        run.workers[pusher].start_from(parameters, server.version)
    os.close(log._file)
    description = {"method": SPEC.to_json(), "layout": LAYOUT.to_json(), "workers": 3}
    (tmp_path / "run.json").write_text(json.dumps(description))
    return tmp_path


def rewrite(run_dir: Path, lines: Lines) -> None:
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_recording_has_what_was_settled_and_a_replay_repeats_that_alone(run_dir: Path) -> None:
    recording = Recording.read(run_dir)
    assert [(event.worker, event.sequence) for event in recording.events] == [
        (0, 0),
        (2, 0),
        (1, 0),
        (2, 1),
        (2, 2),
        (0, 1),
    ]
    statuses = [line["status"] for line in events(run_dir)]
    assert (len(statuses), statuses[3], statuses[-1]) == (8, "duplicate", "finished")
    assert (recording.run_dir, recording.spec, recording.layout, recording.cut) == (run_dir, SPEC, LAYOUT, False)
    replay = Replay(recording, three())
    assert list(replay.steps()) == [1, 2, 3] and (replay.compared, replay.server.version) == (3, 3)
    for until in (0, 1, 2):
        replay = Replay(recording, three())
        assert list(replay.steps(until)) == list(range(1, until + 1)) and replay.server.version == until
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"time"')
    assert Recording.read(run_dir).cut


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"worker": 7}, "(number 2 of worker 7) is the first that differs: this run has no such worker"),
        ({"base_version": 3}, "differs: it started from version 3, which the replay has not come to"),
        ({"weight": 9.0}, "(number 2 of worker 2) is of another place in the data than here"),
        ({"position": {"seen": 3}}, "(number 2 of worker 2) is of another place in the data than here"),
        ({"missing": "1"}, "differs: its tensors without a gradient were 1, are None"),
        ({"payload": "c0ffee00"}, "differs: the checksum of its payload was c0ffee00, is None"),
        ({"norm": 0.5}, "differs: its norm was 0.5, is 0."),
        ({"status": "stale"}, "differs: it was stale to 2, is applied to 2"),
        ({"version_after": 3}, "update 3 (number 2 of worker 2) is the first that differs: it was applied to 3, is"),
        ({"checksum": "00000000"}, "differs: the parameters' checksum after it was 00000000, is "),
        ({"merged": [2]}, "differs: it comes after a merge, and the run has no global server"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_first_line_that_differs_is_named_with_what_it_says(
    run_dir: Path, changes: dict[str, Any], said: str
) -> None:
    lines = events(run_dir)
    lines[5] |= changes  # the first update of the third step
    rewrite(run_dir, lines)
    replay, reached = Replay(Recording.read(run_dir), three()), list[int]()
    with pytest.raises(DifferenceError) as caught:
        reached += replay.steps()
    assert said in str(caught.value) and str(caught.value).startswith("update ") and replay.server.version == 2


def test_an_update_without_a_norm_or_checksum_in_its_line_is_repeated_and_not_compared(run_dir: Path) -> None:
    lines = events(run_dir)
    for line in lines[:3]:
        del line["norm"]
        line.pop("checksum", None)
    rewrite(run_dir, lines)
    replay = Replay(Recording.read(run_dir), three())
    assert list(replay.steps()) == [2, 3] and replay.compared == 2


def start(**changes: Any) -> Callable[[Path], None]:
    def change(run_dir: Path) -> None:
        state = torch.load(run_dir / "start.pt", weights_only=True)
        torch.save({key: value for key, value in (state | changes).items() if value is not None}, run_dir / "start.pt")

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (start(resumed=True), "the run went on from a checkpoint; a replay begins at the beginning"),
        (start(threads=None), "start.pt: not the first state of a run"),
        (start(server=None), "start.pt: not the first state of a run"),
        (lambda run_dir: torch.save([1], run_dir / "start.pt"), "start.pt: not the first state of a run"),
        (lambda run_dir: rewrite(run_dir, []), "there is no update in events.jsonl, so nothing to replay"),
    ],
    ids=["resumed", "no threads", "no server", "a list", "no update"],
)
def test_what_is_no_recording_from_the_beginning_is_one_line(
    run_dir: Path, change: Callable[[Path], None], said: str
) -> None:
    change(run_dir)
    with pytest.raises(ConfigurationError, match=said) as caught:
        Recording.read(run_dir)
    assert "\n" not in str(caught.value)
