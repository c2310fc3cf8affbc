"""What is left of a run whose command was interrupted, and how to go on with it."""

import shlex
import sys
from pathlib import Path

from fairseq_async.launch.command.command import WorkerCommand, without_beginning
from fairseq_async.launch.command.script import ScriptCommand
from fairseq_async.launch.progress.progress import Progress
from fairseq_async.records.created_files import CreatedFiles
from fairseq_async.records.snapshots import snapshots_in


def what_is_kept(
    progress: Progress, run_dir: Path, created: CreatedFiles, command: WorkerCommand | ScriptCommand
) -> str:
    """Returns the message of an interrupted run: how far it is kept, and the command to go on with. Removes
    the files of a run that never began.

    All processes of the run have ended.
    """
    progress.poll()
    if not progress.begun:
        created.remove(logs=False)
    newest = max(map(_version, snapshots_in(run_dir)), default=0)
    if not (progress.version or newest):
        return "interrupted before the first update: there is nothing to go on from"
    if not has_snapshot(run_dir):
        return "no snapshot is left: the run was finished, or none could be written; there is what its workers saved"
    line = ["fairseq-async", *sys.argv[1:]]
    if command.rendezvous is None:
        line = without_beginning(line)
    elif not command.resumes:
        line.insert(2, "--resume")
    kept = f"all is kept up to {progress.position}"
    if newest < progress.version:  # as on a full disk
        kept = f"the last snapshot was not written: version {newest:,} is kept, of {progress.version:,}"
    elif newest > progress.version:  # of the run before, where this one has begun anew and has come to no update
        kept = f"all is kept up to version {newest:,}"
    return f"{kept}; go on with: {shlex.join(line)}"


def has_snapshot(run_dir: Path) -> bool:
    """Whether a run that was interrupted in this directory can go on."""
    return bool(snapshots_in(run_dir))


def _version(snapshot: Path) -> int:
    return int(snapshot.stem.partition("-")[2])
