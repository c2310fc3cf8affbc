"""Simulates which shards, local steps and fragments a cluster needs, so that its workers wait little.

    python scripts/bench/sizing.py [RUN_DIR] --workers 64 --parameters 1e9 --link 10 --step-seconds 1:0.2

The steps, and the server's times, are those of the run; without one the server's times are assumed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich import box
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.errors import ConfigurationError, fail  # noqa: E402
from fairseq_async.launch.progress.display import plain_console  # noqa: E402
from fairseq_async.method.spec import GRACE_SHARE  # noqa: E402
from fairseq_async.protocol.layout import Layout, Segment  # noqa: E402
from fairseq_async.records.event_log import EVENTS  # noqa: E402
from fairseq_async.reporting.capacity import MeasuredCosts, measure, over  # noqa: E402
from fairseq_async.reporting.capacity_question import Question, check_run, pairs, read_question  # noqa: E402
from fairseq_async.reporting.exchange_bytes import of_codecs  # noqa: E402
from fairseq_async.simulation.cluster import WIDEST, Cluster, Distribution, Seconds, Speed, Trace  # noqa: E402
from fairseq_async.simulation.costs import Costs  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.server_queue import Exchanges, Load, ServerQueue  # noqa: E402

_ADAM, _OUTER = 10e-9, 4e-9  # assumed seconds per parameter of the server, measured on one core
_COPIES = 3e-9  # likewise, for the copies of a worker and the server together
_LOCAL_STEPS = tuple(2**power for power in range(11))
_FRAGMENTS = (2, 4, 8, 16)
_SATURATED = 0.95  # share of the time in which a server or its link is busy
_AHEAD = 1  # steps for which a worker goes on while a fragment is exchanged
_HERE = "Shards (server_shards) are taken to be equal, each with a core of the server's machine; they share its link."
_APART = "Shards (addresses in server_shards) are taken to be equal, each with a core and a link of its own."


@dataclass(frozen=True)
class Fit:
    """A way to exchange that keeps waiting within the budget, and the load that it leads to."""

    exchanges: Exchanges
    load: Load


@dataclass(frozen=True)
class Row:
    """Results for one number of shards: gradients at every step, and local SGD with the fewest local steps.

    Local SGD exchanges the model whole or in fragments; None where up to 1,024 local steps are too few.
    """

    shards: int
    gradients: Load
    whole: Fit | None
    in_fragments: Fit | None


@dataclass(frozen=True)
class Sizing:
    """A cluster, what an exchange of the model costs there, and how much its workers may wait.

    Attributes:
        gradients: costs of an exchange after every step; their ``step`` is not used.
        local_sgd: costs of an exchange that an outer rule takes; likewise.
        at_most_waiting: share of the workers' time that may be waiting.
        server_spread: deviation of the server's times over their mean.
        slower: factor by which the cluster's seconds per step are multiplied.
    """

    cluster: Cluster
    gradients: Costs
    local_sgd: Costs
    at_most_waiting: float
    server_spread: float = 0.0
    slower: float = 1.0

    def rows(self, shards: Sequence[int]) -> list[Row]:
        """Returns one row for each number of shards."""
        return [self._row(count) for count in shards]

    @property
    def step(self) -> float:
        """Mean seconds of the workers' steps."""
        workers = range(self.cluster.workers)
        return self.slower * fmean(Speed(self.cluster.seconds_of(worker), worker, 0).mean for worker in workers)

    def _row(self, shards: int) -> Row:
        gradients, local_sgd = replace(self.gradients, shards=shards), replace(self.local_sgd, shards=shards)
        load = self._simulate(gradients, Exchanges())
        return Row(shards, load, self._fewest(local_sgd, (1,), 0), self._fewest(local_sgd, _FRAGMENTS, _AHEAD))

    def with_steps_that_close(self, shards: int) -> Load:
        """Returns the load of gradients at every step where those that come at about the same time make a step."""
        return self._simulate(replace(self.gradients, shards=shards), Exchanges(close_within=GRACE_SHARE))

    def _simulate(self, costs: Costs, exchanges: Exchanges) -> Load:
        spread = min(WIDEST, self.server_spread)
        served = Distribution(distribution="lognormal", mean=costs.server, spread=spread)
        return ServerQueue(self.cluster, costs, exchanges, served if spread else None, self.slower).run()

    def _fewest(self, costs: Costs, fragments: Sequence[int], delay: int) -> Fit | None:
        """Returns the fit with the fewest local steps, and then the fewest fragments; None if nothing fits."""
        step = self.step
        for local_steps in _LOCAL_STEPS:
            for count in fragments:
                exchanges = Exchanges(local_steps, count, delay)
                if count > local_steps or self._least_waiting(costs, exchanges, step) > self.at_most_waiting:
                    continue
                load = self._simulate(costs, exchanges)
                if load.waiting <= self.at_most_waiting:
                    return Fit(exchanges, load)
        return None

    def _least_waiting(self, costs: Costs, exchanges: Exchanges, step: float) -> float:
        """Returns the least share of waiting, by the asymptotic bound, which no queue beats.

        What this bound rules out need not be simulated.
        """
        part, meanwhile = costs.of_part(1 / exchanges.fragments), exchanges.delay * step
        computing = exchanges.between * step
        cycle = computing - meanwhile + max(meanwhile, part.exchanging)
        rate = min(self.cluster.workers / cycle, 1 / part.busiest)
        return 1 - rate * computing / self.cluster.workers


