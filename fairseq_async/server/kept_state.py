"""Keeps a run's state on disk, and at its end ``final.safetensors``, which programs without this package read."""

import json
import math
import os
import struct
from functools import partial
from pathlib import Path

from torch import Tensor

from fairseq_async.errors import disk_error
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.notices import FINISHED, tell_log
from fairseq_async.records.snapshots import Snapshots
from fairseq_async.records.state_files import private
from fairseq_async.server.run import Run

FINAL = "final.safetensors"
VERSION = "version"  # in the file's metadata: the server's version of the parameters


def write_final(run_dir: Path, layout: Layout, parameters: Tensor, version: int) -> None:
    """Writes the parameters (flat, fp32) under the names of their tensors, in place of any file of this name.

    The format is a header and the tensors end to end, as they lie in ``parameters``: nothing is copied, since a server
    may have no memory for another copy.

    Raises:
        OSError: the file cannot be written; there is then no part of it.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", VERSION: str(version)}}
    end = 0
    for segment in layout.segments:
        start, end = end, end + parameters.element_size() * segment.size
        header[segment.name] = {"dtype": "F32", "shape": segment.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path, part = run_dir / FINAL, run_dir / f".{FINAL}.part"
    try:
        with open(part, "wb", opener=private) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.write(parameters.cpu().numpy().data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class KeptState:
    """Keeps a run's state on disk: in snapshots from time to time, and the last state of a finished run, from which a
    worker 0 that has died before it has saved still gets the model.

    Attributes:
        final: whether the last state is on disk, as a snapshot and as a :data:`FINAL`.
    """

    def __init__(self, snapshots: Snapshots) -> None:
        self.final = False
        self._snapshots, self._run_dir = snapshots, snapshots.directory.parent
        self._next, self._noted = -math.inf, False

    def keep(self, run: Run) -> None:
        """Does what is due, as often as it is called; raises as :meth:`keep_final`."""
        settings, version = run.spec.server, run.coordinator.server.version
        if not run.coordinator.finished:
            if (self._run_dir / FINAL).exists():
                (self._run_dir / FINAL).unlink()  # of an earlier run: an export must not take it for this one's
            return self._snapshots.keep_up(run.snapshot, version, settings.snapshot_seconds)
        if self._snapshots.clock() >= self._next:
            self._next = self._snapshots.clock() + settings.snapshot_seconds
            self.keep_final(run)
        if not self._noted:
            self._noted, sent = True, run.coordinator.server.sequences
            without = ", ".join(str(worker) for worker in range(run.spec.workers) if worker not in sent)
            tell_log(f"{FINISHED} {version:,}")
            if version and without:
                self._snapshots.tell(
                    f"warning: the run has ended without an update of worker {without}: its data is not in the model"
                )
            if version == 0:
                self._snapshots.tell(
                    "warning: the run has ended without an update, and the model is as it began: no worker has sent "
                    "one that counts; does the script call step() of the run's optimizer after backward()?"
                )

    def keep_final(self, run: Run) -> None:
        """Writes the last state, once. Where that fails, as on a full disk, says so, and a later call tries again.
        A run without an update has nothing to keep.

        Raises:
            HalfAppliedError: a shard is gone with its part; another server goes on from the snapshot before.
        """
        version, errors = run.coordinator.server.version, []
        if self.final or version == 0:
            return
        state = run.snapshot()
        for write in (
            partial(self._snapshots.take_here, state, version),
            partial(write_final, self._run_dir, run.layout, state["server"]["parameters"], version),
        ):
            try:
                write()
            except (OSError, RuntimeError) as error:
                errors.append(disk_error(error))
        self.final = not errors
        if errors and not self._noted:
            self._snapshots.tell(
                f"the run is over, and its last state could not be written to {self._run_dir}: {errors[0]}; its "
                "workers get it, and it is written when there is room"
            )
