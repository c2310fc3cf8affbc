"""Draws hybrid.png: what three workers and the server do, synchronous, with steps of three gradients, with steps that
close when nobody is near, and with shares by speed.

A schematic, not a measurement: batches take the times that are written here.
"""

from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from fairseq_async.server.rounds.near_arrivals import NearArrivals  # noqa: E402
from fairseq_async.server.rounds.shares import Shares  # noqa: E402

SECONDS = (1.0, 1.2, 2.9)  # per batch, of each worker
PARTS = 4  # of a batch, where workers have shares
END = 12.5
EXCHANGE = 0.12  # between a worker's batches
PART_GAP = 0.02  # to see the parts
COMPUTE, WAIT, ARRIVE, STEP = "#0072B2", "#DDDDDD", "#56B4E9", "#D55E00"  # Okabe and Ito: safe for the colour-blind
HEIGHT = 0.56
WORKERS = len(SECONDS)
SERVER = WORKERS  # the row below the workers


def bar(axes: Axes, row: int, begin: float, end: float, wait: bool = False) -> None:
    """A stretch of a worker's time, cut off where the picture ends."""
    if begin < END:
        (patch,) = axes.barh(row, min(end, END) - begin, left=begin, height=HEIGHT, linewidth=0, color=COMPUTE)
        if wait:
            patch.set(facecolor=WAIT, edgecolor="#999999", hatch="////")


def synchronous(axes: Axes) -> int:
    """Every step waits for the slowest worker; returns how many steps there are."""
    begin, steps = 0.0, 0
    while begin < END:
        end = begin + max(SECONDS)
        for worker, seconds in enumerate(SECONDS):
            bar(axes, worker, begin, begin + seconds)
            if seconds < max(SECONDS):
                bar(axes, worker, begin + seconds, end, wait=True)
        if end < END:
            step(axes, end, 0)
            steps += 1
        begin = end + EXCHANGE
    return steps


def arrivals() -> Iterator[tuple[float, int]]:
    """When the hybrid's workers push, in the order of time."""
    times = [(n * (s + EXCHANGE) - EXCHANGE, w) for w, s in enumerate(SECONDS) for n in range(1, int(END))]
    yield from sorted(time for time in times if time[0] < END)


def hybrid(axes: Axes) -> int:
    """Nobody waits: the server steps at every third gradient, whoever sent it; returns how many steps there are."""
    for worker, seconds in enumerate(SECONDS):
        for n in range(int(END / seconds) + 1):
            begin = n * (seconds + EXCHANGE)
            bar(axes, worker, begin, begin + seconds)
    steps = 0
    for count, (time, worker) in enumerate(arrivals(), 1):
        axes.plot([time, time], [worker + HEIGHT / 2, SERVER], color=ARRIVE, linewidth=1.0, zorder=0)
        axes.plot(time, SERVER, marker="o", color=ARRIVE, markersize=5)
        if count % WORKERS == 0:
            step(axes, time, worker)
            steps += 1
    return steps


def closed_steps(axes: Axes) -> tuple[int, int]:
    """A step waits for who is about to come; returns how many steps there are, and how many gradients they have."""
    near, arrives = NearArrivals(grace_share=0.5), dict(enumerate(SECONDS))
    waiting: dict[int, float] = {}
    steps = gradients = 0
    for worker, seconds in arrives.items():
        near.begin_work(worker, 0.0)
        bar(axes, worker, 0.0, seconds)
    while (time := min([*arrives.values(), *([near.deadline] if waiting and near.deadline else [])])) < END:
        for worker in [worker for worker, at in arrives.items() if at == time]:
            waiting[worker] = arrives.pop(worker)
            near.continues(worker, (), time)
        if near.continues(None, arrives, time):
            continue
        steps, gradients = steps + 1, gradients + len(waiting)
        near.close()
        step(axes, time, max((worker for worker, since in waiting.items() if since == time), default=SERVER))
        for worker, since in waiting.items():
            if since < time:
                bar(axes, worker, since, time, wait=True)
                axes.plot([since, since], [worker + HEIGHT / 2, SERVER], color=ARRIVE, linewidth=1.0, zorder=0)
                axes.plot(since, SERVER, marker="o", color=ARRIVE, markersize=5)
            begin = time + EXCHANGE
            near.begin_work(worker, begin)
            arrives[worker] = begin + SECONDS[worker]
            bar(axes, worker, begin, arrives[worker])
        waiting = {}
    return steps, gradients