def described(sizing: Sizing, shards: Sequence[int], where: str) -> Iterator[str | Table]:
    """Yields the table of all numbers of shards, and one line that says which to choose.

    Args:
        where: the workers, the model and the link, in words.
    """
    rows, budget = sizing.rows(shards), sizing.at_most_waiting
    yield _table(rows, f"{where}: waiting {budget:.0%} at most")
    yield f"{where}: {_gradients(sizing, rows)}; {_local_sgd(rows)}."
    if sizing.cluster.workers > 1:
        yield _closing_steps(sizing, _chosen(sizing, rows))
    if any(row.shards > 1 for row in rows):
        yield _APART if sizing.gradients.apart else _HERE


def _table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    measured = ("updates/s", "waiting", "staleness", "95%", "processor", "link in", "link out")
    for column in ("shards", *measured, "local SGD: H", "H in P fragments", "waiting"):
        table.add_column(column, justify="right")
    for row in rows:
        load, parts = row.gradients, row.in_fragments
        shares = [f"{share:.0%}" for share in (load.server, load.incoming, load.outgoing)]
        stale = [f"{load.staleness:,.1f}", f"{load.staleness_95:,.0f}"]
        cells = [f"{row.shards}", f"{load.updates_per_second:,.4g}", f"{load.waiting:.1%}", *stale, *shares]
        table.add_row(
            *cells,
            "–" if row.whole is None else f"{row.whole.exchanges.local_steps:,}",
            "–" if parts is None else f"{parts.exchanges.local_steps:,} in {parts.exchanges.fragments}",
            "–" if parts is None else f"{parts.load.waiting:.1%}",
        )
    return table


def _chosen(sizing: Sizing, rows: Sequence[Row]) -> Row:
    """Returns the row with the fewest shards with which gradients wait little enough; the last one if none does."""
    return next((row for row in rows if row.gradients.waiting <= sizing.at_most_waiting), rows[-1])


def _gradients(sizing: Sizing, rows: Sequence[Row]) -> str:
    row = _chosen(sizing, rows)
    if row.gradients.waiting <= sizing.at_most_waiting:
        return f"gradients at every step need {_shards(row.shards)} ({row.gradients.waiting:.1%} waiting)"
    return f"gradients at every step wait {row.gradients.waiting:.0%} even with {_shards(row.shards)}, for " + (
        _bottleneck(sizing, row)
    )


def _closing_steps(sizing: Sizing, row: Row) -> str:
    """Says what the default method, whose gradients wait for each other, adds to a row's waiting."""
    load = sizing.with_steps_that_close(row.shards)
    return (
        "These gradients are those of plain asynchronous SGD. By default workers of about equal speed step together, "
        f"and wait for each other: {load.waiting:.0%} waiting, {load.updates_per_second:,.4g} updates/s, staleness "
        f"{load.staleness:,.1f} in place of {row.gradients.staleness:,.1f}, on {_shards(row.shards)}."
    )


def _bottleneck(sizing: Sizing, row: Row) -> str:
    """Names what keeps the workers waiting where no number of shards is enough."""
    costs, step, load = replace(sizing.gradients, shards=row.shards), sizing.step, row.gradients
    if costs.exchanging / (step + costs.exchanging) <= sizing.at_most_waiting:
        return f"the server's {load.bottleneck}"
    parts = {
        "a worker's own link": costs.pushing + costs.pulling,
        "the latency": costs.ways * costs.latency,
        "the server's time": costs.server / costs.shards,
        "copies": costs.exchange - costs.server,
    }
    name = max(parts, key=parts.__getitem__)
    alone = f"{name}: {parts[name]:.3g} s of every update, after {step:.3g} s of computing"
    saturated = max(load.server, load.incoming, load.outgoing) > _SATURATED
    return f"{alone}, and for the server's {load.bottleneck}" if saturated else alone


def _local_sgd(rows: Sequence[Row]) -> str:
    for row in rows:
        ways = []
        if row.whole is not None:
            ways.append(f"H = {row.whole.exchanges.local_steps:,}")
        if row.in_fragments is not None:
            given = row.in_fragments.exchanges
            ways.append(f"H = {given.local_steps:,} in P = {given.fragments} fragments, one step ahead")
        if ways:
            return f"local SGD needs {_shards(row.shards)}, with {', or '.join(ways)}"
    return f"local SGD of up to {_LOCAL_STEPS[-1]:,} local steps waits longer, too"


def _shards(count: int) -> str:
    return "one server" if count == 1 else f"a server in {count} shards"


