"""Draws the README's first picture, docs/images/loss_by_time.png, from logs of simulated runs that are kept.

Two workers take 1 and 4 seconds for a gradient. The curves are means of three seeds, each method at the best learning
rate of a grid, with as many gradients.
"""

import json
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt  # noqa: E402

ROOT = Path(__file__).parents[1]
RESULTS, PICTURE = ROOT / "docs" / "results", ROOT / "docs" / "images" / "loss_by_time.png"
LOG = RESULTS / "two_workers.jsonl"
CURVES = (  # label, method, learning rate, color
    ("synchronous: all wait for the slow worker", "2; synchronous", 0.002, "tab:gray"),
    ("the paper's hybrid, 2 gradients a step", "1, 4; hybrid, N = 2", 0.001, "tab:orange"),
    ("the default of hybrid_async", "1, 4; the default", 0.002, "tab:blue"),
)
Curve = list[tuple[float, float]]  # seconds, validation loss in nats


def mean_curve(method: str, rate: float) -> Curve:
    """Returns the mean over the seeds of a method's curve."""
    runs = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    start, end = f"{method}; seed", f"; lr {rate:g}"
    curves = [run["outcome"]["curve"] for run in runs if run["key"].startswith(start) and run["key"].endswith(end)]
    return [
        (fmean(time for time, _ in points), fmean(loss for _, loss in points)) for points in zip(*curves, strict=True)
    ]


def draw(picture: Path) -> None:
    """Draws all curves into a file."""
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    for label, method, rate, color in CURVES:
        axes.plot(*zip(*mean_curve(method, rate), strict=True), label=label, color=color, linewidth=2)
    axes.set(xlabel="seconds (simulated): two workers of 1 and 4 s a gradient", ylabel="validation loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=120, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(PICTURE)
