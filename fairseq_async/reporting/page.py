"""``fairseq-async report``: one HTML page that needs no network, and its pictures as PNG files."""

import base64
import html
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib import pyplot
from matplotlib.figure import Figure

from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol.receipt import Status
from fairseq_async.reporting.plots import figures, weight_name
from fairseq_async.reporting.runs import COMPUTING, LoadedRun

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
div { overflow-x: auto } th { white-space: nowrap }
figure { margin: 2rem 0; break-inside: avoid } img { max-width: 100%; height: auto }
figcaption { font-weight: 600; margin-bottom: .4rem }
"""


_COLUMNS = 6  # runs beside each other


def write(runs: Sequence[LoadedRun], title: str, out: Path) -> Path:
    """Writes ``report.html`` and a PNG for each picture into a directory; returns the page's path.

    Raises:
        ConfigurationError: the directory cannot be written to.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", _table(_overview(runs))]
    parts += ["<h2>Workers</h2>", _table([worker_row(run, w) for run in runs for w in range(run.workers)])]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, (caption, figure) in _figures(runs):
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
            pyplot.close(figure)
            (out / f"{name}.png").write_bytes(buffer.getvalue())
            encoded = base64.b64encode(buffer.getvalue()).decode()
            image = f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{encoded}">'
            parts.append(f"<figure><figcaption>{html.escape(caption)}</figcaption>{image}</figure>")
        page = out / "report.html"
        head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        page.write_text(f"{head}<style>{_STYLE}</style>\n" + "\n".join(parts) + "</html>\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--out {out} cannot be written to: {error.strerror}") from error
    return page


def _overview(runs: Sequence[LoadedRun]) -> list[dict[str, str | int]]:
    """Returns the overview's rows: a column per run if the runs are few with different names, else a row per run."""
    rows = [row(run) for run in runs]
    few = len(rows) <= _COLUMNS and len({each["run"] for each in rows}) == len(rows)
    return _upright(rows) if few else rows


def _figures(runs: Sequence[LoadedRun]) -> Iterator[tuple[str, tuple[str, Figure]]]:
    """Yields file name, caption and figure, for each figure of each group of runs."""
    files = _file_names(list(dict.fromkeys(run.group for run in runs)))
    for group, file in files.items():
        for name, (caption, figure) in figures([run for run in runs if run.group == group]).items():
            yield (f"{file}-{name}", (f"{caption}: {group}", figure)) if group else (name, (caption, figure))


def _file_names(groups: Sequence[str]) -> dict[str, str]:
    """Returns the beginnings of the groups' file names: their own names where these may be file names."""
    plain = [re.sub(r"[^\w.+-]", "_", group) for group in groups]
    return {
        group: f"{name}-{number}" if plain.count(name) > 1 else name
        for number, (group, name) in enumerate(zip(groups, plain, strict=True), 1)
    }


def _table(rows: Sequence[dict[str, str | int]]) -> str:
    names = _names(rows)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    cells = [[html.escape(str(each.get(name, "-"))) for name in names] for each in rows]
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in own) + "</tr>" for own in cells)
    return f"<div><table><tr>{head}</tr>{body}</table></div>"


def _names(rows: Sequence[dict[str, str | int]]) -> list[str]:
    """Returns the names that any of the rows has, in order: a run without a validation has fewer values."""
    longest = max(rows, key=len)
    return list(dict.fromkeys([*longest, *(name for each in rows for name in each)]))


def _upright(rows: Sequence[dict[str, str | int]]) -> list[dict[str, str | int]]:
    """Turns rows into columns, one for each run: a run has more values than a laptop's screen has room for in a row."""
    return [_column(name, rows) for name in _names(rows) if name != "run"]


def _column(name: str, rows: Sequence[dict[str, str | int]]) -> dict[str, str | int]:
    column: dict[str, str | int] = {"": name}
    return column | {str(each["run"]): each.get(name, "-") for each in rows}