def answer(
    run_dir: Path | None, question: Question, workers: int, step_seconds: str, at_most_waiting: float
) -> Iterator[str | Table]:
    """Yields tables, and lines of text, that say what a cluster of so many workers needs.

    Args:
        run_dir: the run whose costs count; None where they are assumed.
        step_seconds: mean and spread of the seconds per step, for the workers in turn; empty for the run's.
        at_most_waiting: share of the workers' time that may be lost by waiting.

    Raises:
        ConfigurationError: there is no such run, or too little of it; the question is not complete.
    """
    given = pairs("--step-seconds", step_seconds, "as 0.3, or 0.3:0.2 with deviation over mean", most=WIDEST)
    if run_dir is None and not (question.sizes and given):
        missing = "--step-seconds" if question.sizes else "--parameters"
        raise ConfigurationError(f"--workers {workers}: without RUN_DIR, nothing says what they train: give {missing}")
    if not 0 < at_most_waiting < 1:
        raise ConfigurationError(
            f"--at-most-waiting {at_most_waiting:g}: a share of the workers' time, above 0 and below 1"
        )
    measured = None if run_dir is None else measure(run_dir, question.compress)
    seconds = _step_seconds(run_dir, given, measured)
    cluster = Cluster(workers=workers, seconds_per_step=[seconds[w % len(seconds)] for w in range(workers)])
    for size in question.sizes or (() if measured is None else (measured.costs.parameters,)):
        gradients, local_sgd = assumed_costs(size, question.compress)
        if measured is not None:
            gradients = local_sgd = measured.costs.of_size(size)
        slower = 1.0 if measured is None or given else size / measured.costs.parameters
        for name, each in over(gradients, question.links):
            own = replace(local_sgd, link=each.link, latency=each.latency, apart=question.apart)
            spread = 0.0 if measured is None else measured.server_spread
            asked = Sizing(cluster, replace(each, apart=question.apart), own, at_most_waiting, spread, slower)
            where = f"{workers:,} workers, {size:,} parameters, {name if question.links else 'one machine'}"
            yield from described(asked, question.shards, where)
    if measured is None:
        yield (
            f"The server's time is assumed: {_ADAM * 1e9:g} ns a parameter for Adam, {_OUTER * 1e9:g} for an outer "
            "rule, on one core; a RUN_DIR says yours."
        )


def _step_seconds(
    run_dir: Path | None, given: Sequence[tuple[float, float]], measured: MeasuredCosts | None
) -> list[Seconds]:
    """Returns the seconds per step of the workers, which take them in turn."""
    if given:
        return [
            Distribution(distribution="lognormal", mean=mean, spread=spread) if spread else mean
            for mean, spread in given
        ]
    assert run_dir is not None and measured is not None, "a question without a run has them"
    return [Trace(trace=run_dir / EVENTS, worker=worker) for worker in measured.numbers]


def assumed_costs(size: int, compress: str = "") -> tuple[Costs, Costs]:
    """Returns the costs to assume without a run: of gradients, which Adam takes, and of local SGD; ``step`` is 0."""
    push = pull = 4.0
    if compress:
        sent = of_codecs(compress, Layout((Segment("all", (size,), "float32"),)))
        push, pull = sent.push.size / size, sent.pull.size / size
    gradients, local_sgd = (
        Costs(0.0, (server + _COPIES) * size, server * size, size, push=push, pull=pull) for server in (_ADAM, _OUTER)
    )
    return gradients, local_sgd


def main(
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of workers of the cluster.")],
    run_dir: Annotated[Path | None, typer.Argument(metavar="RUN_DIR", help="A run whose times count.")] = None,
    parameters: Annotated[str, typer.Option(metavar="N,…", help="As of fairseq-async capacity.")] = "",
    link: Annotated[str, typer.Option(metavar="X,…", help="As of fairseq-async capacity.")] = "",
    shards: Annotated[str, typer.Option(metavar="S,…", help="Numbers of shards to choose from.")] = "1,2,4,8,16,32,64",
    apart: Annotated[bool, typer.Option("--apart", help="As of fairseq-async capacity.")] = False,
    compress: Annotated[str, typer.Option(metavar="NAME", help="As of fairseq-async capacity.")] = "",
    step_seconds: Annotated[
        str,
        typer.Option(
            metavar="S,…",
            help="Step times of the workers in turn: 0.3,0.9; 0.3:0.2 has a spread (deviation over mean) of 0.2.",
            show_default="those of the run",
        ),
    ] = "",
    at_most_waiting: Annotated[
        float, typer.Option(metavar="X", help="Share of the workers' time that may be lost by waiting.")
    ] = 0.05,
) -> None:
    """Say which shards of a server, local steps and fragments a cluster needs."""
    console = plain_console(width=None if sys.stdout.isatty() else 140)
    try:
        if run_dir is not None:
            check_run(run_dir)
        question = read_question(parameters, link, shards, apart, compress)
        for part in answer(run_dir, question, workers, step_seconds, at_most_waiting):
            console.print(part, highlight=False)
    except ConfigurationError as error:
        fail(error)


if __name__ == "__main__":
    run_main(main)
