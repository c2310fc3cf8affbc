"""The pictures of a report.

The colours are those of Okabe and Ito, which colour-blind people can tell apart; dashes do so in black and white print.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported, which would look for a display
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import EngFormatter, MaxNLocator  # noqa: E402

from fairseq_async.records.events import Event  # noqa: E402
from fairseq_async.records.validations import Validation  # noqa: E402
from fairseq_async.reporting.runs import AWAY, COMPUTING, WAITING, Axis, LoadedRun, running_mean  # noqa: E402

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
Dashes: TypeAlias = str | tuple[int, tuple[int, ...]]
DASHES: tuple[Dashes, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
ACTIVITIES = {COMPUTING: ("#0072B2", ""), WAITING: ("#E4E4E4", ""), AWAY: ("#FFFFFF", "////")}
_BARS = 40  # updates of the busiest worker in a timeline


@dataclass(frozen=True)
class Style:
    """A run's colour and dashes."""

    colour: str
    dashes: Dashes


def styles(count: int) -> list[Style]:
    """Returns a style for each of ``count`` runs or workers; the first 35 differ."""
    return [Style(COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]) for i in range(count)]


def figures(runs: Sequence[LoadedRun]) -> dict[str, tuple[str, Figure]]:
    """Returns caption and figure by file name, for the figures for which the runs have data."""
    with _rc_params():
        found = {
            "loss": ("Loss by update, by token and by time", loss(runs)),
            "staleness": ("Staleness: share of the updates", staleness(runs)),
            "time": ("How workers spent their time", spent(runs)),
            "timelines": ("The beginning, worker by worker", timelines(runs)),
        }
        for name, (caption, values) in _validated(runs).items():
            found[name] = (caption, validations(runs, name, values))
        for name, (caption, value) in _OVER_UPDATES.items():
            if any(value(event) is not None for run in runs for event in run.applied):
                found[name] = (caption, over_updates(runs, name, value))
        if any(len(set(run.step_sizes)) > 1 for run in runs):
            found["step_sizes"] = ("Updates in a step: share of the steps", step_sizes(runs))
        for name, caption in _WORK.items():
            if changing := [run for run in runs if len({getattr(event, name) for event in run.applied}) > 1]:
                found[name] = (f"{caption}, by worker", work(changing, name))
        return found


def _rc_params() -> AbstractContextManager[None]:
    return pyplot.rc_context(
        {
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
    )


_WORK = {"local_steps": "Local steps of each round", "micro_batches": "Micro-batches of each gradient"}
_OVER_UPDATES: dict[str, tuple[str, Callable[[Event], float | None]]] = {
    "norm": ("L2 norm of the updates, running mean", lambda event: event.norm),
    "cosine": ("Cosine of the updates with the server's momentum, running mean", lambda event: event.cosine),
    "gain": ("AdaScale's gain", lambda event: event.gain),
}


def weight_name(unit: str) -> str:
    """Returns the name of what weights count, by :attr:`LoadedRun.unit`."""
    return "target tokens" if unit == "tokens" else unit or "weight of the updates"


def loss(runs: Sequence[LoadedRun]) -> Figure:
    """The loss curves of all runs, by update, by the updates' weights (tokens in fairseq) and by time."""
    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3.4), layout="constrained", sharey=True)
    axes_and_labels: tuple[tuple[Axis, str], ...] = (
        ("updates", "steps of the server"),
        ("tokens", " / ".join(sorted({weight_name(run.unit) for run in runs}))),
        ("time", "time (s)"),
    )
    for axes, (by, label) in zip(panels, axes_and_labels, strict=True):
        for run, style in zip(runs, styles(len(runs)), strict=True):
            axes.plot(*run.losses(by), label=run.name, linewidth=1.3, color=style.colour, linestyle=style.dashes)
        axes.set_xlabel(label)
        _short_numbers(axes)
    panels[0].set_ylabel(" / ".join(sorted({run.measured for run in runs})))
    _legend(figure, panels[0])
    return figure


def _validated(runs: Sequence[LoadedRun]) -> dict[str, tuple[str, Callable[[Validation], float | None]]]:
    """Returns caption and value by file name for worker 0's validations: the loss, and the first metric named."""
    known = [validation for run in runs for validation in run.validations]
    found: dict[str, tuple[str, Callable[[Validation], float | None]]] = {}
    if any(each.loss is not None for each in known):
        found["validation_loss"] = ("Validation loss of the server's parameters", lambda each: each.loss)
    metric = next((each.metric for each in known if each.metric), None)
    if metric is not None:
        found[metric] = (f"Validation: {metric}", lambda each: each.score if each.metric == metric else None)
    return found


def validations(runs: Sequence[LoadedRun], name: str, value: Callable[[Validation], float | None]) -> Figure:
    """One value of each run's validations, over the number of updates before each."""
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for run, style in zip(runs, styles(len(runs)), strict=True):
        known = [(each.updates, found) for each in run.validations if (found := value(each)) is not None]
        if known:
            updates, values = zip(*known, strict=True)
            axes.plot(updates, values, ".", label=run.name, color=style.colour, linestyle=style.dashes)
    axes.set(xlabel="updates", ylabel=name.replace("_", " "))
    _short_numbers(axes)
    _legend(figure, axes)
    return figure