def row(run: LoadedRun) -> dict[str, str | int]:
    """Returns the table's cells for one run, by column."""
    _, losses = run.losses("updates")
    seconds = run.events[-1].time
    refused = sum(event.status is Status.REFUSED for event in run.events)
    return {
        "run": _name(run),
        "workers": run.workers,
        f"last {run.measured}": f"{losses[-1]:.4f}" if losses else "-",
        **_validated(run),
        "steps of the server": f"{run.steps:,}",
        "time (s)": f"{seconds:,.1f}",
        **_counted(run, seconds),
        "updates in a step": f"{fmean(run.step_sizes):.2f}" if run.step_sizes else "-",
        "mean staleness (versions)": _mean(event.staleness for event in run.applied),
        "sent by workers (MB)": _megabytes(event.bytes_sent for event in run.events),
        "received by workers (MB)": _megabytes(event.bytes_received for event in run.events),
        **_compressed(run, None),
        "time computing": f"{fmean(run.shares(w)[COMPUTING] for w in range(run.workers)):.0%}",
        "refused updates": refused,
    }


def _counted(run: LoadedRun, seconds: float) -> dict[str, str | int]:
    """Returns the cells of what the updates' weights count; none where that has no name."""
    if not run.unit:
        return {}
    count, name = sum(event.target_tokens for event in run.applied), weight_name(run.unit)
    return {name: f"{count:,.0f}", f"{name}/s": f"{count / seconds:,.0f}" if seconds else "-"}


def _validated(run: LoadedRun) -> dict[str, str | int]:
    """Returns the cells of the last validation's loss and score; none if no validation is recorded."""
    if not run.validations:
        return {}
    last = run.validations[-1]
    cells: dict[str, str | int] = {"last validation loss": "-" if last.loss is None else f"{last.loss:.4f}"}
    if last.metric and last.score is not None:
        cells[f"last {last.metric}"] = f"{last.score:.2f}"
    return cells


def worker_row(run: LoadedRun, worker: int) -> dict[str, str | int]:
    """Returns the cells of one worker of a run, by column: means over its applied updates."""
    applied = [event for event in run.applied if event.worker == worker]
    last, ranks = (applied[-1].micro_batches, applied[-1].ranks) if applied else (None, None)
    return {
        "run": _name(run),
        "worker": worker,
        **({} if ranks is None else {"ranks": ranks}),
        "updates": len(applied),
        "staleness (versions)": _mean(event.staleness for event in applied),
        "ahead at its start (versions)": _mean(event.look_ahead or 0.0 for event in applied),
        "held for others, mean (s)": _mean(event.held_seconds or 0.0 for event in applied),
        "longest (s)": f"{max((event.held_seconds or 0.0 for event in applied), default=0.0):.2f}",
        "time computing": f"{run.shares(worker)[COMPUTING]:.0%}",
        "in an update (kB)": _mean((event.bytes_sent or 0) / 1e3 for event in applied),
        **({} if last is None else {"micro-batches, last": last}),
        **_compressed(run, worker),
    }


def _compressed(run: LoadedRun, worker: int | None) -> dict[str, str | int]:
    """Returns the cells about compressed updates; none for a run without them."""
    compressed = run.compressed(worker)
    if compressed is None:
        return {}
    names = ("sent (kB/s)", "times fewer bytes than fp32", "residual (L2 norm)")
    return dict(zip(names, compressed.cells(run.events[-1].time), strict=True))


def _megabytes(sizes: Iterable[int | None]) -> str:
    """Returns the sum in megabytes, or "-" if no size is known: a log of version 0.1 has none."""
    known = [size for size in sizes if size is not None]
    return f"{sum(known) / 1e6:,.2f}" if known else "-"


def _name(run: LoadedRun) -> str:
    return f"{run.name}, {run.group}" if run.group else run.name


def _mean(values: Iterable[float]) -> str:
    known = list(values)
    return f"{fmean(known):.2f}" if known else "-"
