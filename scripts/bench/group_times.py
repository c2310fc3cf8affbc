"""Measures the time that the synchronous methods add to a training step of the Multi30k model, built by fairseq.

AdaScale: four micro-batches in a step, with and without the statistics, by SGD and by Adam. Processor time counts,
because other programs disturb it least. Several processes measure one after the other, because the addresses of the
first allocations decide how much memory each step requests from the kernel again. Adasum: two processes under
DistributedDataParallel, with its own all-reduce and with the hook. Steps of the two sides alternate.
"""

from __future__ import annotations

import ctypes
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.collective import AdaScale, AdasumState, adasum_hook  # noqa: E402
from fairseq_async.collective.adascale import AdamNorm  # noqa: E402
from fairseq_async.options.addresses import free_port  # noqa: E402
from recipes.multi30k_en_de.presets import PRESETS, Size  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

STATISTICS, HOOK = 0.05, 1.2
ACCUMULATION, LENGTH, WARM_UP = 4, 16, 1
INTERVAL = 5


def network(vocabulary: int) -> nn.Module:
    """Builds fairseq's Transformer of the recipe's small preset."""
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture

    dictionary = Dictionary()
    for number in range(vocabulary):
        dictionary.add_symbol(f"w{number}")
    args = Namespace(**{name.replace("-", "_"): value for name, value in PRESETS[Size.SMALL].model().items()})
    args.dropout, args.max_source_positions, args.max_target_positions = 0.2, 256, 256
    base_architecture(args)
    torch.manual_seed(1)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return TransformerModel.build_model(args, task)


def loss_of(model: nn.Module, vocabulary: int, tokens: int) -> Tensor:
    """Returns the loss of a batch of ``tokens`` random target tokens."""
    ids = torch.randint(4, vocabulary, (2, tokens // LENGTH, LENGTH))
    lengths = torch.full((tokens // LENGTH,), LENGTH)
    scores, _ = model(ids[0], lengths, ids[1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), ids[1].flatten())


def keep_memory() -> None:
    """Keeps freed memory in the process, unlike the default, since page faults take a different time in each step."""
    library, most = ctypes.CDLL(None), 2**31 - 1
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        library.mallopt(parameter, most)


def timed(step: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    step()
    return clock() - started


def statistics(
    adam: bool, interval: int, vocabulary: int, tokens: int, rounds: int, without_page_faults: bool
) -> tuple[float, float]:
    """Returns the mean milliseconds of a step without and with AdaScale, over as many steps of each."""
    torch.set_num_threads(1)
    if without_page_faults:
        keep_memory()
    model = network(vocabulary)
    make = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = make(model.parameters(), lr=1e-4)
    adascale = AdaScale(optimizer, accumulation=ACCUMULATION, interval=interval)

    def plain() -> None:
        adascale._meter.local.active = False
        for _ in range(ACCUMULATION):
            (loss_of(model, vocabulary, tokens) / ACCUMULATION).backward()
        optimizer.step()
        adascale.zero_grad()

    def measured() -> None:
        for _ in range(ACCUMULATION):
            (loss_of(model, vocabulary, tokens) / ACCUMULATION).backward()
        adascale.step()
        adascale.zero_grad()

    for _ in range(AdamNorm.STEPS + 1):  # after these steps parameters count
        measured()
    adascale.steps = 0
    both = [
        [timed(step, time.process_time) for _ in range(interval)] for _ in range(rounds) for step in (plain, measured)
    ]
    return 1000 * fmean(sum(both[0::2], [])), 1000 * fmean(sum(both[1::2], []))


def shares(adam: bool, interval: int, processes: int, *arguments: Any) -> dict[str, Any]:
    """Measures in several processes: mean milliseconds, and the share by which the statistics lengthen a step."""
    with torch.multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        pairs = pool.starmap(statistics, [(adam, interval, *arguments)] * processes, chunksize=1)
    plain, adascale = (fmean(side) for side in zip(*pairs, strict=True))
    each = [b / a - 1 for a, b in pairs]
    what = {"optimizer": "Adam" if adam else "SGD", "interval": interval}
    times = {"plain ms": plain, "AdaScale ms": adascale}
    return what | times | {"share": adascale / plain - 1, "lowest": min(each), "highest": max(each)}


def take_part(rank: int, port: int, vocabulary: int, tokens: int, rounds: int, result: Connection) -> None:
    """Runs one of two ranks; sends the seconds of each step of both sides."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    models = [DistributedDataParallel(network(vocabulary)) for _ in range(2)]
    models[1].register_comm_hook(AdasumState(), adasum_hook)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in models]
    seconds: list[list[float]] = [[], []]

    def step(side: int) -> None:
        loss_of(models[side], vocabulary, tokens).backward()
        optimizers[side].step()
        optimizers[side].zero_grad()

    for _ in range(WARM_UP + rounds):
        for side in (0, 1):
            dist.barrier()
            seconds[side].append(timed(lambda: step(side), time.perf_counter))  # noqa: B023
    result.send(seconds)
    result.close()
    dist.barrier()


def hook(vocabulary: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Returns the milliseconds of a step with DDP's all-reduce and with the hook."""
    context, port = torch.multiprocessing.get_context("spawn"), free_port()
    ends = [context.Pipe(duplex=False) for _ in range(2)]
    arguments = [(rank, port, vocabulary, tokens, rounds, ends[rank][1]) for rank in range(2)]
    processes = [context.Process(target=take_part, args=each, daemon=True) for each in arguments]
    try:
        for process in processes:
            process.start()
        plain, adasum = ([1000 * each for each in side[WARM_UP:]] for side in ends[0][0].recv())
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    ratio = median(b / a for a, b in zip(plain, adasum, strict=True))
    return {"tokens": tokens, "all-reduce ms": median(plain), "Adasum ms": median(adasum), "ratio": ratio}


def main(
    vocabulary: Annotated[int, typer.Option(min=10, help="Symbols.")] = 8000,
    tokens: Annotated[int, typer.Option(min=LENGTH, help="Target tokens of a batch.")] = 1024,
    rounds: Annotated[int, typer.Option(min=3, help="Steps of each side.")] = 20,
    processes: Annotated[int, typer.Option(min=1, help="For AdaScale, one after the other.")] = 6,
    without_page_faults: Annotated[bool, typer.Option("--without-page-faults", help="Keep freed memory.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure both; exit code 1 if a bound is broken."""
    parameters = sum(parameter.numel() for parameter in network(vocabulary).parameters())
    report = Report(f"Multi30k's model, {parameters:,} parameters, {tokens} tokens in a batch")
    kinds = ((False, 1), (True, 1), (True, INTERVAL))
    rows = []
    for adam, interval in kinds:
        few = max(2, rounds // interval)
        rows.append(shares(adam, interval, processes, vocabulary, tokens, few, without_page_faults))
    report.table(
        f"AdaScale, {ACCUMULATION} batches in a step; {rounds} steps each way in each of {processes} processes", rows
    )
    for row in rows:
        what = f"AdaScale's share of a step, {row['optimizer']}, norms in every {row['interval']}th step"
        report.bound(what, row["share"], STATISTICS)
    row = hook(vocabulary, tokens, rounds)
    report.table(
        f"Adasum in the hook of DistributedDataParallel, 2 processes; medians of {rounds} steps in turn", [row]
    )
    report.bound("step with the hook of one with DDP's all-reduce", row["ratio"], HOOK)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
