"""Measures the loss with each codec and the bytes that it sends: real gradients under the simulator's virtual clock.

Runs five experiments of recipes/paper, each with several seeds: codecs under local SGD on C4, with and without
momentum; AdaComp and DQ-SGD on the gradients of C4 and of Multi30k; gs-SGD beside top-k of the same bytes. Bytes are
those of the payloads, headers included. Results of runs are kept, and these are not run again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer
from matplotlib import pyplot
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fairseq_async import protocol  # noqa: E402
from fairseq_async.errors import ConfigurationError, fail  # noqa: E402
from fairseq_async.method.spec import JsonObject  # noqa: E402
from fairseq_async.protocol import Receipt, Status  # noqa: E402
from fairseq_async.simulation import experiment as experiments  # noqa: E402
from fairseq_async.simulation.experiment import Experiment, ScheduleOptions  # noqa: E402
from fairseq_async.simulation.problems import problem as problems  # noqa: E402
from fairseq_async.simulation.schedule import LearningRate  # noqa: E402
from fairseq_async.simulation.trial import Trial  # noqa: E402
from fairseq_async.simulation.workers import SharedModel  # noqa: E402
from fairseq_async.worker.shards import ShardOrder, shard_sizes  # noqa: E402
from recipes.rules import gs_sgd as gs_sgd  # noqa: E402  # registers itself
from recipes.steps import run_main  # noqa: E402
from scripts.bench.kept import Kept  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

LOCAL_SGD, OUTER_SGD, GRADIENTS, MULTI30K, SKETCH = (
    "compression_c4",
    "compression_c4_sgd",
    "compression_gradients",
    "compression_multi30k",
    "compression_sketch",
)
TITLES = {
    LOCAL_SGD: "C4 tiny, local SGD",
    OUTER_SGD: "C4 tiny, local SGD with outer SGD",
    GRADIENTS: "C4 tiny, hybrid",
    MULTI30K: "Multi30k, hybrid",
    SKETCH: "C4 tiny, four synchronous workers",
}
MOST_PERPLEXITY = {"int8": 1.01, "e3m0": 1.01, "topk": 1.03}  # over fp32's, under local SGD
MOST_BYTES = {MULTI30K: 1 / 30, GRADIENTS: 1 / 20}  # of fp32, by AdaComp
REFERENCE = "fp32"


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        seconds: virtual seconds.
        parameters: number of the model's parameters.
        sent: bytes of each applied update, in order.
    """

    loss: float
    seconds: float
    parameters: int
    sent: list[int]

    @property
    def share(self) -> float:
        """Bytes sent, as a share of those of fp32."""
        return fmean(self.sent) / (4 * self.parameters)

    @property
    def bits(self) -> list[int]:
        """Bits per value of each update; headers are less than half a bit."""
        return [round(8 * sent / self.parameters) for sent in self.sent]


class Bench:
    """Runs methods of experiments; keeps results and pretrained parameters in ``out``, and reads them from there."""

    def __init__(self, out: Path) -> None:
        self.out, self._done = out, Kept(out / "done.jsonl", Outcome)

    def outcome(self, experiment: Experiment, number: int, seed: int) -> Outcome:
        """Returns the result of a method, given by its number in the experiment."""
        key = f"{experiment.path.stem}; {experiment.methods[number].name}; seed {seed}"
        if key not in self._done:
            self._done.keep(key, found := self._run(experiment, number, seed))
            print(f"{key}: {math.exp(found.loss):.5g}, 1/{1 / found.share:.1f}", file=sys.stderr, flush=True)
        return self._done[key]

    def _run(self, given: Experiment, number: int, seed: int) -> Outcome:
        (cluster,) = given.clusters.values()
        problem = problems.build(given.head.problem, given.path.resolve().parent, seed, torch.device("cpu"))
        model = SharedModel(problem, given.head.batch_size, ShardOrder([problem.samples], seed), seed)
        start = self._start(given, seed, model)
        model.order = ShardOrder(shard_sizes(problem.samples, cluster.workers), seed)
        sent = list[int]()

        def write(time: float, receipt: Receipt, report: protocol.Report, extra: JsonObject) -> None:
            if receipt.status is Status.APPLIED:
                sent.append(report.bytes_sent or 0)

        seeded = replace(given, head=given.head.model_copy(update={"seed": seed}))
        trial = Trial(seeded, given.methods[number], cluster, model, start, write)
        while trial.advance():
            pass
        return Outcome(trial.evaluate(), trial.clock.now, model.layout.size, sent)

    def _start(self, given: Experiment, seed: int, model: SharedModel) -> Tensor:
        """Returns the parameters with which all methods of an experiment begin."""
        path, wanted, options = self.out / f"{given.path.stem}-{seed}.pt", given.pretraining, given.optimizer
        if path.exists():
            start: Tensor = torch.load(path, weights_only=True)
            return start
        if wanted is not None:
            schedule = ScheduleOptions(warmup=given.schedule.warmup)
            model.pretrain(options, LearningRate(schedule, wanted.lr or options.lr, wanted.steps), wanted.steps)
        torch.save(model.flat.clone(), path)
        return model.flat.clone()


