"""Draws docs/images/faults.gif and faults.png: a run in which a worker and then the server is killed.

``python scripts/faults_picture.py`` draws them from docs/results/faults_picture.jsonl, the log of a real run.
``--record`` makes such a run first: three workers on this machine, SIGKILL for worker 1, and later for the server.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.animation import FuncAnimation, PillowWriter  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

ROOT = Path(__file__).parents[1]
LOG, IMAGES = ROOT / "docs" / "results" / "faults_picture.jsonl", ROOT / "docs" / "images"
WORKERS, FRAMES, COLORS = 3, 60, ("tab:blue", "tab:orange", "tab:green")
SCRIPT = """
import time, torch
from fairseq_async.torch import HybridAsync
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with HybridAsync(model, optimizer, total_steps=450, snapshot_seconds=1.0, run_dir="run") as worker:
    torch.manual_seed(worker.worker)
    while not worker.finished:
        inputs = torch.randn(32, 8)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).sin())
        loss.backward()
        worker.loss = loss.item()
        time.sleep(0.1)
        optimizer.step()
"""


def record() -> None:
    """Makes a run and kills two of its processes; writes what is drawn to the log."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder, "run", "events.jsonl")
        Path(folder, "train.py").write_text(SCRIPT)
        line = [sys.executable, "-m", "fairseq_async", "launch", "--workers", str(WORKERS), "--", sys.executable]
        job = subprocess.Popen([*line, "train.py"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        killed = []
        for what, updates in (("worker 1", 250), ("server", 700)):
            while job.poll() is None and (not events.exists() or len(events.read_text().splitlines()) < updates):
                time.sleep(0.1)
            os.kill(_find(folder, what), signal.SIGKILL)
            killed.append({"time": time.time(), "killed": what})
        if job.wait(180):
            sys.exit(f"the run ended with code {job.returncode}")
        seen = [json.loads(each) for each in events.read_text().splitlines()]
    kept = [{name: each[name] for name in ("time", "worker", "version_after")} for each in seen if "worker" in each]
    lines = sorted([*kept, *killed], key=lambda each: float(each["time"]))
    begin = lines[0]["time"]
    LOG.write_text("".join(json.dumps(each | {"time": round(each["time"] - begin, 3)}) + "\n" for each in lines))


def _find(folder: str, what: str) -> int:
    """Returns the process in this folder that is the server, or worker 1."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{entry}/cwd") != folder:
                continue
            words = Path(f"/proc/{entry}/cmdline").read_text().split("\0")
            environment = Path(f"/proc/{entry}/environ").read_text().split("\0")
        except OSError:
            continue
        is_worker = "train.py" in words and "launch" not in words and "FAIRSEQ_ASYNC_WORKER=1" in environment
        if is_worker if what == "worker 1" else "--listener" in words:
            return int(entry)
    sys.exit(f"no process is the {what}")


def _draw(axes: Axes, lines: list[dict[str, Any]], until: float) -> None:
    """Draws what has happened until then."""
    axes.clear()
    past = [each for each in lines if each["time"] <= until]
    for worker in range(WORKERS):
        own = [each for each in past if each.get("worker") == worker]
        axes.scatter([each["time"] for each in own], [worker] * len(own), marker="|", s=160, color=COLORS[worker])
    for each in past:
        if "killed" in each:
            row = WORKERS if each["killed"] == "server" else 1
            axes.scatter(each["time"], row, marker="x", s=120, color="black", zorder=3, linewidth=2.5)
            axes.annotate("killed", (each["time"], row), (0, 10), textcoords="offset points", ha="center", fontsize=8)
    version = max((each["version_after"] for each in past if "worker" in each), default=0)
    axes.set(xlim=(-0.5, lines[-1]["time"] + 0.5), ylim=(-0.6, WORKERS + 0.8), xlabel="seconds")
    axes.set_yticks(range(WORKERS + 1), [*(f"worker {number}" for number in range(WORKERS)), "server"])
    axes.set_title(f"{until:4.1f} s: step {version}", loc="left", fontsize=10)


def draw(log: Path, images: Path) -> None:
    """Draws the moving picture and its last frame."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    end = lines[-1]["time"]
    figure, axes = plt.subplots(figsize=(7.2, 2.4), layout="constrained")
    times = [end * (number + 1) / FRAMES for number in range(FRAMES)]
    moving = FuncAnimation(figure, lambda time: _draw(axes, lines, time), frames=[*times, *[end] * 15])
    moving.save(str(images / "faults.gif"), PillowWriter(fps=6), dpi=90)
    _draw(axes, lines, end)
    figure.savefig(images / "faults.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    if "--record" in sys.argv[1:]:
        record()
    draw(LOG, IMAGES)
