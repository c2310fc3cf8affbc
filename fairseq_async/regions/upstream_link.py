"""A region's server as a worker of the global server: its connection, in a second thread of the region's server."""

import math
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from fairseq_async.errors import LOST_SERVER, AsyncError, ExchangeError, RefusedError, exit_code, option
from fairseq_async.method.global_server import UpstreamOption
from fairseq_async.method.spec import MethodSpec, global_spec
from fairseq_async.options.validation import split_address
from fairseq_async.protocol import Layout, Push, Report, Welcome
from fairseq_async.protocol.notices import Tell
from fairseq_async.regions.upstream import GlobalParameters, News, RegionLeft, RegionLost, RegionUpdate
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection

_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds between two attempts to join


class UpstreamLink:
    """Joins the global server and exchanges with it; see :class:`~fairseq_async.regions.upstream.GlobalServerLink`.

    Hazard: only the thread of this class may use the client. The region's main thread puts work into one queue and
    takes news out of another.

    Args:
        given: the global server's address, and the number of this region.
        spec: the description of the region's own run.
        token: the token of the global run, which is also that of the region's run.
        tls: directory of certificates; None where connections are not encrypted.
        own: the port on which the region's own server listens.
        tell: called with each line for the user who runs the server.
        on_news: called, in the thread of this class, when there is news.
    """

    def __init__(
        self,
        given: UpstreamOption,
        spec: MethodSpec,
        layout: Layout,
        token: str,
        tls: Path | None,
        own: int,
        tell: Tell,
        on_news: Callable[[], object],
    ) -> None:
        self.given, self.spec, self.layout = given, spec, layout
        self._token, self._tls, self._own, self._tell, self._on_news = token, tls, own, tell, on_news
        self._work: SimpleQueue[RegionUpdate | None] = SimpleQueue()
        self._news: SimpleQueue[News] = SimpleQueue()
        self._thread: threading.Thread

    def join(self, parameters: Tensor, patient: bool) -> None:
        """Starts the thread, which joins the global server and then handles the queued work."""
        self._thread = threading.Thread(target=self._run, args=(parameters, patient), daemon=True)
        self._thread.start()

    def send(self, drift: RegionUpdate) -> None:
        """See :class:`~fairseq_async.regions.upstream.GlobalServerLink`."""
        self._work.put(drift)

    def leave(self) -> None:
        """See :class:`~fairseq_async.regions.upstream.GlobalServerLink`."""
        self._work.put(None)

    def news(self) -> News | None:
        """See :class:`~fairseq_async.regions.upstream.GlobalServerLink`."""
        with suppress(Empty):
            news = self._news.get_nowait()
            if isinstance(news, RegionLeft):
                self._thread.join()  # hazard: a thread that frees a tensor while Python ends aborts the process
            return news
        return None

    def _post(self, news: News) -> None:
        self._news.put(news)
        self._on_news()

    # In the thread

    def _run(self, parameters: Tensor, patient: bool) -> None:
        try:
            client, welcome = self._joined(parameters, patient)
            self._post(self._pulled(client, welcome.sequence, welcome.finished))
            while (drift := self._work.get()) is not None:
                self._post(self._exchanged(client, drift))
            client.leave(finished=False)
        except AsyncError as error:
            self._post(RegionLost(str(error)))
            while self._work.get() is not None:
                pass  # drop work that was queued before the region read that the server is lost
        self._post(RegionLeft())

    def _joined(self, parameters: Tensor, patient: bool) -> tuple[Client, Welcome]:
        """Returns a client that has joined.

        Args:
            patient: try again until the global server takes this region, which goes on meanwhile. Else its workers wait
                for the global server, ``worker_timeout`` at most: it may just be started again.
        """
        pause, deadline = _PAUSE, time.monotonic() + self.spec.server.worker_timeout
        while True:
            try:
                return self._join(parameters)
            except AsyncError as error:
                if not patient and (exit_code(error) != LOST_SERVER or time.monotonic() > deadline):
                    raise
                if pause == _PAUSE:
                    self._tell(f"{error}; this region {'goes on, and ' if patient else ''}tries again")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _join(self, parameters: Tensor) -> tuple[Client, Welcome]:
        """Joins once, and gives the global server the region's parameters where it has none.

        Raises:
            ExchangeError: there is no such server.
            RefusedError: the server does not take this region.
        """
        self._check_other()
        where = f"{option('upstream')} {self.given.address}"
        try:
            connection = LastingConnection(
                self.given.address,
                self._token,
                self.given.region,
                on_loss=self._on_loss,
                tls=self._tls,
                gone="the global server at {} is gone; this region goes on without it",
            )
            connection.patience = math.inf  # for a server that was there
        except ExchangeError as error:
            cause = error.__cause__
            nobody = isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError)
            raise ExchangeError(f"{where}: {f'there is no global server: {cause}' if nobody else error}") from error
        except RefusedError as error:
            raise RefusedError(f"{where}: {error}") from error
        client = Client(connection)
        try:
            welcome = client.join(self.layout, global_spec(self.spec, self.given, client.workers))
            if not welcome.initialised:
                client.slot.copy_(parameters)
                welcome = client.initialise(None)
        except AsyncError as error:
            client.close()
            raise type(error)(f"{where}: {error}") from error
        return client, welcome

    def _check_other(self) -> None:
        """Checks that the global server's address is not that of this region's own server.

        Raises:
            RefusedError: it is.
        """
        host, port = split_address(self.given.address)
        if port == self._own and _is_here(host):
            raise RefusedError(
                f"{option('upstream')} {self.given.address} is this run's own server; give the global server's address"
            )

    def _exchanged(self, client: Client, drift: RegionUpdate) -> GlobalParameters:
        report = Report(local_steps=drift.steps, step_seconds=drift.seconds)
        push = Push(drift.sequence, drift.base_version, float(drift.steps), report)
        answer = client.push(lambda slot: slot.copy_(drift.values), push)
        return self._pulled(client, drift.sequence + 1, answer.finished)

    def _pulled(self, client: Client, sequence: int, finished: bool) -> GlobalParameters:
        values = torch.empty(self.layout.size, dtype=torch.float32, device="cpu")
        version = client.pull(values.copy_)
        return GlobalParameters(sequence, version, finished, values)

    def _on_loss(self, reason: AsyncError) -> None:
        """Called in the client's own thread when the server does not take this region any more."""
        self._post(RegionLost(f"{option('upstream')} {self.given.address}: {reason}"))


def _is_here(host: str) -> bool:
    """Whether a host name or address is this machine's, tested by listening there: one cannot at another machine's."""
    try:
        with socket.create_server((host, 0)):
            return True
    except OSError:
        return False
