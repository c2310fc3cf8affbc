"""Compares a server's update with the time that its bytes need at the bandwidth of a copy, on one core.

An update is admission (the norm), the rule with the optimizer's step, and the publication of the parameters. A copy
reads and writes 8 bytes a parameter in fp32. Copies and updates alternate in the same rounds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.algorithms import Rule, Update  # noqa: E402
from fairseq_async.algorithms.threads import copy_in_threads, set_threads  # noqa: E402
from fairseq_async.exchange import SharedMemory, copy  # noqa: E402
from fairseq_async.method.methods import outer_rule  # noqa: E402
from fairseq_async.method.spec import hybrid_spec, local_sgd_spec  # noqa: E402
from fairseq_async.options.config import HybridOptions, ServerOptions  # noqa: E402
from fairseq_async.protocol import Layout  # noqa: E402
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, ParameterGroup  # noqa: E402
from fairseq_async.server.parameter_server import ParameterServer  # noqa: E402
from fairseq_async.server.programs import gradient_main, local_sgd_main  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

TENSORS = 24
NORM, PUBLICATION = 4, 8  # bytes a parameter: read; read and write
PASSES: dict[
    str, tuple[int, float | None]
] = {  # bytes a parameter of the rule, and how many times the bytes' time an update may take
    # the gradient's copy 8; the step reads gradient, parameter and two moments, and writes the last three: 28
    "Adam": (8 + 28, 1.15),
    "AdamW": (8 + 28, 1.15),
    "SGD": (8 + 12, 1.15),
    "outer sgd": (12, 1.3),  # reads update and parameter, writes the parameter
    # the step reads gradient, parameter and one momentum, and writes the last two; its time is that of the
    # Newton-Schulz iterations, 30 operations a parameter for each row of a square matrix, which have no bound here
    "MuonAdamW": (8 + 20, None),
}
GRADIENT_RULES = ("Adam", "AdamW", "SGD", "MuonAdamW")


def pushing(name: str, layout: Layout, memory: SharedMemory) -> tuple[Callable[[], None], Rule]:
    """Return a function that lets a server with this rule or optimizer take one update and publish; and the rule."""
    parameters = torch.zeros(layout.size)
    if name in GRADIENT_RULES:
        groups = [ParameterGroup(list(range(TENSORS)), {"lr": 1e-3})]
        framework = OptimizerSpec(name, groups, fused=name != "MuonAdamW").to_json()
        spec = hybrid_spec(HybridOptions(updates_per_step=1), 1, ServerOptions(), framework, 0)
        rule, _ = gradient_main.build(spec, layout, parameters)
    else:
        outer = name.removeprefix("outer ")
        spec = local_sgd_spec(outer_rule(outer).options(outer=outer), 1, [], ServerOptions(), {})
        rule, _ = local_sgd_main.build(spec, layout, parameters)
    server = ParameterServer(parameters, rule)

    def push() -> None:
        server.push(Update(0, server.sequences.get(0, -1) + 1, server.version, 1.0, memory.slot(0)))
        memory.publish(server.parameters, server.version)

    return push, rule


def state_size(state: object) -> int:
    """Return the bytes of all tensors in a rule's state."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(state_size, inner))


def milliseconds(function: Callable[[], None]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - begun)


def measure(name: str, layout: Layout, rounds: int, cores: int) -> dict[str, Any]:
    """Return the medians of a copy and of an update, and what the update's bytes need at the copy's bandwidth."""
    memory = SharedMemory.create(layout.size, 1)
    try:
        memory.slot(0).normal_(std=1e-3)
        (push, rule), target = pushing(name, layout, memory), torch.empty(layout.size)
        times = []
        for number in range(rounds + 3):  # the first ones make the state
            set_threads(1)
            copied = milliseconds(lambda: copy(target, memory.slot(0)))
            begun = time.process_time()
            pushed = milliseconds(push)
            busy = 1000 * (time.process_time() - begun)
            set_threads(cores)
            together = milliseconds(lambda: copy_in_threads(target, memory.slot(0), copy))
            times += [(copied, pushed, busy, together, milliseconds(push))] * (number >= 3)
    finally:
        set_threads(1)
        memory.close()
    copied, pushed, busy, together, shared = (median(column) for column in zip(*times, strict=True))
    moved = NORM + PASSES[name][0] + PUBLICATION
    needed = moved / 8 * copied
    return {
        "server": name,
        "bytes a parameter": moved,
        "bytes of state a parameter": round(state_size(rule.state_dict()) / layout.size, 1),
        "copy ms": copied,
        "bytes ms": needed,
        "update ms": pushed,
        "of the core, ms": busy,
        "of the bytes": pushed / needed,
        f"{cores} cores, of one": pushed / shared,
        "of a copy": copied / together,
    }


def main(
    parameters: Annotated[float, typer.Option(help="Of the model.")] = 25e6,
    rounds: Annotated[int, typer.Option(min=1, help="Of a copy and an update in turn.")] = 21,
    cores: Annotated[int, typer.Option(min=2, max=16, help="For the last column.")] = 2,
    servers: Annotated[str, typer.Option(help="With commas between them.")] = "Adam,AdamW,SGD,outer sgd",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure each server; exit code 1 if an update takes longer than its bytes allow."""
    torch.set_num_threads(1)
    report = Report(f"A server's update beside copies: {parameters / 1e6:g} million parameters, one core")
    side = math.isqrt(int(parameters) // TENSORS)
    layout = Layout.of([(f"t{number}", torch.empty(side, side)) for number in range(TENSORS)])
    rows = [measure(name, layout, rounds, cores) for name in servers.split(",")]
    report.table("median of the rounds", rows)
    for row in rows:
        if (bound := PASSES[row["server"]][1]) is not None:
            report.bound(f"{row['server']}: an update, over its bytes' time", row["of the bytes"], bound)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
