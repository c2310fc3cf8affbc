"""Checks that with a barrier, asynchronous workers take the steps of fairseq's own synchronous run.

Trains each case twice from the same initialisation on the same batches, with real processes: by fairseq's data
parallelism (legacy_ddp over Gloo, or one plain process), and with hybrid_async. Dropout is on, and gradients are
clipped. Compares every tensor of the two checkpoints.

The two sides add the same gradients in another order, so their last bits differ; with smooth functions this grows to
1e-6 in 20 updates. The model's activation is therefore GELU: for an input so near to 0, a ReLU would turn a difference
of the last bit into a jump.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.steps import run_main  # noqa: E402
from recipes.training import Method, Training  # noqa: E402
from recipes.translation import load_checkpoint  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

RELATIVE = 1e-6
SGD = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}
ADAM = {"optimizer": "adam", "adam-betas": "(0.9, 0.98)", "lr": 2e-3}
ADAFACTOR = {"optimizer": "adafactor", "lr": 2e-3}
# The softmax ignores a constant that is added to all keys: the gradient of a key's bias is rounding noise, and Adam and
# Adafactor divide noise by its own size.
NOISE = ".k_proj.bias"
MODEL = {
    "arch": "transformer",
    "share-all-embeddings": True,
    **{f"{side}-layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}-embed-dim": 64 for side in ("encoder", "decoder")},
    **{f"{side}-ffn-embed-dim": 128 for side in ("encoder", "decoder")},
    **{f"{side}-attention-heads": 4 for side in ("encoder", "decoder")},
}


@dataclass(frozen=True)
class Case:
    """One comparison; `exact` asks for equal bits instead of a difference of at most `bound`."""

    name: str
    workers: int
    inner: Mapping[str, object]
    exact: bool = False
    bound: float = RELATIVE


CASES = (
    Case("SGD, k = 2", 2, SGD),
    Case("SGD, k = 3", 3, SGD),
    Case("SGD, k = 4", 4, SGD),
    Case("Adam, k = 2", 2, ADAM),
    # Adafactor divides each tensor's gradient by its root mean square, and with it the rounding of a small gradient
    Case("Adafactor, k = 2", 2, ADAFACTOR, bound=1e-5),
    Case("Adam, k = 1, N = 1", 1, ADAM, exact=True),
)


@dataclass(frozen=True)
class Job(Training):
    """A run of one of the two sides of a case."""

    case: Case

    def optimizer(self) -> dict[str, object]:
        """Returns the flags of the case's optimizer, alone or in hybrid_async, which has a barrier unless `exact`."""
        if self.method is not Method.HYBRID:
            return dict(self.case.inner)
        method = {"optimizer": "hybrid_async", "inner-optimizer": self.case.inner["optimizer"]}
        count = {"updates-per-step": self.workers} | ({} if self.case.exact else {"barrier": True})
        return dict(self.case.inner) | method | count


def checkpoints(
    case: Case, method: Method, binary: Path, out: Path, given: Mapping[str, object]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Trains; returns the model in the middle and at the end of the run."""
    settings = {
        **MODEL,
        **given,
        "dropout": 0.1,
        "criterion": "label_smoothed_cross_entropy",
        "label-smoothing": 0.1,
        "clip-norm": 1.0,
        "disable-validation": True,
        "log-interval": 1,
        "num-workers": 0,
        "seed": 1,
    }
    save_dir = out / f"{case.inner['optimizer']}-{case.workers}-{method.value}"
    jobs.run(Job(binary, save_dir, method, case.workers, 512, settings, case))
    middle = next(save_dir.glob(f"checkpoint_*_{given['save-interval-updates']}.pt"))
    return parameters(middle), parameters(save_dir / "checkpoint_last.pt")


def parameters(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns a checkpoint's model without the buffers that mark its format."""
    model = load_checkpoint(checkpoint)["model"]
    return {name: tensor for name, tensor in model.items() if not name.endswith((".version", "._float_tensor"))}


def relative(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Returns |ours - theirs| / |theirs| of each tensor, in L2 norms; 0 for equal tensors."""
    assert ours.keys() == theirs.keys()
    pairs = {name: (ours[name].double(), theirs[name].double()) for name in ours}
    return {n: 0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm()) for n, (a, b) in pairs.items()}


def compare(case: Case, binary: Path, out: Path, given: Mapping[str, object]) -> dict[str, Any]:
    """Returns the worst tensor of a case, and for scale how far parameters moved from the run's middle to its end."""
    reference = Method.SINGLE if case.workers == 1 else Method.SYNC
    middle, theirs = checkpoints(case, reference, binary, out, given)
    _, ours = checkpoints(case, Method.HYBRID, binary, out, given)
    ignored = {name for name in theirs if name.endswith(NOISE) and case.inner is not SGD and not case.exact}
    differences = relative(ours, theirs)
    errors = {name: error for name, error in differences.items() if name not in ignored}
    worst = max(errors, key=lambda name: errors[name])
    moved = sorted(relative(middle, theirs).values())
    return {
        "case": case.name,
        "against": "fairseq-train, one process" if case.workers == 1 else f"legacy_ddp over Gloo, {case.workers} ranks",
        "tensors": len(errors),
        "excepted": len(ignored),
        "bit for bit": sum(error == 0.0 for error in errors.values()),
        "largest difference": errors[worst],
        "in": worst if errors[worst] else "",
        "of the excepted": max((differences[name] for name in ignored), default=None),
        "moved (median)": moved[len(moved) // 2],
    }


def main(
    data: Annotated[Path | None, typer.Option(help="Binarised data set; by default a made-up pair is used.")] = None,
    out: Annotated[Path, typer.Option(help="For corpus, checkpoints and logs.")] = Path("runs/bench"),
    updates: Annotated[int, typer.Option(min=2, help="Updates of each run.")] = 20,
    activation_fn: Annotated[str, typer.Option(help="fairseq's flag for both sides.")] = "gelu",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare hybrid_async with --barrier against fairseq's synchronous run; exit code 1 if they differ."""
    report = Report(f"Exactness: parameters after {updates} updates, relative L2 difference of each tensor")
    jobs.claim(out)
    binary = jobs.corpus(data, out)
    given = {"max-update": updates, "save-interval-updates": updates // 2, "activation-fn": activation_fn}
    rows = [compare(case, binary, out / "exactness", given) for case in CASES]
    report.table("hybrid_async against fairseq", rows)
    for case, row in zip(CASES, rows, strict=True):
        report.bound(case.name, row["largest difference"], 0.0 if case.exact else case.bound)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
