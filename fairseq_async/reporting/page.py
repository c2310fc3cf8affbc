"""``fairseq-async report``: one HTML page that needs no network, and its pictures as PNG files."""

import base64
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib import pyplot
from matplotlib.figure import Figure

from fairseq_async.errors import ConfigurationError
from fairseq_async.reporting.plots import figures
from fairseq_async.reporting.runs import COMPUTING, Run
from fairseq_async.server.parameter_server import Status

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
figure { margin: 2rem 0; break-inside: avoid } img { max-width: 100%; height: auto }
figcaption { font-weight: 600; margin-bottom: .4rem }
"""


def write(runs: Sequence[Run], title: str, out: Path) -> Path:
    """Writes ``report.html`` and a PNG for each picture into a directory; returns the page's path.

    Raises:
        ConfigurationError: the directory cannot be written to.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", _table([row(run) for run in runs])]
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


def _figures(runs: Sequence[Run]) -> Iterator[tuple[str, tuple[str, Figure]]]:
    """File name, caption and figure, for each group of runs."""
    for group in dict.fromkeys(run.group for run in runs):
        for name, (caption, figure) in figures([run for run in runs if run.group == group]).items():
            yield (f"{group}-{name}", (f"{caption}: {group}", figure)) if group else (name, (caption, figure))


def _table(rows: Sequence[dict[str, str | int]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(v))}</td>" for v in r.values()) + "</tr>" for r in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def row(run: Run) -> dict[str, str | int]:
    """The table's cells for one run, by column."""
    _, losses = run.losses("updates")
    seconds, tokens = run.events[-1].time, sum(event.target_tokens for event in run.applied)
    refused = sum(event.status is Status.REFUSED for event in run.events)
    return {
        "run": _name(run),
        "workers": run.workers,
        "last loss": f"{losses[-1]:.4f}" if losses else "-",
        "updates": f"{max(event.version_after for event in run.events):,}",
        "tokens": f"{tokens:,.0f}",
        "seconds": f"{seconds:,.1f}",
        "tokens/s": f"{tokens / seconds:,.0f}" if seconds else "-",
        "updates in a step": f"{fmean(run.step_sizes):.2f}" if run.step_sizes else "-",
        "mean staleness": _mean(event.staleness for event in run.applied),
        "computing": f"{fmean(run.shares(w)[COMPUTING] for w in range(run.workers)):.0%}",
        "MB sent": _megabytes(event.bytes_sent for event in run.events),
        "MB received": _megabytes(event.bytes_received for event in run.events),
        "refused": refused,
    }


def worker_row(run: Run, worker: int) -> dict[str, str | int]:
    """The cells of one worker of a run, by column: means over its applied updates."""
    applied = [event for event in run.applied if event.worker == worker]
    norms = [event.residual_norm for event in applied if event.residual_norm is not None]
    return {
        "run": _name(run),
        "worker": worker,
        "updates": len(applied),
        "staleness": _mean(event.staleness for event in applied),
        "versions ahead at its start": _mean(event.look_ahead or 0.0 for event in applied),
        "seconds held for others": _mean(event.held_seconds or 0.0 for event in applied),
        "longest": f"{max((event.held_seconds or 0.0 for event in applied), default=0.0):.2f}",
        "computing": f"{run.shares(worker)[COMPUTING]:.0%}",
        "kB in an update": _mean((event.bytes_sent or 0) / 1e3 for event in applied),
        "residual": f"{norms[-1]:.3g}" if norms else "-",
    }


def _megabytes(sizes: Iterable[int | None]) -> str:
    """Their sum; a log of version 0.1 does not have them."""
    known = [size for size in sizes if size is not None]
    return f"{sum(known) / 1e6:,.2f}" if known else "-"


def _name(run: Run) -> str:
    return f"{run.name}, {run.group}" if run.group else run.name


def _mean(values: Iterable[float]) -> str:
    known = list(values)
    return f"{fmean(known):.2f}" if known else "-"
