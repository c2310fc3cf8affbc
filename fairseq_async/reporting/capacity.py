"""Tables of how many workers a server holds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.table import Table

from fairseq_async.simulation.capacity import Costs, Measured

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10_000)
_GIGABIT = 1e9 / 8


def tables(measured: Measured, sizes: Sequence[int], links: Sequence[float], servers: Sequence[int]) -> Iterator[Table]:
    """What was measured; how many workers are held, by model, link (Gbit/s) and number of servers; and the speed-up."""
    costs = measured.costs
    yield _measured(measured)
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
