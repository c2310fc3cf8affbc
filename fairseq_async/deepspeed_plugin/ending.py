"""How a worker's process ends: it leaves the run, and the process that has started the server outlasts the others."""

from fairseq_async.errors import AsyncError, has_failed
from fairseq_async.server.notices import ENDED
from fairseq_async.server.process import ServerProcess
from fairseq_async.worker.async_worker import AsyncWorker
from fairseq_async.worker.client import Client
from fairseq_async.worker.process import last_word


def leave_at_exit(client: Client, async_worker: AsyncWorker, server: ServerProcess | None) -> None:
    """Leaves the run when the process ends, for whatever reason.

    A process that has started the server stays until the other workers have ended, too. If it has failed or was
    interrupted, it does not stay: whoever has started the job is to learn of it at once, and to end the other ranks.
    The server then writes a last snapshot.
    """
    failed = has_failed()
    try:
        if not failed:
            async_worker.settle()
    except AsyncError:
        pass  # the server had ended before
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
