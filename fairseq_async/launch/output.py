"""Writes what a worker's processes print into their log, and leaves out what the disk has no room for."""

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_REST = 1.0  # seconds for the last output of a process that has ended, of which a child may still hold the pipe


class Output:
    """What the processes of one worker print, one process after the other.

    A process that writes to its log itself dies of a full disk, by ``print``. So it writes into a pipe, which a thread
    of this process reads: what cannot be written is dropped, and the log says how much that was.

    Attributes:
        start: offset in the log, in bytes, at which the output of the present process begins.
    """

    def __init__(self) -> None:
        self.start = 0
        self._log: BinaryIO | None = None  # stays open: where the directory is read-only, it could not be opened again
        self._thread: threading.Thread | None = None
        self._lost = 0  # bytes

    def of(
        self, line: Sequence[str], log: Path, env: Mapping[str, str], cwd: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a process, in a session of its own, whose output goes to the end of the log.

        Raises:
            OSError: it cannot be started, or, the first time, the log cannot be opened.
        """
        if self._log is None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("ab", buffering=0)
        self.start = os.fstat(self._log.fileno()).st_size
        source, sink = os.pipe()
        try:
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                # It holds the reading end too: where this process is killed, `print` is no error as it ends.
                pass_fds=[source],
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the others in order
            )
        except BaseException:
            os.close(source)
            raise
        finally:
            os.close(sink)
        self._thread = threading.Thread(target=self._write, args=(source, self._log), daemon=True, name="output")
        self._thread.start()
        return process

    def finish(self) -> None:
        """Waits until the log has all that the process, which has ended, has printed."""
        if self._thread is not None:
            self._thread.join(_REST)

    def _write(self, source: int, log: BinaryIO) -> None:
        """Runs in a thread: writes to the log until nobody can print any more."""
        with open(source, "rb", buffering=0) as pipe:
            while printed := pipe.read(1 << 16):
                if self._lost:
                    note = f"\nfairseq-async: {self._lost} bytes of output could not be written here\n".encode()
                    if _append(log, note) < len(note):
                        self._lost += len(printed)
                        continue
                    self._lost = 0
                self._lost += len(printed) - _append(log, printed)


def _append(log: BinaryIO, printed: bytes) -> int:
    """Returns how many bytes there was room for."""
    written = 0
    try:
        while written < len(printed):
            written += log.write(printed[written:])
    except OSError:
        pass
    return written
