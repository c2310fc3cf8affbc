"""Lines from a server to its user: in its log, and on the terminal of the process that started it."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

Tell = Callable[[str], None]
SEPARATOR = " | "  # between the time and the text of a line
LISTENS, FINISHED = "the server listens at", "the run is finished at version"  # how lines of a server begin
GONE = "is gone"  # how a line of a worker that has died ends
# to the process that started the server; no line for its user begins so, since control characters are escaped
RUN_FINISHED, RUN_OVER, EXIT_CODE = "\0finished", "\0over", "\0ends with "
# from that process: worker 0 has ended in order; it has, but may be started again; something else ends the run
SAVED, KEPT, ENDED = "0", "1", "\n"
_WRITTEN = 100


def tell_log(text: str) -> None:
    """Writes a line, with the time, to stderr, which is the server's log; on a full disk the line is lost."""
    with suppress(OSError):
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}{SEPARATOR}{printable(text)}", file=sys.stderr, flush=True)


class Journal:
    """Writes the events of a run to the server's log.

    Of each kind of event it writes the first hundred, and then the 128th, the 256th, and so on: a worker that joins and
    leaves all the time must not fill the disk.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __call__(self, kind: str, text: str) -> None:
        self._counts[kind] += 1
        count = self._counts[kind]
        if count <= _WRITTEN or not count & (count - 1):
            tell_log(text)


class Notices:
    """Writes lines to the log and to a pipe.

    Args:
        descriptor: the pipe's writing end. A reader that does not read, or has gone, holds nothing up.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    def __call__(self, text: str) -> None:
        tell_log(text)
        self.signal(printable(text))

    def signal(self, text: str) -> None:
        """Writes a line to the pipe alone."""
        with suppress(OSError):
            os.write(self._descriptor, text.encode(errors="replace") + b"\n")


def printable(text: str) -> str:
    """Returns the text with control characters, which could fake or hide lines of a log, as escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
