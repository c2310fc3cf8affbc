"""``python -m fairseq_async.regions.regional_main``: a region's server of local SGD, a worker of the global server."""

import argparse
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fairseq_async import protocol
from fairseq_async.algorithms.rule import State
from fairseq_async.environment import TOKEN
from fairseq_async.method.global_server import UpstreamOption
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Answer
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.notices import Tell
from fairseq_async.records.recording import merge_path
from fairseq_async.regions.upstream import GlobalParameters, GlobalServerLink, News, RegionLeft, RegionLost, Upstream
from fairseq_async.regions.upstream_link import UpstreamLink
from fairseq_async.server.membership import Membership
from fairseq_async.server.outcome import Outcome
from fairseq_async.server.plan import Build
from fairseq_async.server.programs.local_sgd_main import build
from fairseq_async.server.programs.program import serve
from fairseq_async.server.run import Run
from fairseq_async.server.service import Service

_WAKEUP_BYTES = 64  # bytes that are read from the wake-up socket at once; each says only that there is news


@dataclass(frozen=True)
class Beginning:
    """Parameters with which a run is to begin, unless the global server has others."""

    parameters: Tensor
    source: str


class RegionalRun(Run):
    """The run of a region's server.

    Attributes:
        upstream: the run as a worker of the global server; None before it begins, or where its method names none.
    """

    upstream: Upstream | None = None

    def begin(
        self, build: Build, parameters: Tensor, state: State | None, source: str, membership: Membership, time: float
    ) -> None:
        super().begin(build, parameters, state, source, membership, time)
        if (given := self.spec.upstream) is not None:
            self.upstream = Upstream(given.above, self.coordinator)
            if state is not None and "upstream" in state:  # not in a checkpoint of a run that was no region
                self.upstream.load_state_dict(state["upstream"])

    def log_merge(self, values: Tensor) -> None:
        """Keeps, if the run is recorded, the global server's parameters whose merge has made the present version."""
        if self.spec.server.record:
            self.events.keep(merge_path(self.run_dir, self.coordinator.server.version), values)

    def state_dict(self) -> State:
        return super().state_dict() | ({} if self.upstream is None else {"upstream": self.upstream.state_dict()})


def _regional(run: Run) -> RegionalRun:
    assert isinstance(run, RegionalRun)
    return run


Connect = Callable[[UpstreamOption, MethodSpec, Layout, Callable[[], object]], GlobalServerLink]
"""Makes the connection to a global server. The connection calls the last argument when there is news."""


