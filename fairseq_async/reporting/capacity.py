"""``fairseq-async capacity``: how many workers one server can serve, from the times that a run has measured."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median

from rich import box
from rich.table import Table

from fairseq_async.errors import ConfigurationError
from fairseq_async.reporting.exchange_bytes import ExchangeBytes, of_codecs, of_run
from fairseq_async.server.description import RunDescription
from fairseq_async.server.event_log import EVENTS
from fairseq_async.server.events import Event, read_events

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10_000)  # rows of the table of speed-ups
_WARM_UP = 2  # a worker's first updates do not count: they touch memory for the first time
_FEWEST = 5  # exchanges to measure by
_LEAST = 1e-9  # seconds: clocks are coarse
_GIGABIT = 1e9 / 8  # bytes


@dataclass(frozen=True)
class Costs:
    """The time that one update of one worker takes, in seconds.

    A worker computes for ``step``, then exchanges for ``exchange``; for ``server`` of that the server is busy with this
    update alone. Over a network the update goes out and the parameters come back, on the worker's link and on the
    server's.

    Attributes:
        step: to compute the update.
        exchange: from the end of computing to the new parameters, where no other worker has to be waited for.
        server: of ``exchange``, what the server cannot spend on another worker at the same time.
        parameters: number of parameters, of 4 bytes each.
        link: bytes per second in each direction; infinite on one machine.
        push: bytes of an update, for each parameter.
        pull: bytes of the parameters that come back, for each.
        servers: shards of the parameters, each on a server with a link of its own.
    """

    step: float
    exchange: float
    server: float
    parameters: int
    link: float = math.inf
    push: float = 4.0
    pull: float = 4.0
    servers: int = 1

    @property
    def alone(self) -> float:
        """Seconds from update to update of a single worker."""
        return self.step + self.exchange - self.server + self.server / self.servers + self._pushing + self._pulling

    @property
    def busiest(self) -> float:
        """Seconds per update of the bottleneck: the server's processor, or its link in one direction."""
        return max(self.server, self._pushing, self._pulling) / self.servers

    def updates_per_second(self, workers: int) -> float:
        """Updates of all workers together: as if each had the server alone, until the bottleneck is always busy.

        This is the asymptotic bound of a closed queue (Denning & Buzen 1978), which steady times reach.
        """
        return min(workers / self.alone, 1 / self.busiest)

    @property
    def workers_held(self) -> float:
        """The number of workers beyond which the server is the bottleneck and more workers add nothing."""
        return self.alone / self.busiest

    def of_size(self, parameters: int) -> "Costs":
        """The costs of another model, all in proportion to its parameters."""
        by = parameters / self.parameters
        return replace(
            self, parameters=parameters, step=self.step * by, exchange=self.exchange * by, server=self.server * by
        )

    @property
    def _pushing(self) -> float:
        return self.push * self.parameters / self.link

    @property
    def _pulling(self) -> float:
        return self.pull * self.parameters / self.link


@dataclass(frozen=True)
class Measured:
    """What a run's events say: its costs, its workers, the updates per second that they reached, and their bytes."""

    costs: Costs
    workers: int
    updates_per_second: float
    exchange: ExchangeBytes


def measure(run_dir: Path, compress: str = "") -> Measured:
    """Measures the costs of a run without a barrier, best of one or two workers, which do not wait for each other.

    Args:
        compress: codecs for the bytes of an exchange; empty for those of the run.

    Raises:
        ConfigurationError: there is no such run, or too little of it.
    """
    description = RunDescription.read(run_dir)
    if not (run_dir / EVENTS).is_file():
        raise ConfigurationError(f"{run_dir}: no run that can be read there: there is no {EVENTS}")
    if description.has_barrier:
        raise ConfigurationError(f"{run_dir}: a run with a barrier says nothing of what an exchange costs by itself")
    events = read_events(run_dir / EVENTS)
    if description.simulated is not None or any(event.server_seconds is None for event in events):
        raise ConfigurationError(f"{run_dir}: no measured times of the server in events.jsonl")
    own = [list(of) for _, of in groupby(sorted(events, key=lambda e: e.worker), lambda e: e.worker)]
    cycles = [cycle for each in own for cycle in _cycles(each)]
    if len(cycles) < _FEWEST:
        raise ConfigurationError(f"{run_dir}: {len(events)} updates are too few to measure costs by")
    exchange, gap = median(each.exchange for each in cycles), median(each.gap - each.held for each in cycles)
    # the mean, since all of the server's time counts, but without the slowest tenth: other programs interrupt it
    server = fmean(sorted(cycle.server for cycle in cycles)[: math.ceil(0.9 * len(cycles))])
    layout = description.layout
    sent = of_codecs(compress, layout) if compress else of_run(description.method, events, layout)
    push, pull = sent.push.size / layout.size, sent.pull.size / layout.size
    costs = Costs(max(gap - exchange, _LEAST), exchange, max(server, _LEAST), layout.size, push=push, pull=pull)
    rate = sum(1 / max(_LEAST, median(cycle.gap for cycle in _cycles(each))) for each in own if _cycles(each))
    return Measured(costs, len(own), rate, sent)


