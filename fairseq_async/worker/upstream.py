"""A region's server as a worker of the global server: its connection, in a thread beside the server's own."""

import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from fairseq_async.errors import AsyncError, ExchangeError, RefusedError, option
from fairseq_async.global_server import Upstream
from fairseq_async.method_spec import MethodSpec, global_spec
from fairseq_async.server import Layout
from fairseq_async.server.notices import Tell
from fairseq_async.server.protocol import Push, Report, Welcome
from fairseq_async.server.upstream import Above, Drift, Left, Lost, News
from fairseq_async.validation import split_address
from fairseq_async.worker.client import Client

_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds between two attempts to join


class RegionClient(Client):
    """A client whose server may stay away for as long as it likes."""

    @property
    def loss(self) -> str:
        """What to say when the global server stays away."""
        return f"the global server at {self.address} is gone; this region goes on without it"


class UpstreamLink:
    """Joins the global server and exchanges with it; see :class:`~fairseq_async.server.upstream.Link`.

    Hazard: the client is used by the thread here alone. The server's main thread only puts work into a queue and takes
    news out of another.

    Args:
        given: which server, and which region this is.
        spec: of the region's own run.
        token: of the global run; that of the region's is the same.
        tls: directory of certificates, where connections are encrypted.
        own: the port on which the region's own server listens.
        tell: what to do with a line for whoever runs the server.
        ring: called when there is news.
    """

    def __init__(
        self,
        given: Upstream,
        spec: MethodSpec,
        layout: Layout,
        token: str,
        tls: Path | None,
        own: int,
        tell: Tell,
        ring: Callable[[], object],
    ) -> None:
        self.given, self.spec, self.layout = given, spec, layout
        self._token, self._tls, self._own, self._tell, self._ring = token, tls, own, tell, ring
        self._work: SimpleQueue[Drift | None] = SimpleQueue()
        self._news: SimpleQueue[News] = SimpleQueue()
        self._thread: threading.Thread

    def join(self, parameters: Tensor, patient: bool) -> None:
        """Begins to; then the thread does what it is given."""
        self._thread = threading.Thread(target=self._run, args=(parameters, patient), daemon=True)
        self._thread.start()

    def send(self, drift: Drift) -> None:
        """See :class:`~fairseq_async.server.upstream.Link`."""
        self._work.put(drift)

    def leave(self) -> None:
        """See :class:`~fairseq_async.server.upstream.Link`."""
        self._work.put(None)

    def news(self) -> News | None:
        """See :class:`~fairseq_async.server.upstream.Link`."""
        with suppress(Empty):
            news = self._news.get_nowait()
            if isinstance(news, Left):
                self._thread.join()  # hazard: a thread that frees a tensor while Python ends aborts the process
            return news
        return None

    def _say(self, news: News) -> None:
        self._news.put(news)
        self._ring()

    # In the thread

    def _run(self, parameters: Tensor, patient: bool) -> None:
        try:
            client, welcome = self._joined(parameters, patient)
            self._say(self._pulled(client, welcome.sequence, welcome.finished))
            while (drift := self._work.get()) is not None:
                self._say(self._exchanged(client, drift))
            client.leave(finished=False)
        except AsyncError as error:
            self._say(Lost(str(error)))
            while self._work.get() is not None:
                pass  # it may have been sent before that was heard
        self._say(Left())

    def _joined(self, parameters: Tensor, patient: bool) -> tuple[Client, Welcome]:
        """A connection that has joined; a patient one is tried again for as long as the server does not take it."""
        pause = _PAUSE
        while True:
            try:
                return self._join(parameters)
            except AsyncError as error:
                if not patient:
                    raise
                if pause == _PAUSE:
                    self._tell(f"{error}; this region goes on, and tries again")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _join(self, parameters: Tensor) -> tuple[Client, Welcome]:
        """
        Raises:
            ExchangeError: there is no such server.
            RefusedError: it does not take this region.
        """
        self._check_other()
        where = f"{option('upstream')} {self.given.address}"
        try:
            client = RegionClient(
                self.given.address,
                self._token,
                self.given.region,
                math.inf,
                self._on_loss,
                tls=self._tls,
                streams=self.given.streams,
            )
        except ExchangeError as error:
            raise ExchangeError(f"{where}: there is no global server: {error.__cause__ or error}") from error
        except RefusedError as error:
            raise RefusedError(f"{where}: {error}") from error
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
        """
        Raises:
            RefusedError: the address is that of this region's own server.
        """
        host, port = split_address(self.given.address)
        if port == self._own and _is_here(host):
            raise RefusedError(
                f"{option('upstream')} {self.given.address} is this run's own server; give the global server's address"
            )

    def _exchanged(self, client: Client, drift: Drift) -> Above:
        report = Report(local_steps=drift.steps, step_seconds=drift.seconds)
        push = Push(drift.sequence, drift.base_version, float(drift.steps), report)
        answer = client.push(lambda slot: slot.copy_(drift.values), push)
        return self._pulled(client, drift.sequence + 1, answer.finished)

    def _pulled(self, client: Client, sequence: int, finished: bool) -> Above:
        values = torch.empty(self.layout.size)
        version = client.pull(values.copy_)
        return Above(sequence, version, finished, values)

    def _on_loss(self, reason: str) -> None:
        """In the client's own thread: the server does not take this region any more."""
        self._say(Lost(f"{option('upstream')} {self.given.address}: {reason}"))


def _is_here(host: str) -> bool:
    """Whether a name or address is this machine's: nobody can listen at another's."""
    try:
        with socket.create_server((host, 0)):
            return True
    except OSError:
        return False
