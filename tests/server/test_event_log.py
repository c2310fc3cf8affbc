"""What the server writes down of a run."""

import math
from pathlib import Path

import torch

from fairseq_async.server.protocol import Report
from fairseq_async.server.receipt import Receipt, Status
from fairseq_async.server.run_files.event_log import EVENTS, EventLog, checksum
from fairseq_async.server.run_files.events import read_events


def test_a_checksum_tells_one_bit() -> None:
    vector = torch.ones(5)
    before = checksum(vector)
    vector.view(torch.int32)[3] ^= 1
    assert before == checksum(torch.ones(5)) != checksum(vector) and len(before) == 8


def test_whatever_is_settled_is_a_line_that_can_be_read(tmp_path: Path) -> None:
    """JSON has no Inf; a weight above what fp32 has is a weight all the same, and a loss above that no measurement."""
    log = EventLog(tmp_path, {}, "the beginning", 0.0)
    receipt = Receipt(1, 0, 0, 1e300, Status.APPLIED, 0, math.inf, 1)
    log.write(0.0, receipt, Report(loss=1e300, tokens=5.0))
    [event] = read_events(tmp_path / EVENTS)
    assert (event.weight, event.norm, event.loss, event.tokens) == (1e300, None, None, 5.0)
