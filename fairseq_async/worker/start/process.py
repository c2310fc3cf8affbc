"""The process of a worker: prints errors in one line, ends without its server, and with the server that it owns."""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from fairseq_async.errors import (
    USER_ERROR,
    AsyncError,
    ConfigurationError,
    exit_code,
    fail,
    has_failed,
    note_exit_codes,
)
from fairseq_async.protocol.notices import ENDED, KEPT, SAVED
from fairseq_async.worker.start.server_process import ServerProcess
from fairseq_async.worker.start.store import may_start_again


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the process with one line instead of a traceback at an error that the user can act on. Also a decorator."""
    try:
        yield
    except AsyncError as error:
        fail(error)


def check_guard() -> None:
    """Checks that this is no spawned process, such as a data loader's, that is only importing the script; from then on
    a process whose loader fails by that ends with exit code 2, too.

    Raises:
        ConfigurationError: it is one.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing's own sign of it
        raise ConfigurationError(
            "a process that this script has spawned, such as a data loader's, imports the script, and would train "
            'once more: put the training under if __name__ == "__main__":'
        )
    if not isinstance(sys.excepthook, partial):
        sys.excepthook = partial(_end_as_loader, sys.excepthook)


def _end_as_loader(hook: Callable[..., None], kind: object, error: BaseException, traceback: object) -> None:
    """Stands for ``sys.excepthook``: a data loader's process that has ended by :func:`check_guard` has said so."""
    cause = str(error.__cause__)
    if cause.startswith("DataLoader worker") and f"exit code {USER_ERROR}." in cause:
        fail(
            f"a data loader's process has ended with exit code {USER_ERROR}, and says why above; if it has imported "
            'the script, put the training under if __name__ == "__main__":'
        )
    hook(kind, error, traceback)


def end_process(reason: AsyncError) -> NoReturn:
    """Ends the process of a worker that computes for a server that is gone; called from the client's thread.

    It ends at once, without exit handlers: ``sys.exit`` would only end that thread, and the main thread may be in a
    long computation or a collective call that nothing can interrupt. What the worker has computed since its last
    exchange is lost, and so is output that is still buffered.
    """
    sys.stderr.write(f"fairseq-async: error: {reason}\n")
    sys.stderr.flush()
    os._exit(exit_code(reason))


def own(server: ServerProcess) -> None:
    """Notes that this process has started a server, which ends with it.

    The state of a finished run is removed if this process ends in order: without an uncaught exception, and without a
    code other than 0 of ``sys.exit``. A process that is killed, or ends by ``os._exit``, leaves the state on disk.
    """
    note_exit_codes()
    if not _own:
        atexit.register(end_own_servers)
    _own.append((os.getpid(), server))
    end_server_on_sigterm(server)


def end_own_servers() -> None:
    """Ends the servers that this process has started: at its end, and before it starts another one."""
    for owner, server in _own:
        if owner == os.getpid():  # and not in a process that was forked from it
            server.end(why=last_word())


def last_word() -> str:
    """Returns what the process of worker 0, which ends, tells the server that it has started.

    Torchrun may start all workers again after worker 0 has ended, because another one dies: the state stays for it.
    """
    return ENDED if has_failed() else KEPT if may_start_again() else SAVED


_own: list[tuple[int, ServerProcess]] = []


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
