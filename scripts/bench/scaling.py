"""Simulates one server, whole and in shards, with 8 to 1,024 workers: updates, staleness and waiting.

There are two models, with steps of 0.3 s and 1 s. The server's times are those that ``sizing.py`` assumes.
Shards have a core each, and share the server's link.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
import typer

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.algorithms import HybridAccumulation, NesterovMomentum, Update  # noqa: E402
from fairseq_async.simulation.cluster import Cluster, Distribution  # noqa: E402
from fairseq_async.simulation.costs import Costs, NetworkLink  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.bench.server_queue import Exchanges, ServerQueue  # noqa: E402
from scripts.bench.sizing import assumed_costs  # noqa: E402

MODELS = {25_000_000: 0.3, 1_000_000_000: 1.0}  # parameters: seconds per step
SPREAD = 0.2
WORKERS = (8, 32, 128, 512, 1024)
SHARDS = (1, 8, 64)
LINKS = (0.1, 1.0, 10.0, 100.0)
LOCAL_STEPS = 128
METHODS = ("gradients", f"local SGD, H = {LOCAL_STEPS}")
COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")  # Okabe and Ito: safe for the colour-blind
STYLES = ("solid", "dashed", "dotted")


def server_times(parameters: int = 10_000_000, repeats: int = 7) -> list[dict[str, Any]]:
    """Measures a server's work per update on one core: least processor time, in nanoseconds per parameter."""
    flat, delta, published = (torch.randn(parameters) for _ in range(3))
    tensor = torch.nn.Parameter(flat)
    adam, outer = HybridAccumulation(torch.optim.Adam([tensor]), 1), NesterovMomentum(0.7, 0.9, 1)
    parts = {
        "Adam": lambda update: adam.apply(tensor.data, update),
        "Nesterov, the outer rule": lambda update: outer.apply(flat, update),
        "copy": lambda update: published.copy_(flat),
    }
    rows = []
    for name, part in parts.items():
        seconds = []
        for number in range(repeats):
            began = time.process_time()
            part(Update(0, number, number, 1.0, delta))
            seconds.append(time.process_time() - began)
        rows.append({"what": name, "ns a parameter": 1e9 * min(seconds) / parameters})
    return rows


def cases(size: int, method: str) -> Iterator[tuple[float, int, Costs]]:
    """Yields each link's rate and number of shards, with the costs there."""
    gradients, local_sgd = assumed_costs(size)
    for link in LINKS:
        for shards in SHARDS:
            whole = gradients if method == METHODS[0] else local_sgd
            yield link, shards, replace(whole, shards=shards).over(NetworkLink(link))


def simulate(size: int, method: str) -> list[dict[str, Any]]:
    """Simulates; returns a row for each link, number of shards and number of workers."""
    step = Distribution(distribution="lognormal", mean=MODELS[size], spread=SPREAD)
    exchanges = Exchanges(1 if method == METHODS[0] else LOCAL_STEPS)
    rows = []
    for link, shards, costs in cases(size, method):
        for workers in WORKERS:
            load = ServerQueue(Cluster(workers=workers, seconds_per_step=step), costs, exchanges).run()
            row = {"Gbit/s": link, "shards": shards, "workers": workers, "updates/s": load.updates_per_second}
            row |= {"steps/s": load.steps_per_second, "staleness": load.staleness, "95%": load.staleness_95}
            rows.append(row | {"waiting": load.waiting, "busiest": load.bottleneck})
    return rows


def draw(axes: Axes, rows: list[dict[str, Any]], step: float) -> None:
    """Draws the steps per second against the number of workers, beside those of workers that never wait."""
    axes.plot(WORKERS, [workers / step for workers in WORKERS], color="#BBBBBB", linewidth=4)
    for link, colour in zip(LINKS, COLOURS, strict=True):
        for shards, style in zip(SHARDS, STYLES, strict=True):
            own = [row for row in rows if (row["Gbit/s"], row["shards"]) == (link, shards)]
            axes.plot(WORKERS, [row["steps/s"] for row in own], color=colour, linestyle=style, marker=".")
    axes.set(xscale="log", yscale="log", xticks=WORKERS, xticklabels=[f"{each:,}" for each in WORKERS])
    axes.minorticks_off()


def picture(found: dict[tuple[int, str], list[dict[str, Any]]], path: Path) -> None:
    """Draws one panel for each model and method."""
    figure, panels = pyplot.subplots(len(MODELS), len(METHODS), figsize=(9, 7), sharex=True, layout="constrained")
    for row, (size, step) in zip(panels, MODELS.items(), strict=True):
        for axes, method in zip(row, METHODS, strict=True):
            draw(axes, found[size, method], step)
            axes.set_title(f"{size / 1e6:,.0f} million parameters, {method}", fontsize=10)
            axes.set(xlabel="workers", ylabel="steps a second")
    links = zip(LINKS, COLOURS, strict=True)
    lines = [Line2D([], [], color=colour, label=f"{link:g} Gbit/s") for link, colour in links]
    for shards, style in zip(SHARDS, STYLES, strict=True):
        lines += panels[0][0].plot([], [], color="black", linestyle=style, label=f"S = {shards}")
    lines.append(Line2D([], [], color="#BBBBBB", linewidth=4, label="no waiting"))
    figure.legend(handles=lines, loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=110)


def main(
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the same.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Simulate all, and print a table for each model and method."""
    torch.set_num_threads(1)
    report = Report(f"Scaling, simulated: steps of {SPREAD:.0%} spread, servers with the assumed times")
    report.table("the server's time, with the copy taken as 10 ns for gradients, 4 for local SGD", server_times())
    found = {(size, method): simulate(size, method) for size in MODELS for method in METHODS}
    for (size, method), rows in found.items():
        report.table(f"{size:,} parameters, {MODELS[size]:g} s a step, {method}", rows)
    if png is not None:
        picture(found, png)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
