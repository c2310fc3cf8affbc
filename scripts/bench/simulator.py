"""Measures the cost of a simulated step beside a plain one, and checks how well the clock predicts real workers.

The plain loop computes as many gradients of the same batches, and steps as often. For the prediction, a real run of one
worker gives the seconds of a step and of an exchange; from these the simulator predicts the tokens per second of two
workers, one of them four times slower; a real run of these two checks the prediction.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.reporting.capacity import measure  # noqa: E402
from fairseq_async.reporting.runs import load  # noqa: E402
from fairseq_async.simulation.experiment import Experiment, read  # noqa: E402
from fairseq_async.simulation.problems import problem as problems  # noqa: E402
from fairseq_async.simulation.schedule import make_optimizer  # noqa: E402
from fairseq_async.simulation.simulate import Simulator  # noqa: E402
from fairseq_async.simulation.trial import Trial  # noqa: E402
from fairseq_async.simulation.workers import SharedModel  # noqa: E402
from fairseq_async.worker.shards import ShardOrder, shard_sizes  # noqa: E402
from recipes.made_up_pair.run import SETTINGS  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from recipes.training import Method, Training  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

ABOVE, WITHIN = 1.05, 0.10
SLOW = 4
FLAGS = (
    "--arch transformer --share-all-embeddings --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 128 "
    "--decoder-embed-dim 128 --encoder-ffn-embed-dim 256 --decoder-ffn-embed-dim 256 --encoder-attention-heads 4 "
    "--decoder-attention-heads 4 --dropout 0.1 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 "
    "--max-tokens 1024"
)
SIMULATED = {
    "local SGD, H = 20": {"method": "local_sgd", "outer": "delayed_nesterov", "local_steps": 20},
    "hybrid": {"method": "hybrid_async"},
}


def experiment(directory: Path, **content: Any) -> Experiment:
    """Writes an experiment to a file and reads it, as a user would."""
    path = directory / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    return read(path)


def plain(given: Experiment, model: SharedModel, batches: int, accumulated: int) -> float:
    """Returns the processor time per batch of an ordinary loop that steps after every ``accumulated`` batches."""
    optimizer = make_optimizer(given.optimizer, model.parameters)
    began = time.process_time()
    for number in range(batches):
        loss, _ = model.problem.loss(model.problem.batch(model.order.indices(number % 2, number // 2, 1)))
        (loss / accumulated).backward()
        if (number + 1) % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return (time.process_time() - began) / batches


def overhead(binary: Path, directory: Path, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Times plain and simulated steps in turn."""
    rows = []
    for name, method in SIMULATED.items():
        content = {"problem": {"type": "fairseq_translation", "data": str(binary.resolve()), "flags": FLAGS}}
        settings = {"steps": steps, "batch_size": 1, "cluster": {"workers": 2}, "methods": {name: method}}
        given = experiment(directory, **content, **settings)
        problem = problems.build(given.head.problem, directory, 1, torch.device("cpu"))
        order = ShardOrder(shard_sizes(problem.samples, 2), 1)
        model = SharedModel(problem, 1, order, 1)
        start = model.flat.clone()
        ratios, last = [], (0.0, 0.0)
        for _ in range(rounds):
            model.live_in(model.flat)
            alone = plain(given, model, 2 * steps, 2 if name == "hybrid" else 1)
            trial = Trial(given, given.methods[0], given.clusters[""], model, start, lambda *_: None)
            began = time.process_time()
            while trial.advance():
                pass
            last = (alone, (time.process_time() - began) / trial.steps)
            ratios.append(last[1] / last[0])
        rows.append({"method": name, "plain s": last[0], "simulated s": last[1], "ratio": median(ratios)})
    return rows


def real(binary: Path, out: Path, slowdowns: list[int], seconds: float) -> Path:
    """Makes a run of the method async, in which no worker waits; returns its directory."""
    settings = SETTINGS | jobs.TIMED | {"stop-time-hours": seconds / 3600, "max-epoch": 0}
    job = Training(binary, out, Method.ASYNC, len(slowdowns), 1024, settings)
    jobs.run(job, ["--slowdown", ",".join(map(str, slowdowns))])
    return out


def steady(run_dir: Path, skip: float) -> float:
    """Returns the target tokens per second of a run, without its first ``skip`` seconds."""
    (run,) = load([run_dir])
    late = [event for event in run.applied if event.time > skip]
    return sum(event.target_tokens for event in late[1:]) / (late[-1].time - late[0].time)


def predict(directory: Path, alone: Path) -> float:
    """Predicts the tokens per second of two workers, one of them slower, by simulation from a run of one worker."""
    costs = measure(alone).costs
    tokens = fmean(event.target_tokens for event in load([alone])[0].applied)
    way = max(0.0, costs.exchange - costs.server) / 2  # the server writes its log after its answer
    exchange = {"seconds": way, "server_seconds": costs.server}
    cluster = {"workers": 2, "seconds_per_step": [costs.step, SLOW * costs.step], "exchange": exchange}
    methods = {"async": {"method": "hybrid_async", "updates_per_step": 1, "look_ahead": "off"}}
    given = experiment(directory, problem={"type": "gaussians"}, steps=500, cluster=cluster, methods=methods)
    (row,) = Simulator(given, directory / "predicted", resume=False).run()
    return row["updates"] / row["time"] * tokens


def main(
    out: Annotated[Path, typer.Option(help="For corpus, runs and logs.")] = Path("runs/bench"),
    steps: Annotated[int, typer.Option(min=1, help="Steps of each of two workers that are timed.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Plain and simulated in turn.")] = 5,
    seconds: Annotated[float, typer.Option(min=10, help="Of each real run.")] = 60,
    skip: Annotated[float, typer.Option(min=0, help="Of its beginning.")] = 10,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare simulated with plain steps and with real workers; exit code 1 if a bound is broken."""
    torch.set_num_threads(1)
    report = Report("Simulator: the demo's translation model")
    jobs.claim(out)
    binary = jobs.corpus(None, out)
    with TemporaryDirectory() as directory:
        rows = overhead(binary, Path(directory), steps, rounds)
        report.table("seconds of processor time a step, one thread", rows)
        for row in rows:
            report.bound(f"{row['method']}: simulated over plain", row["ratio"], ABOVE)
        alone = real(binary, out / "simulator" / "alone", [1], seconds)
        both = real(binary, out / "simulator" / "both", [1, SLOW], seconds)
        predicted, measured = predict(Path(directory), alone), steady(both, skip)
    report.table("target tokens a second, one of two workers four times slower", [
        {"predicted": predicted, "measured": measured, "ratio": predicted / measured}
    ])  # fmt: skip
    report.bound("error of the prediction", abs(predicted / measured - 1), WITHIN)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
