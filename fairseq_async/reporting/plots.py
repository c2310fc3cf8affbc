"""The pictures of a report. Okabe and Ito's colours, which colour-blind people tell apart; dashes serve in print."""

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from fairseq_async.reporting.runs import AWAY, COMPUTING, WAITING, Run  # noqa: E402

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
STATES = {COMPUTING: ("#0072B2", ""), WAITING: ("#E4E4E4", ""), AWAY: ("#FFFFFF", "////")}
_BARS = 40  # rounds of the busiest worker in a timeline
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 150,
    "savefig.dpi": 150,
}


def styles(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A colour and a dash for each run; both together do not come again before 35 runs."""
    colours = cycle(COLOURS)
    return [{"color": next(colours), "linestyle": DASHES[i // len(COLOURS) % len(DASHES)]} for i in range(len(runs))]


def figures(runs: Sequence[Run]) -> dict[str, tuple[str, Figure]]:
    """File name: caption and figure; only what the runs have something for."""
    with pyplot.rc_context(_STYLE):
        found = {
            "loss": ("Loss by update, by token and by time", loss(runs)),
            "staleness": ("Staleness: share of the updates", staleness(runs)),
            "time": ("How workers spent their time", spent(runs)),
            "timelines": ("The beginning, worker by worker", timelines(runs)),
        }
        for name, caption in {
            "norm": "L2 norm of the updates, running mean",
            "cosine": "Cosine of the updates with the server's momentum, running mean",
            "gain": "AdaScale's gain",
        }.items():
            if any(event.get(name) is not None for run in runs for event in run.applied):
                found[name] = (caption, over_updates(runs, name))
        if any(len({e.get("local_steps") for e in run.applied}) > 1 for run in runs):
            found["local_steps"] = ("Local steps of each round, by worker", local_steps(runs))
        return found


def loss(runs: Sequence[Run]) -> Figure:
    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3.4), layout="constrained", sharey=True)
    for axes, by, label in zip(panels, ("updates", "tokens", "time"), ("updates", "tokens", "seconds"), strict=True):
        for run, style in zip(runs, styles(runs), strict=True):
            axes.plot(*run.losses(by), label=run.name, linewidth=1.3, **style)
        axes.set_xlabel(label)
    panels[0].set_ylabel(" / ".join(sorted({run.measured for run in runs})))
    _legend(figure, panels[0])
    return figure


def staleness(runs: Sequence[Run]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    width = 0.8 / len(runs)
    for index, (run, style) in enumerate(zip(runs, styles(runs), strict=True)):
        counts = Counter(event["staleness"] for event in run.applied)
        whole = max(1, sum(counts.values()))
        at = [value + (index - (len(runs) - 1) / 2) * width for value in sorted(counts)]
        shares = [counts[value] / whole for value in sorted(counts)]
        axes.bar(
            at, shares, width, color=style["color"], label=run.name, hatch="//" if style["linestyle"] != "-" else ""
        )
    axes.set(xlabel="versions between pull and arrival", ylabel="share of the updates")
    _legend(figure, axes)
    return figure


def spent(runs: Sequence[Run]) -> Figure:
    """A bar for each worker of each run: the whole of its time."""
    labels = [(run, worker) for run in runs for worker in range(run.workers)]
    figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.18 * len(labels)), layout="constrained")
    for row, (run, worker) in enumerate(labels):
        left = 0.0
        for what, share in run.shares(worker).items():
            _bar(axes, row, left, share, what)
            left += share
    names = [f"{run.name}: {worker}" if worker == 0 else str(worker) for run, worker in labels]
    axes.set_yticks(range(len(labels)), names, fontsize=7)
    axes.set(xlabel="share of the run's time", xlim=(0, 1))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    _states(figure)
    return figure


def timelines(runs: Sequence[Run]) -> Figure:
    heights = [0.4 + 0.25 * run.workers for run in runs]
    figure, grid = pyplot.subplots(
        len(runs), 1, figsize=(9, 0.9 + sum(heights)), layout="constrained", squeeze=False, height_ratios=heights
    )
    for run, (axes,) in zip(runs, grid, strict=True):
        end = _window(run)
        for stretch in run.stretches:
            if stretch.begin < end:
                _bar(axes, stretch.worker, stretch.begin, min(stretch.end, end) - stretch.begin, stretch.what)
        axes.set_yticks(range(run.workers))
        axes.set_title(run.name, fontsize=8, loc="left", pad=2)
        axes.set_xlim(0, end)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    grid[-1, 0].set_xlabel("seconds")
    _states(figure)
    return figure


def over_updates(runs: Sequence[Run], name: str) -> Figure:
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for run, style in zip(runs, styles(runs), strict=True):
        known = [(event["version_after"], event[name]) for event in run.applied if event.get(name) is not None]
        width = max(1, len(known) // 50)
        means = [sum(v for _, v in known[max(0, i - width + 1) : i + 1]) / min(width, i + 1) for i in range(len(known))]
        if known:
            axes.plot([version for version, _ in known], means, label=run.name, linewidth=1.2, **style)
    axes.set(xlabel="updates", ylabel=name)
    _legend(figure, axes)
    return figure


def local_steps(runs: Sequence[Run]) -> Figure:
    changing = [run for run in runs if len({event.get("local_steps") for event in run.applied}) > 1]
    figure, grid = pyplot.subplots(
        len(changing), 1, figsize=(7, 0.4 + 1.8 * len(changing)), layout="constrained", squeeze=False
    )
    for run, (axes,) in zip(changing, grid, strict=True):
        for worker in range(run.workers):
            own = [(e["time"], e["local_steps"]) for e in run.applied if e["worker"] == worker]
            colour, dash = COLOURS[worker % len(COLOURS)], DASHES[worker // len(COLOURS) % len(DASHES)]
            axes.step(*zip(*own, strict=True), where="pre", label=f"worker {worker}", color=colour, linestyle=dash)
        axes.set_title(run.name, fontsize=8, loc="left", pad=2)
        axes.set_ylabel("local steps")
    grid[-1, 0].set_xlabel("seconds")
    _legend(figure, grid[0, 0])
    return figure


def _window(run: Run) -> float:
    """A time in which the busiest worker has at most so many rounds that they can be told apart."""
    busiest = max(Counter(event["worker"] for event in run.events).values())
    last = run.events[-1]["time"]
    return float(last if busiest <= _BARS else last * _BARS / busiest) or 1.0


def _bar(axes: Axes, row: int, begin: float, width: float, what: str) -> None:
    colour, hatch = STATES[what]
    edge = "#999999" if hatch else "white"
    axes.barh(row, width, left=begin, height=0.72, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.3)


def _states(figure: Figure) -> None:
    patches = [Patch(facecolor=c, hatch=h, edgecolor="#999999", label=what) for what, (c, h) in STATES.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
