"""The report: one HTML page that needs no network, and the same pictures as PNG files."""

import base64
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import pyplot
from matplotlib.figure import Figure

from fairseq_async.errors import ConfigurationError
from fairseq_async.reporting.plots import figures
from fairseq_async.reporting.runs import COMPUTING, Run, tokens_of

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
    parts = [f"<h1>{html.escape(title)}</h1>", table(runs)]
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
    """Those of each group of runs, by file name."""
    for group in dict.fromkeys(run.group for run in runs):
        for name, (caption, figure) in figures([run for run in runs if run.group == group]).items():
            yield (f"{group}-{name}", (f"{caption}: {group}", figure)) if group else (name, (caption, figure))


def table(runs: Sequence[Run]) -> str:
    """The runs side by side, in HTML."""
    rows = [row(run) for run in runs]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(v))}</td>" for v in r.values()) + "</tr>" for r in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def row(run: Run) -> dict[str, Any]:
    """One run in figures."""
    _, losses = run.losses("updates")
    seconds, tokens = run.events[-1]["time"], sum(map(tokens_of, run.applied))
    refused = sum(event["status"] == "refused" for event in run.events)
    return {
        "run": f"{run.name}, {run.group}" if run.group else run.name,
        "workers": run.workers,
        "last loss": f"{losses[-1]:.4f}" if losses else "-",
        "updates": f"{max(event['version_after'] for event in run.events):,}",
        "tokens": f"{tokens:,.0f}",
        "seconds": f"{seconds:,.1f}",
        "tokens/s": f"{tokens / seconds:,.0f}" if seconds else "-",
        "mean staleness": f"{fmean(e['staleness'] for e in run.applied):.2f}" if run.applied else "-",
        "computing": f"{fmean(run.shares(w)[COMPUTING] for w in range(run.workers)):.0%}",
        "refused": refused,
    }
