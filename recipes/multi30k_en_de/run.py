"""Multi30k English-German: trains by one or several methods, scores each on test_2016_flickr, prints the scores."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from sacrebleu.metrics import BLEU

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.options.compression import parse  # noqa: E402
from recipes import training, translation  # noqa: E402
from recipes.multi30k_en_de.data import BPE_FILES, PAIR, RAW_FILES, corpus  # noqa: E402
from recipes.multi30k_en_de.presets import PRESETS, Preset, Size  # noqa: E402
from recipes.steps import RecipeError, run_main, write_whole  # noqa: E402
from recipes.training import Method, Training  # noqa: E402

DEFAULT_METHODS = [Method.HYBRID.value, Method.SYNC.value]


@dataclass(frozen=True)
class Data:
    """The binary data set, and what is needed to score a translation of its test set."""

    binary: Path
    references: list[str]
    pieces: str  # the subword marks, as fairseq-generate's --remove-bpe calls them
    metric: BLEU


def prepare(size: Size, data: Path | None, out: Path) -> Data:
    """Make the binary data set: of 6,000 joint pieces, or of the pieces behind the published score."""
    if size is Size.PUBLISHED:
        return prepare_published(data, out / "published")
    text = corpus(data, RAW_FILES, out / "raw")
    model = translation.learn_pieces(text, PAIR, 6000, out / "raw")
    binary = translation.binarise(translation.encode(text, PAIR, model, out / "raw"), PAIR, out / "raw")
    return Data(binary, translation.lines(text / "test.de"), "sentencepiece", BLEU())


def prepare_published(data: Path | None, out: Path) -> Data:
    """Make the binary data set of the published files, which are lowercased, tokenised and split already.

    They are scored as they are.
    """
    if data is None:
        raise RecipeError(
            "--size published needs --data DIR with its BPE-split files (train.en.gz, ..., test.2016.de.gz)"
        )
    text = corpus(data, BPE_FILES, out)
    references = [line.replace("@@ ", "") for line in translation.lines(text / "test.de")]
    metric = BLEU(lowercase=True, tokenize="none", force=True)
    return Data(translation.binarise(text, PAIR, out), references, "subword_nmt", metric)


def end(preset: Preset, method: Method, workers: int) -> dict[str, int]:
    """Return the flag that ends training, after the same number of target tokens by every method.

    An update of the method async has the tokens of only one worker.
    """
    if preset.epochs:
        return {"max-epoch": preset.epochs}
    assert preset.max_update
    return {"max-update": preset.max_update * (workers if method is Method.ASYNC else 1)}


def evaluate(run: Training, data: Data, average: int) -> dict[str, Any]:
    """Train, translate and score; return the entry for `results.json`."""
    measured = training.train(run)
    checkpoint = translation.average_checkpoints(run.save_dir, average)
    score = translation.bleu(translation.translate(data.binary, checkpoint, data.pieces), data.references, data.metric)
    about = {"run": run.save_dir.name, "method": run.method.value, "workers": run.workers}
    return (
        about | {"bleu": score.bleu, "signature": score.signature} | measured | {"command": shlex.join(run.command())}
    )


def record(path: Path, result: dict[str, Any]) -> None:
    """Add a result to the file of results; it replaces an earlier result of the same run."""
    others = [r for r in json.loads(path.read_text()) if r["run"] != result["run"]] if path.exists() else []
    write_whole(path, json.dumps([*others, result], indent=2) + "\n")


def show(results: list[dict[str, Any]]) -> None:
    """Print the scores side by side."""
    table = Table("method", "BLEU", "target tokens", "updates", "minutes")
    for r in results:
        numbers = (f"{r['bleu']:.2f}", f"{r['target_tokens']:,}", f"{r['updates']:,}", f"{r['seconds'] / 60:.1f}")
        table.add_row(r["method"], *numbers)
    Console().print(table)
    print(results[0]["signature"])


def chosen(names: list[str]) -> list[Method]:
    """Return the methods asked for, each once."""
    known = [method.value for method in Method]
    for name in names:
        if name not in (*known, "all"):
            raise RecipeError(f"--method {name}: choose from {', '.join(known)} and all")
    return list(Method) if "all" in names else [Method(name) for name in dict.fromkeys(names)]


def check_codecs(compress: str) -> None:
    """Check the codecs of `--compress` before anything is prepared; "" stands for none.

    Raises:
        RecipeError: fairseq-train would refuse the codecs.
    """
    try:
        parse(compress or "none")
    except ValueError as error:
        raise RecipeError(f"--compress {compress}: {error}") from error


def adjusted(preset: Preset, **options: Any) -> Preset:
    """Return the preset with the options that were given; a number of epochs takes precedence over one of updates."""
    given = {name: value for name, value in options.items() if value is not None}
    return replace(preset, **given)


def main(
    data: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory with the .gz files; by default they are fetched."),
    ] = None,
    out: Annotated[Path, typer.Option(help="For all files; reuses what is there.")] = Path("runs/multi30k_en_de"),
    method: Annotated[
        list[str], typer.Option(help="single, sync, async, paper, hybrid, or all; may be repeated.")
    ] = DEFAULT_METHODS,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compute gradients.")] = 2,
    size: Annotated[Size, typer.Option(help="Model and schedule; the next four change the schedule.")] = Size.BASE,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the training set by all workers together.")
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Peak learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Updates of warm-up.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per batch of one worker.")] = None,
    seed: Annotated[int, typer.Option(min=1, help="Seed of initialisation, order and dropout.")] = 1,
    fp16: Annotated[bool, typer.Option("--fp16", help="Half precision; needs a GPU.")] = False,
    slowdown: Annotated[
        str, typer.Option(metavar="X,X,...", help="Times slower that each asynchronous worker is made.")
    ] = "",
    compress: Annotated[
        str, typer.Option(metavar="CODEC", help="Of asynchronous updates, as fairseq-train takes it.")
    ] = "",
) -> None:
    """Train Multi30k en-de, average the last checkpoints, translate test_2016_flickr and print sacreBLEU."""
    methods = chosen(method)
    if fp16 and not torch.cuda.is_available():
        raise RecipeError("--fp16 needs a GPU, and torch sees none: leave it out")
    synchronous = [each.value for each in methods if each in (Method.SINGLE, Method.SYNC)]
    for flag, given in (("--slowdown", slowdown), ("--compress", compress)):
        if given and synchronous:
            raise RecipeError(f"{flag} is for asynchronous workers: --method {synchronous[0]} has none")
    check_codecs(compress)
    preset = adjusted(PRESETS[size], epochs=epochs, lr=lr, warmup=warmup, max_tokens=max_tokens)
    settings = preset.settings() | {"seed": seed} | ({"fp16": True} if fp16 else {})
    prepared, results = prepare(size, data, out), []
    for each in methods:
        changed = (f"-slowdown-{slowdown}" if slowdown else "") + (f"-compress-{compress}" if compress else "")
        changed = changed.replace(":", "_")  # fairseq separates paths by colons
        save_dir = out / f"{size.value}-{each.value}-seed{seed}{changed}"
        print(f"{each.value}: training into {save_dir}", flush=True)
        length = end(preset, each, workers)
        run = Training(
            prepared.binary,
            save_dir,
            each,
            workers,
            preset.max_tokens,
            settings | length,
            slowdown=slowdown,
            compress=compress,
        )
        results.append(evaluate(run, prepared, preset.average))
        record(out / "results.json", results[-1])
    show(results)


if __name__ == "__main__":
    run_main(main)
