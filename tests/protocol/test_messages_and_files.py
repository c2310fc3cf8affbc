"""What a message says is used, and what is promised of files is there."""

import json
import math
import os
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_async.protocol import Assignment, PushReply, Status, notices
from tests.helpers.halving import halving_spec
from tests.helpers.mortal import InlineSnapshots
from tests.helpers.restarts import Restarts, both


def test_a_gradient_weighs_as_much_as_its_tokens_and_the_next_event_says_what_it_cost_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0 has 1 token and 3 as gradient, worker 1 has 2 and 6: the mean is 5."""
    spec = halving_spec()
    restarts = Restarts(tmp_path, spec)
    try:
        (first, second), _ = both(restarts.begin(), spec)
        first.push(3.0)
        answer = second.push(6.0)
        given = Assignment(learning_rate=1.0)
        expected = PushReply(Status.APPLIED, 1, 0, 0, False, given, norm=pytest.approx(6.0 * 3**0.5), cosine=0.0)
        assert replace(answer, cosine=0.0) == expected and math.isnan(answer.cosine)
        assert second.service.described.coordinator.server.parameters.tolist() == pytest.approx([-5.0] * 3)
        monkeypatch.setattr(
            "fairseq_async.server.service.time", SimpleNamespace(perf_counter=count().__next__, time=time.time)
        )
        for _ in range(3):
            first.push(0.0)
        events = [json.loads(line) for line in (tmp_path / "events.jsonl").open()]
        assert [event["weight"] for event in events] == [1.0, 2.0, 1.0, 1.0, 1.0]
        seconds = [event["server_seconds"] for event in events]
        assert [each > 0 for each in seconds[:3]] == [False, False, True] and seconds[3:] == [1.0, 1.0]
    finally:
        restarts.close()


def test_the_last_two_snapshots_are_kept(tmp_path: Path) -> None:
    """What killed the server may have torn the last one."""
    snapshots = InlineSnapshots(tmp_path)
    for version in (1, 2, 3):
        snapshots.take({"version": version}, version)
    assert sorted(path.name for path in snapshots.directory.iterdir()) == [
        "version-000000000002.pt",
        "version-000000000003.pt",
    ]


def test_a_line_that_comes_again_and_again_is_written_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[str]()
    monkeypatch.setattr(notices, "tell_log", written.append)
    journal = notices.Journal()
    for number in range(1, 601):
        journal("left", str(number))
    journal("came", "another kind")
    assert written == [*map(str, range(1, 101)), "128", "256", "512", "another kind"]


def test_a_notice_is_one_line_of_what_can_be_printed_and_waits_for_no_reader() -> None:
    """The launcher shows it on a terminal; its text may be another machine's."""
    reader, writer = os.pipe()
    tell = notices.Notices(writer)
    tell("refused: a\nb\x1b[31m, Zürich")
    assert os.read(reader, 1000).decode() == "refused: a\\nb\\x1b[31m, Zürich\n"
    for _ in range(200):
        tell("x" * 1000)  # more than a pipe holds
    os.close(reader)
    tell("nobody reads")
    os.close(writer)