@dataclass(frozen=True)
class _Cycle:
    """The seconds between two updates of one worker, for how many of them the second was held for other workers, and
    how many were exchange, without the hold of the first, and server time."""

    gap: float
    held: float
    exchange: float
    server: float


def _cycles(events: Sequence[Event]) -> list[_Cycle]:
    """The cycles of one worker's events. Each has the times of the exchange before it, and the time of the end of its
    own hold."""
    return [
        _Cycle(
            after.time - before.time,
            after.held_seconds or 0.0,
            max(0.0, after.exchange_seconds - (before.held_seconds or 0.0)),
            after.server_seconds or 0.0,
        )
        for before, after in pairwise(events[_WARM_UP:])
    ]


def tables(measured: Measured, sizes: Sequence[int], links: Sequence[float], servers: Sequence[int]) -> Iterator[Table]:
    """Tables of what was measured, of the workers that a server holds, and of the speed-up by number of workers.

    Args:
        sizes: numbers of parameters of other models.
        links: of a network, in Gbit/s.
        servers: numbers of servers.
    """
    costs = measured.costs
    yield _measured(measured)
    if measured.exchange.compressed:
        yield _sent(measured.exchange, costs.parameters)
    yield _held(costs, sizes or [costs.parameters], links, servers)
    yield _speedup(costs, links, servers)


def _measured(measured: Measured) -> Table:
    costs, table = measured.costs, Table(title="Measured, of one update", title_justify="left", box=box.SIMPLE)
    for column in ("parameters", "step s", "exchange s", "of it server s", "workers", "updates/s", "by the model"):
        table.add_column(column, justify="right")
    seconds = [f"{value:.4f}" for value in (costs.step, costs.exchange, costs.server)]
    predicted = costs.updates_per_second(measured.workers)
    rates = [f"{measured.workers}", f"{measured.updates_per_second:,.2f}", f"{predicted:,.2f}"]
    table.add_row(f"{costs.parameters:,}", *seconds, *rates)
    return table


def _sent(exchange: ExchangeBytes, parameters: int) -> Table:
    title = "Bytes of an exchange (of encoding, the times have what the run has)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in ("", "codec", "bytes", "fp32 / bytes", "known by"):
        table.add_column(column, justify="left" if column in ("", "known by") else "right")
    for name, each in (("update", exchange.push), ("parameters", exchange.pull)):
        table.add_row(name, each.codec, f"{each.size:,.0f}", f"{4 * parameters / each.size:.1f}", each.known)
    return table


def _held(costs: Costs, sizes: Sequence[int], links: Sequence[float], servers: Sequence[int]) -> Table:
    title = "Workers until the server is the bottleneck (step and exchange in proportion to the model)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in ("parameters", "link", *(f"{m} server{'s' * (m > 1)}" for m in servers)):
        table.add_column(column, justify="right")
    for size in sizes:
        for name, each in _over(costs.of_size(size), links):
            table.add_row(f"{size:,}", name, *(f"{replace(each, servers=m).workers_held:,.0f}" for m in servers))
    return table


def _speedup(costs: Costs, links: Sequence[float], servers: Sequence[int]) -> Table:
    table = Table(title="Updates a second over those of one worker", title_justify="left", box=box.SIMPLE)
    cases = [
        (f"{name}, {m} server{'s' * (m > 1)}", replace(c, servers=m))
        for name, c in _over(costs, links)
        for m in servers
    ]
    for column in ("workers", *(name for name, _ in cases)):
        table.add_column(column, justify="right")
    for workers in WORKERS:
        table.add_row(
            f"{workers:,}", *(f"{c.updates_per_second(workers) / c.updates_per_second(1):,.1f}" for _, c in cases)
        )
    return table


def _over(costs: Costs, links: Sequence[float]) -> Iterator[tuple[str, Costs]]:
    if not links:
        yield "as measured", costs
    for link in links:
        yield f"{link:g} Gbit/s", replace(costs, link=link * _GIGABIT)
