"""What a server has to tell whoever runs it: in its log, and on the terminal of the process that started it."""

import os
import sys
from collections.abc import Callable

Tell = Callable[[str], None]


def tell_log(text: str) -> None:
    """Writes a line to stderr, which is the server's log."""
    print(printable(text), file=sys.stderr, flush=True)


class Notices:
    """Tells the log, and the reader of a pipe.

    Args:
        descriptor: of the pipe's writing end. A reader that does not read, or has gone, holds nothing up.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    def __call__(self, text: str) -> None:
        tell_log(text)
        try:
            os.write(self._descriptor, printable(text).encode(errors="replace") + b"\n")
        except OSError:
            pass


def printable(text: str) -> str:
    """With control characters, which could fake or hide lines of a log, as escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