def staleness(runs: Sequence[LoadedRun]) -> Figure:
    """A histogram of the staleness of each run's applied updates."""
    values = [[event.staleness for event in run.applied] for run in runs]
    return _histogram(runs, values, "versions between pull and arrival", "share of the updates")


def step_sizes(runs: Sequence[LoadedRun]) -> Figure:
    """A histogram of the number of updates in each run's steps."""
    return _histogram(runs, [run.step_sizes for run in runs], "updates in a step", "share of the steps")


def _histogram(runs: Sequence[LoadedRun], values: Sequence[Sequence[int]], xlabel: str, ylabel: str) -> Figure:
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    width = 0.8 / len(runs)
    for index, (run, own, style) in enumerate(zip(runs, values, styles(len(runs)), strict=True)):
        counts = Counter(own)
        whole = max(1, sum(counts.values()))
        at = [value + (index - (len(runs) - 1) / 2) * width for value in sorted(counts)]
        shares = [counts[value] / whole for value in sorted(counts)]
        axes.bar(at, shares, width, color=style.colour, label=run.name, hatch="//" if style.dashes != "-" else "")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    _legend(figure, axes)
    return figure


def spent(runs: Sequence[LoadedRun]) -> Figure:
    """A bar for each worker of each run: the fractions of its time by activity."""
    labels = [(run, worker) for run in runs for worker in range(run.workers)]
    figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.18 * len(labels)), layout="constrained")
    for row, (run, worker) in enumerate(labels):
        left = 0.0
        for kind, share in run.shares(worker).items():
            _bar(axes, row, left, share, kind)
            left += share
    names = [f"{run.name}: {worker}" if worker == 0 else str(worker) for run, worker in labels]
    axes.set_yticks(range(len(labels)), names, fontsize=7)
    axes.set(xlabel="share of the run's time", xlim=(0, 1))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    _activity_legend(figure)
    return figure


def timelines(runs: Sequence[LoadedRun]) -> Figure:
    """The activities of every worker at the beginning of each run."""
    heights = [0.4 + 0.25 * run.workers for run in runs]
    figure, grid = pyplot.subplots(
        len(runs), 1, figsize=(9, 0.9 + sum(heights)), layout="constrained", squeeze=False, height_ratios=heights
    )
    for run, (axes,) in zip(runs, grid, strict=True):
        end = _window(run)
        for each in run.activities:
            if each.begin < end:
                _bar(axes, each.worker, each.begin, min(each.end, end) - each.begin, each.kind)
        axes.set_yticks(range(run.workers))
        axes.set_title(run.name, fontsize=8, loc="left", pad=2)
        axes.set_xlim(0, end)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    grid[-1, 0].set_xlabel("seconds")
    _activity_legend(figure)
    return figure


def over_updates(runs: Sequence[LoadedRun], name: str, value: Callable[[Event], float | None]) -> Figure:
    """A running mean of one value of the applied updates, for each run."""
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for run, style in zip(runs, styles(len(runs)), strict=True):
        known = [(at, found) for at, event in enumerate(run.applied, 1) if (found := value(event)) is not None]
        means = running_mean([found for _, found in known])
        if known:
            updates = [at for at, _ in known]
            axes.plot(updates, means, label=run.name, linewidth=1.2, color=style.colour, linestyle=style.dashes)
    axes.set(xlabel="updates", ylabel=name)
    _legend(figure, axes)
    return figure


def work(runs: Sequence[LoadedRun], name: str) -> Figure:
    """The work of each update by worker: the number of this name."""
    figure, grid = pyplot.subplots(
        len(runs), 1, figsize=(7, 0.4 + 1.8 * len(runs)), layout="constrained", squeeze=False
    )
    for run, (axes,) in zip(runs, grid, strict=True):
        for worker, style in enumerate(styles(run.workers)):
            own = [event for event in run.applied if event.worker == worker]
            times, steps = [event.time for event in own], [getattr(event, name) for event in own]
            axes.step(times, steps, where="pre", label=f"worker {worker}", color=style.colour, linestyle=style.dashes)
        axes.set_title(run.name, fontsize=8, loc="left", pad=2)
        axes.set_ylabel(name.replace("_", " "))
    grid[-1, 0].set_xlabel("seconds")
    _legend(figure, grid[0, 0])
    return figure


def _window(run: LoadedRun) -> float:
    """Returns the timeline's end: late enough for as many updates of the busiest worker as can be told apart."""
    busiest = max(Counter(event.worker for event in run.events).values())
    last = run.events[-1].time
    return float(last if busiest <= _BARS else last * _BARS / busiest) or 1.0


def _bar(axes: Axes, row: int, begin: float, width: float, kind: str) -> None:
    colour, hatch = ACTIVITIES[kind]
    edge = "#999999" if hatch else "white"
    axes.barh(row, width, left=begin, height=0.72, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.3)


def _activity_legend(figure: Figure) -> None:
    patches = [Patch(facecolor=c, hatch=h, edgecolor="#999999", label=kind) for kind, (c, h) in ACTIVITIES.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches))


def _short_numbers(axes: Axes) -> None:
    """Sets few ticks on the x axis, labelled as 1.2M in place of 1200000."""
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
