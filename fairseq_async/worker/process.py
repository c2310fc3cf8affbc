"""The process of a worker: prints errors in one line, and ends when the server is gone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from fairseq_async.errors import AsyncError, fail


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the process with one line instead of a traceback at an error that the user can act on. Also a decorator."""
    try:
        yield
    except AsyncError as error:
        fail(error)


def end_process(reason: str) -> NoReturn:
    """Ends the process of a worker that computes for a server that is gone; called from the client's thread.

    It ends at once, without exit handlers: ``sys.exit`` would only end that thread, and the main thread may be in a
    long computation or a collective call that nothing can interrupt. What the worker has computed since its last
    exchange is lost, and so is output that is still buffered.
    """
    sys.stderr.write(f"fairseq-async: error: {reason}\n")
    sys.stderr.flush()
    os._exit(2)
