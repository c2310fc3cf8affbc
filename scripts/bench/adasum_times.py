"""Times Adasum beside Gloo's all-reduce of the same bytes, between processes of one machine.

Adasum reads its operands twice (products, then the combination); a sum reads them once. Adasum is timed with tensors
that lie end to end, as in the buckets of DistributedDataParallel, and with each tensor in memory of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.collective import DistributedAdasum  # noqa: E402
from fairseq_async.options.addresses import free_port  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

LIMIT = 1.1
WARM_UP = 2  # rounds
ALL_REDUCE, END_TO_END, APART, MESSAGES = "all-reduce", "Adasum, end to end", "Adasum, apart", "Adasum, in messages"

Seconds = dict[str, list[float]]


def take_part(rank: int, ranks: int, port: int, elements: int, tensors: int, rounds: int, result: Connection) -> None:
    """Runs one rank; sends the time of each operation in each round, until the last rank has finished it."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    summed, flat = torch.zeros(elements), torch.randn(elements)
    views = list(flat.tensor_split(tensors))
    apart = [view.clone() for view in views]
    shared, messages = DistributedAdasum(), DistributedAdasum(shared_memory=False)
    operations: dict[str, Callable[[], Any]] = {
        ALL_REDUCE: lambda: dist.all_reduce(summed),
        END_TO_END: lambda: shared(views),
        APART: lambda: shared(apart),
        MESSAGES: lambda: messages(views),
    }
    seconds: Seconds = {name: [] for name in operations}
    for _ in range(WARM_UP + rounds):
        for name, operation in operations.items():
            dist.barrier()
            started = time.perf_counter()
            operation()
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    result.send(seconds)
    dist.destroy_process_group()


def measure(ranks: int, elements: int, tensors: int, rounds: int) -> Seconds:
    """Returns the seconds of each operation in each round, as the first rank measured them."""
    context, port = torch.multiprocessing.get_context("spawn"), free_port()
    ends = [context.Pipe(duplex=False) for _ in range(ranks)]
    arguments = [(rank, ranks, port, elements, tensors, rounds, ends[rank][1]) for rank in range(ranks)]
    processes = [context.Process(target=take_part, args=each, daemon=True) for each in arguments]
    try:
        for process in processes:
            process.start()
        return {name: values[WARM_UP:] for name, values in ends[0][0].recv().items()}
    finally:
        for process in processes:
            process.join(30)
            process.kill()


def rows(seconds: Seconds) -> list[dict[str, Any]]:
    """Returns the milliseconds of each operation, and their ratio to those of the all-reduce."""
    times = {name: [1000 * value for value in values] for name, values in seconds.items()}
    return [
        {
            "what": name,
            "median ms": median(values),
            "fastest ms": min(values),
            "of the all-reduce's median": median(values) / median(times[ALL_REDUCE]),
            "of its fastest": min(values) / min(times[ALL_REDUCE]),
        }
        for name, values in times.items()
    ]


def main(
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Processes; may be repeated. [default: 2 and 4]")
    ] = None,
    elements: Annotated[int, typer.Option(min=1, help="fp32 values of each process.")] = 25_000_000,
    tensors: Annotated[int, typer.Option(min=1, help="Tensors that they are in.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="How often each operation is timed.")] = 20,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure Adasum against Gloo's all-reduce; exit code 1 if a bound is broken."""
    report = Report(f"Adasum: {elements:,} fp32 values in {tensors} tensors")
    for count in ranks or [2, 4]:
        table = rows(measure(count, elements, tensors, rounds))
        report.table(f"{count} processes, the operations in turn", table)
        for row in table[1:3]:
            report.bound(f"{row['what']}, {count} ranks, of an all-reduce", row["of the all-reduce's median"], LIMIT)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
