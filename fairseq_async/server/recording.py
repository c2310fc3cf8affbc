"""What a run leaves for its replay, beside ``events.jsonl``: how it began, and checksums."""

from pathlib import Path
from typing import Any

import torch

from fairseq_async.server.checksum import checksum
from fairseq_async.server.parameter_server import ParameterServer, Receipt

START = "start.pt"


class Recorder:
    """Writes the server's first state, and adds to events what a replay cannot know otherwise.

    Args:
        resumed: the first state is a checkpoint's or a snapshot's.
    """

    def __init__(self, run_dir: Path, server: ParameterServer, resumed: bool) -> None:
        self._server, self._version = server, server.version
        self._told: list[dict[str, Any]] = []
        state = {"server": server.state_dict(), "resumed": resumed, "threads": torch.get_num_threads()}
        torch.save(state, run_dir / START)

    def note(self, **message: Any) -> None:
        """The rule was told something between two updates."""
        self._told.append(message)

    def of(self, receipt: Receipt) -> dict[str, Any]:
        """For this update's event. Of several that were applied together, the parameters are those after the last."""
        told, self._told = self._told, []
        added: dict[str, Any] = {"told": told} if told else {}
        if receipt.version == self._server.version != self._version:
            self._version = receipt.version
            added["checksum"] = checksum(self._server.parameters)
        return added
