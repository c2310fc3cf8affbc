"""How a worker's process ends: it leaves the run, and the one that has started the server outlasts the others."""

from fairseq_async.errors import AsyncError, has_failed
from fairseq_async.server.process import ServerProcess
from fairseq_async.worker.async_worker import AsyncWorker
from fairseq_async.worker.client import Client


def leave_at_exit(client: Client, async_worker: AsyncWorker, server: ServerProcess | None) -> None:
    """Leaves the run when the process ends, for whatever reason.

    A process that has started the server stays until the other workers have ended, too. If it has failed or was
    interrupted, it stays for nobody: whoever has started the job is to learn of it at once, and to end the other ranks.
    The server writes a last snapshot then.
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
            client.close()  # after a last worker that leaves, the run would be over, and nothing of it be kept
        else:
            client.leave(finished=False)
            server.outlast_workers()
    finally:
        server.end()
