"""``fairseq-async demo``: what a slow worker costs a synchronous run, and what it costs without waiting."""

import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fairseq_async.errors import AsyncError, ConfigurationError, why_not_written

_RUNS = ("synchronous", "asynchronous")
_LARGEST, _LEAST = (72, 14), (35, 3)  # width and height of the picture in the terminal, in characters
_ROUND_IT = (8, 4)  # what the terminal has besides
_MEAN = 15  # updates over which a loss is averaged
_Curve = list[tuple[float, float]]  # seconds since the first update, loss in nats
app = typer.Typer()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the runs and the picture.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(metavar="N", min=2, help="Steps of each run.")] = 150,
) -> None:
    """Train a small model twice in a minute, synchronously and not; one of two workers is four times slower."""
    from rich.live import Live  # start-up time

    from fairseq_async.launch.progress.display import plain_console

    if find_spec("matplotlib") is None:  # before a minute of training
        raise ConfigurationError("matplotlib, which draws the picture, is not here: pip install matplotlib")
    try:
        for name in _RUNS:
            (out / name).mkdir(parents=True, exist_ok=True)
            (out / name / "events.jsonl").unlink(missing_ok=True)  # of an earlier call
    except OSError as error:
        raise ConfigurationError(f"--out {out}: cannot be written: {why_not_written(error, out)}") from error
    curves: dict[str, _Curve] = {}
    console = plain_console()
    with Live(console=console, auto_refresh=False) as live:
        for name in _RUNS:
            for _ in _run(name, out / name, steps):
                curves[name] = _read(out / name)
                live.update(_picture(curves, *console.size), refresh=True)
    if not console.is_terminal:
        print()  # rich ends the picture's last line on a terminal alone
    _draw(curves, out / "demo.png")
    seconds = {name: curve[-1][0] for name, curve in curves.items()}
    last = curves["synchronous"][-1][1]
    print(
        f"The same number of batches took {seconds['synchronous']:.0f} s synchronously, where the fast worker waits "
        f"for the slow one, and {seconds['asynchronous']:.0f} s asynchronously; the synchronous run's last loss, "
        f"{last:.2f}, was there after {_reached(curves['asynchronous'], last)}.\n"
        f"The picture is {out / 'demo.png'}. Next: fairseq-async report {out / _RUNS[0]} {out / _RUNS[1]}, and "
        f"{Path(__file__).with_name('demo_training.py')} is the training, a loop of PyTorch with one with block."
    )


def _run(name: str, run_dir: Path, steps: int) -> Iterator[None]:
    """Trains with two workers; yields twice a second meanwhile, and at the end.

    Raises:
        AsyncError: it failed, or could write nothing; says why.
    """
    training = [sys.executable, "-m", "fairseq_async.cli.demo_training", str(run_dir), str(steps), name]
    launch = [sys.executable, "-m", "fairseq_async", "launch", "--workers", "2", "--slowdown", "1,4", "--"]
    log = run_dir.with_suffix(".log")
    with log.open("w") as output, subprocess.Popen([*launch, *training], stdout=output, stderr=output) as process:
        try:
            while process.poll() is None:
                yield
                time.sleep(0.5)
        finally:
            process.terminate()  # where the demo is interrupted: the launcher ends its workers
            process.wait()  # which the end of the block does not after Ctrl-C
    if process.returncode:
        from fairseq_async.launch.error_lines import last_words  # start-up time

        raise AsyncError(f"the {name} run has failed: {last_words(log)}; its log is {log}")
    if not _read(run_dir):
        raise AsyncError(f"the {name} run has left no losses in {run_dir}: make room there, or give another --out")
    yield


def _read(run_dir: Path) -> _Curve:
    """Returns the loss of a run over time, averaged over the last updates."""
    from fairseq_async.records.events import read_events  # start-up time

    events = [event for event in read_events(run_dir / "events.jsonl") if event.loss is not None]
    losses = [event.loss or 0.0 for event in events]
    means = [sum(losses[max(0, n - _MEAN) : n]) / min(n, _MEAN) for n in range(1, len(losses) + 1)]
    return [(event.time - events[0].time, mean) for event, mean in zip(events, means, strict=True)]


def _reached(curve: _Curve, loss: float) -> str:
    after = next((seconds for seconds, each in curve if each <= loss), None)
    return "none of it" if after is None else f"{after:.0f} s"


def _picture(curves: dict[str, _Curve], columns: int = 80, lines: int = 24) -> str:
    """Returns the curves in characters, for a terminal of this size: s is the synchronous run, a the other."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return "starting two workers, of which one is four times slower …"
    longest, highest = max(1.0, *(x for x, _ in points)), max(y for _, y in points)
    lowest = min(y for _, y in points)
    room = (size - other for size, other in zip((columns, lines), _ROUND_IT, strict=True))
    width, height = (max(least, min(most, free)) for least, most, free in zip(_LEAST, _LARGEST, room, strict=True))
    rows = [[" "] * width for _ in range(height)]
    for name, curve in curves.items():
        for x, y in curve:
            row = round((highest - y) / max(highest - lowest, 1e-9) * (height - 1))
            rows[row][round(x / longest * (width - 1))] = name[0]
    heights = [f"{highest:5.2f}", *["     "] * (height - 2), f"{lowest:5.2f}"]
    drawn = [f"{label} |{''.join(row)}" for label, row in zip(heights, rows, strict=True)]
    below = f"0{'s synchronous, a asynchronous':^{width - 7}}{longest:4.0f} s"
    return "\n".join([*drawn, f"loss  +{'-' * width}", f"       {below}"])


def _draw(curves: dict[str, _Curve], path: Path) -> None:
    import matplotlib  # start-up time

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name)
    axes.set(xlabel="seconds", ylabel="loss (nats per byte)", title="Two workers, one of them four times slower")
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise AsyncError(f"--out: {path} cannot be written: {why_not_written(error, path.parent)}") from error
