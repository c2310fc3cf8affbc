"""Measures the updates per second of a server of one process, on one core and on more, and of one in shards.

The time is that of all a server's work with an update except its transfer: admission, accumulation, step. Sides
alternate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.algorithms import Update  # noqa: E402
from fairseq_async.algorithms.threads import set_threads  # noqa: E402
from fairseq_async.exchange import SharedMemory  # noqa: E402
from fairseq_async.method.methods import outer_rule  # noqa: E402
from fairseq_async.method.spec import MethodSpec, hybrid_spec, local_sgd_spec  # noqa: E402
from fairseq_async.options.config import HybridOptions, ServerOptions  # noqa: E402
from fairseq_async.protocol import Layout  # noqa: E402
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, ParameterGroup  # noqa: E402
from fairseq_async.server.parameter_server import ParameterServer  # noqa: E402
from fairseq_async.server.programs import gradient_main, local_sgd_main  # noqa: E402
from fairseq_async.server.shards.build import build_sharded, close_shards, shared_copy  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

BOUND = 1.6
TENSORS = 24
ALONE = "1 process, 1 core"


def compared(cores: int) -> dict[str, tuple[int, int]]:
    """Returns shards and threads of each side, up to this number of cores: 1, 2, 4, …"""
    numbers = [1 << power for power in range(1, cores.bit_length())]
    threads = {f"1 process, {number} cores": (1, number) for number in numbers}
    return {ALONE: (1, 1)} | threads | {f"{number} shards, a core each": (number, number) for number in numbers}


def specification(method: str, shards: int) -> MethodSpec:
    """Returns the method: Adam with two gradients in a step, or an outer rule of local SGD."""
    server = ServerOptions(server_shards=str(shards))
    if method == "Adam":
        adam = OptimizerSpec("Adam", [ParameterGroup(list(range(TENSORS)), {"lr": 1e-3})])
        return hybrid_spec(HybridOptions(updates_per_step=2), 2, server, adam.to_json(), 0)
    return local_sgd_spec(outer_rule(method).options(outer=method), 2, [], server, {})


class Side:
    """One side of the comparison: a server with two workers, whose updates are always the same."""

    def __init__(self, method: str, shards: int, threads: int, layout: Layout, directory: Path) -> None:
        self.threads, self.memory = threads, SharedMemory.create(layout.size, 2)
        build, spec = (gradient_main if method == "Adam" else local_sgd_main).build, specification(method, shards)
        parameters = torch.zeros(layout.size)
        if shards > 1:
            parameters = shared_copy(parameters)
            self.rule, _ = build_sharded(build, spec, layout, parameters, self.memory.slot, directory)
        else:
            self.rule, _ = build(spec, layout, parameters)
        self.server = ParameterServer(parameters, self.rule)
        for worker in range(2):
            self.memory.slot(worker).normal_(std=1e-3)

    def seconds(self, updates: int) -> float:
        """Returns the seconds of an update, as a mean over updates from both workers in turn."""
        set_threads(self.threads)
        begun = time.perf_counter()
        for number in range(updates):
            worker = number % 2
            sequence = self.server.sequences.get(worker, -1) + 1
            self.server.push(Update(worker, sequence, self.server.version, 1.0, self.memory.slot(worker)))
        return (time.perf_counter() - begun) / updates

    def close(self) -> None:
        close_shards(self.rule)
        self.memory.close()


@contextmanager
def sides(method: str, layout: Layout, cores: int) -> Iterator[dict[str, Side]]:
    """Makes all sides at once, and closes them at the end of the block."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        made = {}
        for name, (shards, threads) in compared(cores).items():
            made[name] = Side(method, shards, threads, layout, Path(directory))
            stack.callback(made[name].close)
        yield made


def main(
    parameters: Annotated[float, typer.Option(help="Of the model.")] = 25e6,
    rounds: Annotated[int, typer.Option(min=1, help="Of each side, in turn.")] = 15,
    updates: Annotated[int, typer.Option(min=2, help="In a round.")] = 8,
    cores: Annotated[int, typer.Option(min=2, max=16, help="The most that a server may use.")] = 2,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare the sides; exit code 1 if two cores do not give 1.6 times the updates of one."""
    report = Report(f"A server in shards: {parameters / 1e6:g} million parameters in {TENSORS} tensors, {cores} cores")
    layout = Layout.of([(f"t{number}", torch.empty(int(parameters) // TENSORS)) for number in range(TENSORS)])
    for method in ("Adam", "delayed_nesterov"):
        with sides(method, layout, cores) as made:
            for side in made.values():
                side.seconds(updates)  # the first steps make the optimizer's state
            taken = [{name: side.seconds(updates) for name, side in made.items()} for _ in range(rounds)]
        rate = {name: 1 / median(each[name] for each in taken) for name in compared(cores)}
        alone = rate[ALONE]
        rows = [{"server": name, "updates/s": each, "of one core": each / alone} for name, each in rate.items()]
        report.table(method, rows)
        of_two = max(rate[name] for name in compared(2))
        report.bound(f"{method}: the better of two, over one core", of_two / alone, BOUND, at_least=True)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
