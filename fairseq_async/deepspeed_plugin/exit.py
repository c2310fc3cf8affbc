"""How a worker's process ends: it leaves the run, and the process that has started the server outlasts the others."""

import os
import sys

from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.errors import USER_ERROR, AsyncError, has_failed
from fairseq_async.protocol.notices import ENDED
from fairseq_async.worker.async_worker import AsyncWorker
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.process import last_word
from fairseq_async.worker.start.server_process import ServerProcess, say


def leave_at_exit(client: ServerConnection, engine: AsyncEngine, server: ServerProcess | None) -> None:
    """Leaves the run when the process ends, for whatever reason; says so if the script has not ended its part before.
    If the run has not seen the training, the process ends with one line and exit code 2, without the exit handlers that
    were registered before this one.

    A process that has started the server stays until the other workers have ended, too. If it has failed or was
    interrupted, it does not stay: whoever has started the job is to learn of it at once, and to end the other ranks.
    The server then writes a last snapshot.
    """
    if has_failed():
        return _leave(client, server, failed=True)
    try:
        engine.check_at_exit()
        engine.async_worker.settle()
        _check_ended(engine.context, engine.async_worker)
    except AsyncError:
        pass  # the server had ended before
    except SystemExit:  # whose code Python does not take from here
        _leave(client, server, failed=True)
        sys.stdout.flush()
        os._exit(USER_ERROR)
    _leave(client, server, failed=False)


def _leave(client: ServerConnection, server: ServerProcess | None, failed: bool) -> None:
    if server is None:
        return client.leave(finished=False)
    try:
        if failed:
            client.close()  # if the last worker left, the run would be over, and no snapshot of it would be kept
        else:
            client.leave(finished=False)
            server.outlast_workers()
    finally:
        server.end(why=ENDED if failed else last_word())


def _check_ended(context: WorkerContext, async_worker: AsyncWorker) -> None:
    """Says what a script has lost that did not call ``engine.end()`` after a loop which ended by its own count."""
    lost = f", and {async_worker.done} local steps are lost" if async_worker.done else ""
    if async_worker.joined and not async_worker.finished and (lost or context.workers > 1) and context.rank == 0:
        say(
            f"warning: worker {context.worker} has ended before the run: what it has saved may lack what others send "
            f"later{lost}; call engine.end() after the loop, before the model is saved"
        )