class RegionalService(Service):
    """Answers a region's workers, and exchanges their progress with the global server.

    The workers wait for the global server once: a run that begins takes its parameters, or brings it the first ones.
    From then on the region goes on whether the global server is there or not; messages to it are sent while workers are
    answered.

    A region ends when its workers have taken their steps, or the global run is over. It then sends what is left, and
    waits ``worker_timeout`` for a global server that is away.

    Args:
        connect: makes the connection to the global server.
    """

    run_class = RegionalRun

    def __init__(self, token: str, workers: int, run_dir: Path, build: Build, tell: Tell, connect: Connect) -> None:
        super().__init__(token, workers, run_dir, build, tell=tell)
        self._connect = connect
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._wakeup_reader.setblocking(False)
        self._wakeup_writer.setblocking(False)
        self.wakeup = self._wakeup_reader
        self._link: GlobalServerLink | None = None
        self._beginning: Beginning | None = None
        self._ending_at: float | None = None
        self._leaving = self._has_left = False

    def recover(self) -> str:
        """Recovers as every service does; it joins the global server again while the region goes on."""
        name = super().recover()
        if self.run is not None:
            self._join(self.run, self.run.coordinator.server.parameters, patient=True)
        return name

    def excuse(self, seconds: float) -> None:
        super().excuse(seconds)
        if self._ending_at is not None:
            self._ending_at += seconds

    def _tick(self) -> float:
        """Handles the news of the global server before the usual work."""
        while (news := self._next_news()) is not None:
            self._handle_news(self.described, news)
        wait = super()._tick()
        self.busy = self._is_busy()
        return wait

    # The beginning

    def _begin(self, run: Run, parameters: Tensor, state: State | None, source: str) -> Answer | None:
        if run.spec.upstream is None:
            return super()._begin(run, parameters, state, source)
        if state is not None:
            answer = super()._begin(run, parameters, state, source)
            self._join(run, run.coordinator.server.parameters, patient=True)
            return answer
        if self._beginning is None:
            self._beginning = Beginning(parameters, source)
            self._join(run, parameters, patient=False)
        self.membership.wait(0, "hello")
        return None

    def _join(self, run: Run, parameters: Tensor, patient: bool) -> None:
        given = run.spec.upstream
        if given is not None:
            self._link = self._connect(given, run.spec, run.layout, self._wake_event_loop)
            self._link.join(parameters.clone(), patient)

    def _begin_with(self, run: Run, beginning: Beginning, above: GlobalParameters) -> None:
        """Begins the run with the global server's parameters, and welcomes the workers that wait."""
        self._beginning = None
        try:
            super()._begin(run, above.values, None, beginning.source)
        except Exception as error:  # such as a full disk: the workers that wait must be told
            self._fail(str(error))
            raise
        self._upstream(run).join(above, self.clock(), fresh=True)
        for worker in self.membership.waiting("hello"):
            self.answer(self.peers[worker], run.welcome(worker, self.membership.capacity, self.clock()))

    def _fail(self, error: str) -> None:
        """Tells all workers that wait for the run why it cannot begin."""
        self._beginning, self._link = None, None
        for worker in self.membership.waiting("hello"):
            self.answer(self.peers[worker], protocol.ErrorReply(error))

    # With the global server

    def _deliver(self, run: Run, outcome: Outcome) -> None:
        if (upstream := _regional(run).upstream) is not None:
            upstream.count(outcome.settled)  # first: the last state, which is kept then, has what is left to send
        super()._deliver(run, outcome)
        if upstream is not None:
            self._send_if_due(upstream)

    def _send_if_due(self, upstream: Upstream) -> None:
        drift = upstream.due(self.clock())
        if drift is not None and self._link is not None:
            self._link.send(drift)

    def _handle_news(self, run: Run, news: News) -> None:
        beginning = self._beginning
        match news:
            case RegionLeft():
                self._has_left = True
            case RegionLost() if beginning is not None:
                self._fail(news.reason)
            case RegionLost():
                if not self._upstream(run).finished:
                    self.tell(f"{news.reason}; this region goes on alone")
                self._upstream(run).lose()
            case GlobalParameters() if beginning is not None:
                self._begin_with(run, beginning, news)
            case GlobalParameters():
                self._handle_parameters(run, self._upstream(run), news)

    def _handle_parameters(self, run: Run, upstream: Upstream, above: GlobalParameters) -> None:
        version = run.coordinator.server.version
        if upstream.joined:
            upstream.merge(above)
        else:
            upstream.join(above, self.clock(), fresh=False)
            if upstream.drift is not None and self._link is not None:
                self._link.send(upstream.drift)
        if run.coordinator.server.version > version:
            run.slots.publish(run.coordinator.server)
            _regional(run).log_merge(above.values)
        if upstream.finished and not run.coordinator.finished:
            self.journal("above", "the global run is over: this region's ends")
            self._deliver(run, run.coordinator.end(self.clock()))
        else:
            self._send_if_due(upstream)

    def _is_busy(self) -> bool:
        """Whether a finished region still has last updates, or a goodbye, to send to the global server."""
        run = self.begun
        if run is None or self._link is None or not run.coordinator.finished:
            return False
        now = self.clock()
        self._ending_at = self._ending_at or now
        if self._upstream(run).idle and not self._leaving:
            self._leaving = True
            self._link.leave()
        if now - self._ending_at > self.membership.timeout and not self._has_left:
            self._has_left = True
            self.tell("the global server did not answer: it may lack the last updates of this region, which ends")
        return not self._has_left

    @staticmethod
    def _upstream(run: Run) -> Upstream:
        upstream = _regional(run).upstream
        assert upstream is not None  # there is a link only where the run's method names a global server
        return upstream

    def _wake_event_loop(self) -> None:
        """Makes the event loop tick soon; called in the link's thread."""
        with suppress(BlockingIOError):  # it is full of wake-ups that were not read yet
            self._wakeup_writer.send(b"\n")

    def _next_news(self) -> News | None:
        with suppress(BlockingIOError):
            self._wakeup_reader.recv(_WAKEUP_BYTES)
        return None if self._link is None else self._link.news()


def regional_service(options: argparse.Namespace, build: Build, tell: Tell) -> RegionalService:
    """Builds the service of a region's server from its command line."""
    token = os.environ[TOKEN]
    with socket.socket(fileno=os.dup(options.listener)) as listener:
        port = listener.getsockname()[1]

    def connect(given: UpstreamOption, spec: MethodSpec, layout: Layout, on_news: Callable[[], object]) -> UpstreamLink:
        return UpstreamLink(given, spec, layout, token, options.tls, port, tell, on_news)

    return RegionalService(token, options.workers, options.run_dir, build, tell, connect)


if __name__ == "__main__":
    serve(build, make=regional_service)
