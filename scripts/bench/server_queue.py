"""Simulates the queue of workers at a server, in virtual time and without parameters: rates, staleness, waiting.

The clock, the cluster with its seconds per step, and which worker waits for which when steps close are those of the
simulator. Its :class:`~fairseq_async.simulation.trial.Trial` itself does not fit: it computes every gradient, gives
each exchange a link for itself however many workers share the server's link, and has a server of one process. Here
there are only events, so that a thousand workers take seconds.

Assumptions: links and server serve one update after another, in the order of arrival. The server's link is as fast as a
worker's. Shards are equal, have a core each and stay in step, so that one of S shards stands for all: it has 1/S of the
server's time. They are on one machine and share its link, or each is on a machine of its own, and one of their links
stands for all as well.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from fairseq_async.server.rounds.near_arrivals import NearArrivals
from fairseq_async.simulation.clock import Clock, EventKind, ScheduledEvent
from fairseq_async.simulation.cluster import Cluster, Seconds, Speed
from fairseq_async.simulation.costs import Costs

_WARM_UP = 1 / 3  # share of the updates that do not count, since all workers begin at the same moment
_CYCLES, _FEWEST = 15, 1500  # least number of updates to simulate: for each worker, and of all together


@dataclass(frozen=True)
class Exchanges:
    """How often workers exchange, and what they wait for.

    Attributes:
        local_steps: H, local steps between two exchanges of the same parameters; 1 where gradients are sent.
        fragments: P, number of fragments, exchanged in turn, one every H/P steps: each takes 1/P of the bytes and of
            the server's time.
        delay: τ, steps that a worker takes while it exchanges.
        updates_per_step: N, gradients of a step. The sender of the last one waits for the step, the others do not.
        close_within: in place of N, the share of a worker's step for which gradients wait for each other.
    """

    local_steps: int = 1
    fragments: int = 1
    delay: int = 0
    updates_per_step: int = 1
    close_within: float | None = None

    @property
    def between(self) -> int:
        """Number of steps from one exchange to the next."""
        return self.local_steps // self.fragments


@dataclass(frozen=True)
class Load:
    """The rates, staleness and shares of time of a queue in the long run.

    Attributes:
        updates_per_second: updates of all workers together.
        steps_per_second: local steps, or gradients, of all workers together.
        staleness: mean staleness of the updates, in versions; ``staleness_95`` is the 95th percentile.
        waiting: share of the workers' time in which they do not compute.
        server: share of the time in which the server's processor is busy; ``incoming`` and ``outgoing`` are the shares
            in which its link is busy in the two directions.
    """

    updates_per_second: float
    steps_per_second: float
    staleness: float
    staleness_95: float
    waiting: float
    server: float
    incoming: float
    outgoing: float

    @property
    def bottleneck(self) -> str:
        """Name of the part of the server that is busiest: its processor, or its link in one direction."""
        shares = {"processor": self.server, "link, in": self.incoming, "link, out": self.outgoing}
        return max(shares, key=shares.__getitem__)


@dataclass
class _Station:
    """A processor or link, which serves one update after another, in the order of arrival."""

    free_at: float = 0.0
    busy: float = 0.0
    served: int = 0

    @property
    def mean(self) -> float:
        """Mean seconds of a service."""
        return self.busy / max(1, self.served)

    def serve(self, now: float, seconds: float) -> float:
        """Adds a service of so many seconds to the queue, and returns when it begins."""
        begins = max(now, self.free_at)
        self.free_at = begins + seconds
        self.busy += seconds
        self.served += 1
        return begins


@dataclass
class _Cycles:
    """A worker's whole cycles: each is a wait, and the computing of the next update. It does not matter where in one of
    them the counting begins and ends."""

    count: int = 0
    waiting: float = 0.0
    computing: float = 0.0

    def add(self, waiting: float, computing: float) -> None:
        self.count += 1
        self.waiting += waiting
        self.computing += computing

    @property
    def seconds(self) -> float:
        return self.waiting + self.computing


@dataclass
class _Worker:
    """A worker between its events.

    Attributes:
        steps: number of steps that are taken, or whose seconds are drawn.
        base: version of the parameters that the worker has.
        computed: when its last update was computed.
        meanwhile: seconds of the steps that it takes while that update is exchanged.
        cycles: its cycles since the warm-up, or before it if none has begun since, as with very long steps.
        counts_anew: whether the next cycle is the first since the warm-up, or since the beginning.
    """

    speed: Speed
    steps: int = 0
    base: int = 0
    computed: float = 0.0
    meanwhile: float = 0.0
    cycles: _Cycles = field(default_factory=_Cycles)
    counts_anew: bool = True


class ServerQueue:
    """Simulates workers that compute, and exchange with one server.

    Args:
        cluster: the workers and their seconds per step; its ``exchange`` is not used.
        costs: costs of one exchange of all parameters; their ``step`` is not used.
        served: seconds of the server for an update, where they vary; by default those of ``costs``.
        slower: factor of all seconds per step.
    """

    def __init__(
        self,
        cluster: Cluster,
        costs: Costs,
        exchanges: Exchanges | None = None,
        served: Seconds | None = None,
        slower: float = 1.0,
        seed: int = 1,
    ) -> None:
        self.exchanges = exchanges or Exchanges()
        self.costs = costs.of_part(1 / self.exchanges.fragments)
        self._share = 1 / (self.exchanges.fragments * costs.shards)  # of a whole update's time, the share of a shard
        self._served = Speed(costs.server if served is None else served, cluster.workers, seed)
        self._slower = slower
        self._way = max(0.0, self.costs.exchange - self.costs.server) / 2  # copying before the server, and after it
        self._workers = [_Worker(Speed(cluster.seconds_of(w), w, seed)) for w in range(cluster.workers)]
        self._clock = Clock()
        self._processor, self._incoming, self._outgoing = _Station(), _Station(), _Station()
        self._near = None if self.exchanges.close_within is None else NearArrivals(self.exchanges.close_within)
        self._held: list[int] = []
        self._deadline = -1.0
        self._taken = self._services = self._version = self._published = 0
        self._steps_end: deque[float] = deque()  # for versions that are not published yet
        self._staleness: list[int] = []

    def run(self, updates: int | None = None) -> Load:
        """Simulates so many updates, by default until rates are steady, and returns the load."""
        whole = updates or max(_FEWEST, _CYCLES * len(self._workers))
        for worker in range(len(self._workers)):
            if self._near is not None:
                self._near.begin_work(worker, 0.0)
            self._begin(worker, 0.0)
        stations = (self._processor, self._incoming, self._outgoing)
        self._advance(round(_WARM_UP * whole))
        self._staleness = []
        for each in self._workers:
            each.counts_anew = True
        for station in stations:
            station.busy, station.served = 0.0, 0
        self._advance(whole)
        stale, cycles = sorted(self._staleness), [worker.cycles for worker in self._workers]
        rate = sum(each.count / each.seconds for each in cycles)
        server, incoming, outgoing = (min(1.0, station.mean * rate) for station in stations)
        return Load(
            updates_per_second=rate,
            steps_per_second=rate * self.exchanges.between,
            staleness=fmean(stale),
            staleness_95=stale[int(0.95 * (len(stale) - 1))],
            waiting=fmean(each.waiting / each.seconds for each in cycles),
            server=server,
            incoming=incoming,
            outgoing=outgoing,
        )

    def _advance(self, updates: int) -> None:
        while self._taken < updates:
            event = self._clock.next()
            assert event is not None, "a worker that waits is answered"
            match event.kind:
                case EventKind.ARRIVES:
                    self._begin_transfer(event.worker)
                case EventKind.IS_TAKEN:
                    self._handle_update(event.worker)
                case EventKind.GRACE_ENDS if self._near is not None and self._near.deadline == event.time:
                    self._close(self._near)
                case EventKind.PULLS:
                    self._pull(event.worker)

    # The worker

    def _begin(self, number: int, at: float) -> None:
        """Lets a worker, which has what it waited for, compute its next update."""
        worker, exchanges = self._workers[number], self.exchanges
        ready = worker.computed + worker.meanwhile
        begins, rest = max(at, ready), exchanges.between - (exchanges.delay if worker.steps else 0)
        seconds = self._compute(worker, rest)
        if worker.counts_anew:
            worker.counts_anew, worker.cycles = False, _Cycles()
        worker.cycles.add(begins - ready, worker.meanwhile + seconds)
        worker.computed = begins + seconds
        worker.meanwhile = self._compute(worker, exchanges.delay)
        latencies = (self.costs.ways - 1) * self.costs.latency
        self._schedule(worker.computed + self._way + latencies, EventKind.ARRIVES, number)

    def _compute(self, worker: _Worker, steps: int) -> float:
        """Returns the seconds of the worker's next steps."""
        seconds = worker.speed.of_steps(worker.steps, steps) if steps else 0.0
        worker.steps += steps
        return self._slower * seconds

    # The server

    def _begin_transfer(self, worker: int) -> None:
        """Handles an update that begins to come in over the server's link."""
        begins = self._incoming.serve(self._clock.now, self.costs.pushing / self.costs.links)
        self._schedule(begins + self.costs.pushing, EventKind.IS_TAKEN, worker)

    def _handle_update(self, worker: int) -> None:
        """Handles an update that has come in."""
        self._taken += 1
        now = self._clock.now
        if self._near is not None:
            self._held.append(worker)
            if not self._near.continues(worker, self._at_work, now):
                self._close(self._near)
            elif self._near.deadline is not None and self._near.deadline != self._deadline:
                self._deadline = self._near.deadline
                self._schedule(self._deadline, EventKind.GRACE_ENDS, worker)
            return
        self._staleness.append(self._version - self._workers[worker].base)
        ends = self._serve()
        if self._taken % self.exchanges.updates_per_step:
            self._acknowledge(worker)
        else:
            self._step(ends)
            self._give(worker, ends)

    @property
    def _at_work(self) -> list[int]:
        return sorted(set(range(len(self._workers))).difference(self._held))

    def _close(self, near: NearArrivals) -> None:
        """Closes a step over the gradients that wait."""
        held, self._held = self._held, []
        self._staleness += [self._version - self._workers[worker].base for worker in held]
        ends = [self._serve() for _ in held][-1]
        self._step(ends)
        near.close()
        for worker in held:
            near.begin_work(worker, self._clock.now)
            self._give(worker, ends)

    def _serve(self) -> float:
        """Lets the server process one more update, and returns when this ends."""
        self._services += 1
        seconds = self._share * self._served.of_step(self._services)
        return self._processor.serve(self._clock.now, seconds) + seconds

    def _step(self, ends: float) -> None:
        """Takes a step: the parameters have a new version from the time ``ends`` on."""
        self._version += 1
        self._steps_end.append(ends)

    def _acknowledge(self, worker: int) -> None:
        """Answers an update that was only added to others."""
        now, latency = self._clock.now, self.costs.latency
        if self._version_at(now) == self._workers[worker].base:
            self._begin(worker, now + self._way + latency)  # it has the current parameters
        else:
            self._give(worker, now + 2 * latency)  # the answer, and the request that follows

    def _give(self, worker: int, at: float) -> None:
        self._schedule(at, EventKind.PULLS, worker)

    def _pull(self, number: int) -> None:
        """Sends the parameters, as they are now, to a worker."""
        now, costs = self._clock.now, self.costs
        self._workers[number].base = self._version_at(now)
        begins = self._outgoing.serve(now, costs.pulling / costs.links)
        self._begin(number, begins + costs.pulling + costs.latency + self._way)

    def _version_at(self, now: float) -> int:
        while self._steps_end and self._steps_end[0] <= now:
            self._steps_end.popleft()
            self._published += 1
        return self._published

    def _schedule(self, time: float, kind: EventKind, worker: int) -> None:
        self._clock.schedule(ScheduledEvent(time, kind, worker))
