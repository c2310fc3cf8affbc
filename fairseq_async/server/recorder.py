"""Records what a replay needs besides the events: the first state, checksums, control events."""

from dataclasses import asdict
from pathlib import Path

import torch

from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol.receipt import SETTLED
from fairseq_async.records.events import ControlEvent, Settled
from fairseq_async.records.recording import START
from fairseq_async.records.state_files import private
from fairseq_async.server.parameter_server import ParameterServer


class Recorder:
    """Writes the server's first state, and adds to events the fields that a replay needs besides.

    Args:
        resumed: whether the first state is a checkpoint's or a snapshot's.
    """

    def __init__(self, run_dir: Path, server: ParameterServer, resumed: bool) -> None:
        self._server, self._version = server, server.version
        state = {"server": server.state_dict(), "resumed": resumed, "threads": torch.get_num_threads()}
        with open(run_dir / START, "wb", opener=private) as file:
            torch.save(state, file)

    def of(self, settled: Settled) -> JsonObject:
        """Returns the fields for this update's event. Of updates that were applied together, the checksum is of the
        parameters after the last."""
        added: JsonObject = {}
        if settled.receipt.status not in SETTLED:  # a replay does not read these lines
            return added
        if settled.control_events:
            added["control_events"] = [_described(event) for event in settled.control_events]
        if settled.receipt.version == self._server.version != self._version:
            self._version = settled.receipt.version
            added["checksum"] = self._server.checksum()
        return added


def _described(event: ControlEvent) -> JsonObject:
    return {key: value for key, value in asdict(event).items() if value is not None}
