"""``fairseq-async capacity``: how many workers one server can serve, from the times that a run has measured."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from pathlib import Path
from statistics import fmean, median, pstdev

from rich import box
from rich.table import Table

from fairseq_async.errors import ConfigurationError
from fairseq_async.records.description import RunDescription
from fairseq_async.records.event_log import EVENTS
from fairseq_async.records.events import Event, read_events
from fairseq_async.reporting import GIVE_A_RUN
from fairseq_async.reporting.capacity_question import Question
from fairseq_async.reporting.exchange_bytes import ExchangeBytes, of_codecs, of_run
from fairseq_async.simulation.costs import Costs, NetworkLink

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10_000)  # rows of the table of speed-ups
_WARM_UP = 2  # a worker's first updates do not count: they touch memory for the first time
_FEWEST = 5  # exchanges to measure by
_LEAST = 1e-9  # seconds: clocks are coarse


@dataclass(frozen=True)
class MeasuredCosts:
    """The costs and the speed of a run, as measured from its events.

    Attributes:
        numbers: the numbers of the run's workers.
        updates_per_second: updates per second of all workers together.
        exchange: bytes of an update and of the parameters.
        server_spread: how much the server's times vary: their deviation over their mean.
        micro_batches: of each worker's last gradient, where the server divides those of a step.
        ranks: of each worker, where some have several.
    """

    costs: Costs
    numbers: tuple[int, ...]
    updates_per_second: float
    exchange: ExchangeBytes
    server_spread: float
    micro_batches: tuple[int | None, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def workers(self) -> int:
        return len(self.numbers)


def measure(run_dir: Path, compress: str = "") -> MeasuredCosts:
    """Measures the costs of a run without a barrier or overlap.

    A run of one or two workers is best, since these wait for no other.

    Args:
        compress: codecs for the bytes of an exchange; empty for those of the run.

    Raises:
        ConfigurationError: there is no such run, or too little of it.
    """
    description = RunDescription.read(run_dir)
    if not (run_dir / EVENTS).is_file():
        raise ConfigurationError(f"{run_dir}: no run that can be read there: there is no {EVENTS}; {GIVE_A_RUN}")
    if description.has_barrier:
        raise ConfigurationError(
            f"{run_dir}: a run with a barrier says nothing of what an exchange costs by itself; give one without"
        )
    if description.exchanges_while_computing:
        raise ConfigurationError(
            f"{run_dir}: its workers compute while they exchange: give a run without overlap and fragments"
        )
    events = read_events(run_dir / EVENTS)
    if description.simulated is not None or any(event.server_seconds is None for event in events):
        raise ConfigurationError(
            f"{run_dir}: no measured times of the server in events.jsonl; give a run of real processes"
        )
    stepping = _stepping(events, description.closes_early)
    own = [list(of) for _, of in groupby(sorted(events, key=lambda e: e.worker), lambda e: e.worker)]
    of_workers = [_cycles(each, stepping) for each in own]
    cycles = list(chain.from_iterable(of_workers))
    if len(cycles) < _FEWEST:
        raise ConfigurationError(f"{run_dir}: {len(events)} updates are too few to measure costs by")
    exchange, gap = _typical(cycles, lambda c: c.exchange), _typical(cycles, lambda c: c.gap - c.held)
    served = _uninterrupted(cycles)
    server = max(fmean(served), _LEAST)  # the mean, since all of the server's time counts
    layout = description.layout
    sent = of_codecs(compress, layout) if compress else of_run(description.method, events, layout)
    push, pull = sent.push.size / layout.size, sent.pull.size / layout.size
    shards = description.shards  # each had its part of the server's time
    step, unsharded = max(gap - exchange, _LEAST), exchange + (shards - 1) * server
    costs = Costs(step, unsharded, shards * server, layout.size, push=push, pull=pull, shards=shards)
    rate = sum(1 / max(_LEAST, _typical(each, lambda c: c.gap)) for each in of_workers if each)
    numbers, last = tuple(each[0].worker for each in own), tuple(each[-1].micro_batches for each in own)
    ranks = tuple(each[-1].ranks or 1 for each in own)
    counts = last if any(last) else (), ranks if max(ranks) > 1 else ()
    return MeasuredCosts(costs, numbers, rate, sent, pstdev(served) / server, *counts)


@dataclass(frozen=True)
class _Cycle:
    """The seconds between two updates of one worker.

    Attributes:
        gap: seconds between the two updates.
        held: of these, those for which the second update was held for other workers.
        exchange: seconds of the exchange, without the hold of the first update.
        server: seconds for which the server worked on the first update.
        steps: whether the server took a step with the first update.
    """

    gap: float
    held: float
    exchange: float
    server: float
    steps: bool


def _stepping(events: Sequence[Event], closes_early: bool) -> set[tuple[int, int]]:
    """Returns worker and sequence number of the updates with which the server stepped while their senders waited."""
    if closes_early:  # the last update of a round is the one that was not held
        return {(event.worker, event.sequence) for event in events if not event.held_seconds}
    versions = [0, *(event.version_after for event in events)]
    return {(e.worker, e.sequence) for e, before in zip(events, versions, strict=False) if e.version_after > before}


def _typical(cycles: Sequence[_Cycle], seconds: Callable[[_Cycle], float]) -> float:
    """Returns the mean of so many cycles, each as long as the median of its kind: with a step of the server or without.

    A median of all would be of the more frequent kind alone, and a mean of all have the seconds of interruptions.
    """
    kinds = [[seconds(cycle) for cycle in cycles if cycle.steps is steps] for steps in (False, True)]
    return sum(len(kind) * median(kind) for kind in kinds if kind) / len(cycles)


def _uninterrupted(cycles: Sequence[_Cycle]) -> list[float]:
    """Returns the server's seconds without the slowest tenth, since other programs interrupt the server.

    Updates that only wait for their step are quick. They are cut apart from the others: the slowest of all are steps.
    """
    kinds = [sorted(cycle.server for cycle in cycles if cycle.steps is steps) for steps in (False, True)]
    return [seconds for kind in kinds for seconds in kind[: math.ceil(0.9 * len(kind))]]


def _cycles(events: Sequence[Event], stepping: Collection[tuple[int, int]]) -> list[_Cycle]:
    """Returns the cycles of one worker's events.

    An event has the times of the exchange before it; its own time is that of the end of its own hold.
    """
    return [
        _Cycle(
            gap=after.time - before.time,
            held=after.held_seconds or 0.0,
            exchange=max(0.0, after.exchange_seconds - (before.held_seconds or 0.0)),
            server=after.server_seconds or 0.0,
            steps=(before.worker, before.sequence) in stepping,
        )
        for before, after in pairwise(events[_WARM_UP:])
    ]


def answer(run_dir: Path, question: Question) -> Iterator[Table]:
    """Yields tables of what was measured, of the workers that a server holds, and of the speed-up by workers.

    Raises:
        ConfigurationError: there is no such run, or too little of it; there is no such codec.
    """
    measured = measure(run_dir, question.compress)
    costs, links, shards = replace(measured.costs, apart=question.apart), question.links, question.shards
    yield _measured(measured)
    if measured.exchange.compressed:
        yield _sent(measured.exchange, costs.parameters)
    yield _held(costs, question.sizes or [costs.parameters], links, shards)
    yield _speedup(costs, links, shards)


def _measured(measured: MeasuredCosts) -> Table:
    costs, table = measured.costs, Table(title="Measured, of one update", title_justify="left", box=box.SIMPLE)
    for column in ("parameters", "step s", "exchange s", "of it server s", "workers", "updates/s", "by the model"):
        table.add_column(column, justify="right")
    seconds = [f"{value:.4f}" for value in (costs.step, costs.exchange, costs.server)]
    predicted = costs.updates_per_second(measured.workers)
    rates = [f"{measured.workers}", f"{measured.updates_per_second:,.2f}", f"{predicted:,.2f}"]
    counts = {"micro-batches of each worker's last gradient": measured.micro_batches, "its ranks": measured.ranks}
    table.caption = "; ".join(f"{name}: {', '.join(map(str, each))}" for name, each in counts.items() if each)
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


def _held(costs: Costs, sizes: Sequence[int], links: Sequence[NetworkLink], shards: Sequence[int]) -> Table:
    title = "Workers until the server is the bottleneck (step and exchange in proportion to the model)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in ("parameters", "link", *(f"{m} shard{'s' * (m > 1)}" for m in shards)):
        table.add_column(column, justify="right")
    for size in sizes:
        for name, each in over(costs.of_size(size), links):
            table.add_row(f"{size:,}", name, *(f"{replace(each, shards=m).workers_held:,.0f}" for m in shards))
    return table


def _speedup(costs: Costs, links: Sequence[NetworkLink], shards: Sequence[int]) -> Table:
    table = Table(title="Updates a second over those of one worker", title_justify="left", box=box.SIMPLE)
    cases = [
        (f"{name}, {m} shard{'s' * (m > 1)}", replace(c, shards=m)) for name, c in over(costs, links) for m in shards
    ]
    for column in ("workers", *(name for name, _ in cases)):
        table.add_column(column, justify="right")
    for workers in WORKERS:
        table.add_row(
            f"{workers:,}", *(f"{c.updates_per_second(workers) / c.updates_per_second(1):,.1f}" for _, c in cases)
        )
    return table


def over(costs: Costs, links: Sequence[NetworkLink]) -> Iterator[tuple[str, Costs]]:
    """Yields each link's name and the costs over this link; the costs as they are if there is no link."""
    if not links:
        yield "as measured", costs
    for link in links:
        yield str(link), costs.over(link)