def shares_by_speed(axes: Axes) -> int:
    """Each worker has as many parts of the step's batches as it computes in the same time; returns how many steps."""
    shares = Shares(PARTS)
    for now in (0.0, 100.0, 200.0):  # measures
        for worker, seconds in enumerate(SECONDS):
            shares.begin(worker, now)
            shares.arrive(worker, now + seconds)
    shares.divide(range(WORKERS), WORKERS, 300.0)
    numbers = [shares.begin(worker, 300.0) for worker in range(WORKERS)]
    longest = max(number * seconds / PARTS for number, seconds in zip(numbers, SECONDS, strict=True))
    begin, steps = 0.0, 0
    while begin < END:
        for worker, (number, seconds) in enumerate(zip(numbers, SECONDS, strict=True)):
            for part in range(number):
                at = begin + part * seconds / PARTS
                bar(axes, worker, at, at + seconds / PARTS - PART_GAP)
            done = begin + number * seconds / PARTS
            if done < begin + longest:
                bar(axes, worker, done, begin + longest, wait=True)
        if begin + longest < END:
            step(axes, begin + longest, 0)
            steps += 1
        begin += longest + EXCHANGE
    return steps


def step(axes: Axes, time: float, worker: int) -> None:
    """The optimizer's step in the server."""
    axes.plot([time, time], [min(worker - HEIGHT / 2, SERVER), SERVER], color=STEP, linewidth=1.2, zorder=0)
    axes.plot(time, SERVER, marker="D", color=STEP, markersize=8, zorder=3)


def dress(axes: Axes, title: str, lowest: str) -> None:
    """Titles and rows."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_yticks(range(WORKERS + 1), ["worker 0", "worker 1", "worker 2 (slow)", lowest])
    axes.set_ylim(SERVER + 0.55, -0.6)
    axes.set_xlim(0, END)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    """Draw the picture beside this file."""
    figure, (above, middle, below, last) = pyplot.subplots(4, 1, figsize=(9, 9.4), layout="constrained")
    steps = synchronous(above)
    title = f"Synchronous: everybody waits for the slowest worker ({steps} steps, {steps * WORKERS} gradients)"
    dress(above, title, "optimizer")
    steps = hybrid(middle)
    gradients = sum(1 for _ in arrivals())
    title = f"--updates-per-step {WORKERS}: nobody waits, and gradients get old ({steps} steps, {gradients} gradients)"
    dress(middle, title, "server")
    steps, gradients = closed_steps(below)
    title = f"The default: a step waits for who is about to come ({steps} steps, {gradients} gradients)"
    dress(below, title, "server")
    steps = shares_by_speed(last)
    title = f"--shares auto: fast workers get more of each step ({steps} steps, batches of {steps * WORKERS} gradients)"
    dress(last, title, "server")
    last.set_xlabel("time \N{RIGHTWARDS ARROW}", loc="right")
    legend = [
        Patch(facecolor=COMPUTE, label="forward and backward"),
        Patch(facecolor=WAIT, hatch="////", edgecolor="#999999", label="waits"),
        Line2D([], [], color=ARRIVE, marker="o", label="gradient arrives, is summed"),
        Line2D([], [], color=STEP, marker="D", label="optimizer steps"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(Path(__file__).with_name("hybrid.png"), dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()
