"""The answers of ``fairseq-async capacity``: what a run's server can serve, or what a cluster needs."""

from collections.abc import Iterator
from dataclasses import replace

from rich.table import Table

from fairseq_async.protocol.layout import Layout, Segment
from fairseq_async.records.event_log import EVENTS
from fairseq_async.reporting import sizing
from fairseq_async.reporting.capacity import Measured, measure, over, tables
from fairseq_async.reporting.capacity_question import Question
from fairseq_async.reporting.exchange_bytes import of_codecs
from fairseq_async.simulation.cluster import Cluster, Distribution, Seconds, Trace
from fairseq_async.simulation.costs import Costs

_ADAM, _OUTER = 10e-9, 4e-9  # assumed seconds per parameter of the server, measured on one core
_COPIES = 3e-9  # likewise, for the copies of a worker and the server together


def answer(question: Question) -> Iterator[str | Table]:
    """Yields the answer to a question: tables, and lines of text.

    Raises:
        ConfigurationError: there is no such run, or too little of it; there is no such codec.
    """
    measured = None if question.run_dir is None else measure(question.run_dir, question.compress)
    if question.workers is not None:
        yield from _for_cluster(question, question.workers, measured)
    elif measured is not None:
        placed = replace(measured, costs=replace(measured.costs, apart=question.apart))
        yield from tables(placed, question.sizes, question.links, question.shards)


def _for_cluster(question: Question, workers: int, measured: Measured | None) -> Iterator[str | Table]:
    seconds = _step_seconds(question, measured)
    cluster = Cluster(workers=workers, seconds_per_step=[seconds[w % len(seconds)] for w in range(workers)])
    sizes = question.sizes or (() if measured is None else (measured.costs.parameters,))
    for size in sizes:
        gradients, local_sgd = _costs(size, question.compress, measured)
        slower = 1.0 if measured is None or question.step_seconds else size / measured.costs.parameters
        for name, each in over(gradients, question.links):
            own = replace(local_sgd, link=each.link, latency=each.latency, apart=question.apart)
            spread = 0.0 if measured is None else measured.server_spread
            placed = replace(each, apart=question.apart)
            asked = sizing.Sizing(cluster, placed, own, question.at_most_waiting, spread, slower)
            where = f"{workers:,} workers, {size:,} parameters, {name if question.links else 'one machine'}"
            yield from sizing.answer(asked, question.shards, where)
    if measured is None:
        yield (
            f"The server's time is assumed: {_ADAM * 1e9:g} ns a parameter for Adam, {_OUTER * 1e9:g} for an outer "
            "rule, on one core; a RUN_DIR says yours."
        )


def _step_seconds(question: Question, measured: Measured | None) -> list[Seconds]:
    """Returns the seconds per step of the workers, which take them in turn."""
    if question.step_seconds:
        return [
            Distribution(distribution="lognormal", mean=mean, spread=spread) if spread else mean
            for mean, spread in question.step_seconds
        ]
    assert question.run_dir is not None and measured is not None, "a question without a run has them"
    return [Trace(trace=question.run_dir / EVENTS, worker=worker) for worker in measured.numbers]


def _costs(size: int, compress: str, measured: Measured | None) -> tuple[Costs, Costs]:
    """Returns the costs of an exchange of gradients and of one of local SGD: as measured, or as assumed."""
    if measured is not None:
        return measured.costs.of_size(size), measured.costs.of_size(size)
    return assumed_costs(size, compress)


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
