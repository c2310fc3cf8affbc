"""The process of a worker: prints errors in one line, and ends when the server is gone."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from fairseq_async.errors import AsyncError, exit_code, fail
from fairseq_async.server.process import ServerProcess


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the process with one line instead of a traceback at an error that the user can act on. Also a decorator."""
    try:
        yield
    except AsyncError as error:
        fail(error)


def end_process(reason: AsyncError) -> NoReturn:
    """Ends the process of a worker that computes for a server that is gone; called from the client's thread.

    It ends at once, without exit handlers: ``sys.exit`` would only end that thread, and the main thread may be in a
    long computation or a collective call that nothing can interrupt. What the worker has computed since its last
    exchange is lost, and so is output that is still buffered.
    """
    sys.stderr.write(f"fairseq-async: error: {reason}\n")
    sys.stderr.flush()
    os._exit(exit_code(reason))


def end_server_on_sigterm(server: ServerProcess) -> None:
    """Makes SIGTERM, by which a scheduler stops a job, end this process only when the server that it has started has
    written its last snapshot: Slurm kills what a task has left as soon as the task is gone.

    A second SIGTERM ends the process at once. A script's own handler stays, and is to end the process in order.
    """
    present = signal.getsignal(signal.SIGTERM)
    ours = isinstance(present, partial) and present.func is _end_with_server
    if threading.current_thread() is threading.main_thread() and (ours or present is signal.SIG_DFL):
        signal.signal(signal.SIGTERM, partial(_end_with_server, server, os.getpid()))


def _end_with_server(server: ServerProcess, owner: int, *_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.getpid() == owner:  # and not in a process that was forked from it, as by a pool
        # torch's handler would raise an error for each data loader's process that has got the signal, too
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        server.end()
    os.kill(os.getpid(), signal.SIGTERM)
