"""The demo: makes a made-up language pair, trains on it with asynchronous workers, prints BLEU, draws the curve."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import matplotlib
import typer
from sacrebleu.metrics import BLEU

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes import training, translation  # noqa: E402
from recipes.made_up_pair.make_corpus import PAIR, make_corpus  # noqa: E402
from recipes.steps import once, run_main  # noqa: E402
from recipes.training import Method, Training  # noqa: E402

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

PIECES = 800
AVERAGE = 3
SETTINGS = {
    "arch": "transformer",
    "share-all-embeddings": True,
    **{f"{side}-layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}-embed-dim": 128 for side in ("encoder", "decoder")},
    **{f"{side}-ffn-embed-dim": 256 for side in ("encoder", "decoder")},
    **{f"{side}-attention-heads": 4 for side in ("encoder", "decoder")},
    "dropout": 0.1,
    "criterion": "label_smoothed_cross_entropy",
    "label-smoothing": 0.1,
    "adam-betas": "(0.9, 0.98)",
    "lr": 4e-3,
    "lr-scheduler": "inverse_sqrt",
    "warmup-updates": 300,
    "clip-norm": 1.0,
    "max-epoch": 14,
    "keep-last-epochs": AVERAGE,
    "num-workers": 0,
    "seed": 1,
}


def draw(run: Training, png: Path) -> None:
    """Draw the losses against applied updates, as worker 0 has logged them."""
    inner = [(int(s["num_updates"]), float(s["loss"])) for s in training.statistics(run.log, "train_inner")]
    valid = [(int(s["valid_num_updates"]), float(s["valid_loss"])) for s in training.statistics(run.log, "valid")]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*inner, strict=True), label="train")
    axes.plot(*zip(*valid, strict=True), marker="o", label="valid")
    axes.set(xlabel="applied updates", ylabel="loss (bits per token, smoothed labels)")
    axes.set_title(f"Made-up pair, {run.method.value}, {run.workers} workers")
    axes.legend()
    figure.savefig(png, dpi=150)


def main(
    out: Annotated[Path, typer.Option(help="For all files; reuses what is there.")] = Path("runs/made_up_pair"),
    method: Annotated[Method, typer.Option(help="How to train.")] = Method.HYBRID,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compute gradients.")] = 2,
) -> None:
    """Train a small Transformer on a made-up language pair and print its BLEU on held-out sentences."""
    print("corpus, pieces, training, translation: a few minutes on two cores, of which training says what is left")
    text = once(out / "text", make_corpus)
    pieces = translation.encode(text, PAIR, translation.learn_pieces(text, PAIR, PIECES, out), out)
    binary = translation.binarise(pieces, PAIR, out)
    run = Training(binary, out / method.value, method, workers, 1024, SETTINGS)
    print(f"training for {SETTINGS['max-epoch']} epochs with {workers} workers; log: {run.log}", flush=True)
    training.train(run)
    print("translating the test set", flush=True)
    checkpoint = translation.average_checkpoints(run.save_dir, AVERAGE)
    translations = translation.translate(binary, checkpoint, "sentencepiece")
    score = translation.bleu(translations, translation.lines(text / f"test.{PAIR[1]}"), BLEU())
    curve = run.save_dir / "curve.png"
    draw(run, curve)
    print(f"BLEU        {score.bleu:.2f}  {score.signature}\ncurve       {curve}")
    if run.events.exists():
        print(f"events      {run.events}")
    print(f"checkpoint  {checkpoint}")


if __name__ == "__main__":
    run_main(main)