def row(name: str, found: Sequence[Outcome], reference: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the row of one method, which is compared with fp32 seed by seed."""
    perplexities = [math.exp(each.loss) for each in found]
    ratios = [math.exp(each.loss - other.loss) for each, other in zip(found, reference, strict=True)]
    error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    tenth = max(1, len(found[0].sent) // 10)
    return {
        "method": name,
        "perplexities": ", ".join(f"{each:.2f}" for each in perplexities),
        "over fp32": fmean(ratios),
        "standard error": error,
        "times fewer bytes": 1 / fmean(each.share for each in found),
        "in the first tenth": 1 / fmean(replace(each, sent=each.sent[:tenth]).share for each in found),
        "in the last tenth": 1 / fmean(replace(each, sent=each.sent[-tenth:]).share for each in found),
        "updates": len(found[0].sent),
    }


def draw_bits(found: Sequence[Outcome], path: Path) -> None:
    """Draws the bits per value over the run, one line per seed, as means over twenty updates."""
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    for seed, outcome in enumerate(found, start=1):
        means = [fmean(outcome.bits[at : at + 20]) for at in range(0, len(outcome.bits), 20)]
        axes.plot(range(10, 10 + 20 * len(means), 20), means, label=f"seed {seed}")
    axes.set(xlabel="gradients", ylabel="bits a value", ylim=(0, 8.5), title="DQ-SGD, C4 tiny from scratch")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def check(report: Report, stem: str, rows: Sequence[dict[str, Any]]) -> None:
    """Checks the bounds of an experiment."""
    for each in rows:
        name = each["method"]
        if stem == LOCAL_SGD and name in MOST_PERPLEXITY:
            report.bound(f"{TITLES[stem]}, {name}: perplexity over fp32", each["over fp32"], MOST_PERPLEXITY[name])
        if stem in MOST_BYTES and name == "adacomp":
            report.bound(f"{TITLES[stem]}, {name}: bytes of fp32", 1 / each["times fewer bytes"], MOST_BYTES[stem])


def main(
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    only: Annotated[str, typer.Option(help="Experiments, with commas between them.")] = ",".join(TITLES),
    out: Annotated[Path, typer.Option(help="What was run, to go on from.")] = Path("runs/compression_learning"),
    picture: Annotated[Path | None, typer.Option(help="For DQ-SGD's bits.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="For what is printed.")] = None,
) -> None:
    """Print what each method comes to, beside fp32."""
    torch.set_num_threads(1)
    report, bench, numbers = Report("Codecs: loss and bytes"), Bench(out), range(1, seeds + 1)
    try:
        given = [experiments.read(ROOT / "recipes" / "paper" / f"{stem}.yaml") for stem in only.split(",")]
        for seed in numbers:  # all of one seed before the next
            for experiment in given:
                for number in range(len(experiment.methods)):
                    bench.outcome(experiment, number, seed)
    except ConfigurationError as error:
        fail(error)
    for experiment in given:
        found = {
            method.name: [bench.outcome(experiment, number, seed) for seed in numbers]
            for number, method in enumerate(experiment.methods)
        }
        stem = experiment.path.stem
        rows = [row(name, own, found[REFERENCE]) for name, own in found.items()]
        report.table(TITLES[stem], rows)
        check(report, stem, rows)
        if stem == GRADIENTS and picture is not None:
            draw_bits(found["dqsgd"], picture)
    report.end(json_file)


if __name__ == "__main__":
    run_main(main)
