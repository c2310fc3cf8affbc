"""Draws the README's first picture, docs/images/loss_by_time.png, from logs of simulated runs that are kept.

Four workers take 1, 1, 2 and 4 seconds for a gradient. The curves are means of three seeds, each method at the best
learning rate of a grid. The logs have the synchronous run once for all clusters, with the seconds of another; here a
step takes as long as the slowest worker.
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt  # noqa: E402

ROOT = Path(__file__).parents[1]
RESULTS, PICTURE = ROOT / "docs" / "results", ROOT / "docs" / "images" / "loss_by_time.png"
CLUSTER, SLOWEST, EVALUATE_EVERY = "1, 1, 2, 4", 4.0, 20
CURVES = (  # label, file, method, learning rate, color
    (
        "synchronous: all wait for the slowest",
        "hybrid_steps_translation.jsonl",
        "4; synchronous",
        0.004,
        "tab:gray",
    ),
    (
        "the paper's hybrid, 4 gradients a step",
        "own_rates_translation.jsonl",
        f"{CLUSTER}; hybrid, N = 4",
        0.002,
        "tab:orange",
    ),
    ("the default of hybrid_async", "hybrid_steps_translation_longer.jsonl", f"{CLUSTER}; both", 0.004, "tab:blue"),
)
Curve = list[tuple[float, float]]  # seconds, validation loss in nats


def mean_curve(file: str, method: str, rate: float) -> Curve:
    """Returns the mean over the seeds of a method's curve."""
    losses: dict[int, list[float]] = defaultdict(list)
    seconds: dict[int, list[float]] = defaultdict(list)
    for line in (RESULTS / file).read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if run["key"].startswith(f"{method}; seed") and run["key"].endswith(f"; lr {rate:g}"):
            for number, (time, loss) in enumerate(run["outcome"]["curve"]):
                losses[number].append(loss)
                seconds[number].append((number + 1) * EVALUATE_EVERY * SLOWEST if "synchronous" in method else time)
    return [(fmean(seconds[number]), fmean(losses[number])) for number in losses]


def draw(picture: Path) -> None:
    """Draws all curves into a file."""
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    for label, file, method, rate, color in CURVES:
        axes.plot(*zip(*mean_curve(file, method, rate), strict=True), label=label, color=color, linewidth=2)
    axes.set(
        xlabel="seconds (simulated): four workers of 1, 1, 2 and 4 s a gradient", ylabel="validation loss", yscale="log"
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=120, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(PICTURE)
