"""Compares BLEU and last validation loss on Multi30k by method and seed, from the recipe's results.

The methods are hybrid (also with a slow worker and with compressed updates), synchronous and plain async.
"""

from __future__ import annotations

import json as jsonlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.multi30k_en_de.presets import Size  # noqa: E402
from recipes.steps import RecipeError, environment, run_main  # noqa: E402
from recipes.training import Method  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

RECIPE = jobs.ROOT / "recipes" / "multi30k_en_de" / "run.py"
BELOW_SYNCHRONOUS = 0.3
COMPRESSED_BELOW = 0.5
LOSS_WITH_A_SLOW_WORKER = 1.02  # relative to the synchronous run's
NEEDED = (Method.HYBRID, Method.SYNC)

Results = dict[tuple[str, int], dict[str, Any]]
"""The recipe's recorded result of a method and a seed."""


def load(path: Path, size: Size) -> Results:
    """Returns the recorded runs of models of this size.

    The recipe names them size-method-seedN, followed by -slowdown-FACTORS and -compress-CODEC.
    """
    if not path.exists():
        return {}
    try:
        recorded = jsonlib.loads(path.read_text())
        names = {result["run"]: result for result in recorded}
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{path} is not a results.json of recipes/multi30k_en_de/run.py: {error!r}") from error
    pattern = rf"{size.value}-(\w+)-seed(\d+)(?:-slowdown-(.+?))?(?:-compress-(.+))?"
    found = {re.fullmatch(pattern, name): result for name, result in names.items()}
    return {(_named(match[1], match[3], match[4]), int(match[2])): result for match, result in found.items() if match}


def _named(method: str, slowdown: str | None, compress: str | None) -> str:
    return method + (f", slowed {slowdown}" if slowdown else "") + (f", {compress}" if compress else "")


def missing(results: Results, seeds: Sequence[int]) -> list[tuple[str, int]]:
    """Returns the methods and seeds without a result; the single process is not part of the comparison."""
    methods = [method.value for method in Method if method is not Method.SINGLE]
    return [(method, seed) for seed in seeds for method in methods if (method, seed) not in results]


def run(method: str, seed: int, out: Path, size: Size, recipe_flags: Sequence[str]) -> None:
    """Trains and scores by the recipe, which adds the result to its results.json."""
    command = [sys.executable, str(RECIPE), "--out", str(out), "--size", size.value, "--method", method]
    code = subprocess.run([*command, "--seed", str(seed), *recipe_flags], env=environment()).returncode
    if code:
        raise RecipeError(f"the recipe failed with exit code {code}: {method}, seed {seed}")


def by_run(results: Results) -> list[dict[str, Any]]:
    """Returns one row per run."""
    return [
        {
            "method": method,
            "seed": seed,
            "BLEU": result["bleu"],
            "target tokens": result["target_tokens"],
            "last validation loss": result.get("valid_loss"),
            "updates": result["updates"],
            "seconds": result["seconds"],
        }
        for (method, seed), result in sorted(results.items())
    ]


def by_method(results: Results, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Returns one row per method, with the BLEU of each seed and the mean over the seeds of its runs."""
    rows = []
    for method in sorted({method for method, _ in results}):
        scores = {seed: results[method, seed]["bleu"] if (method, seed) in results else None for seed in seeds}
        known = [score for score in scores.values() if score is not None]
        rows.append({"method": method} | {f"seed {s}": score for s, score in scores.items()} | {"mean": mean(known)})
    return rows


def check(results: Results, path: Path) -> list[int]:
    """The seeds that hybrid and synchronous share.

    Scores are compared only where they were computed alike, on runs of as many target tokens.
    """
    seeds = sorted({seed for _, seed in results if all((method.value, seed) in results for method in NEEDED)})
    if not seeds:
        raise RecipeError(f"{path}: no seed with both hybrid and sync; run them with --run, or name another --out")
    if len({result["signature"] for result in results.values()}) > 1:
        raise RecipeError(f"{path}: scores with different sacreBLEU signatures cannot be compared")
    return seeds


def scores_beside_plain(results: Results) -> dict[str, float]:
    """Returns the BLEU of hybrid with compressed updates minus that without, as a mean over seeds."""
    differences: dict[str, list[float]] = {}
    for (method, seed), result in results.items():
        if method.startswith("hybrid, ") and "slowed" not in method and ("hybrid", seed) in results:
            differences.setdefault(method, []).append(result["bleu"] - results["hybrid", seed]["bleu"])
    return {method: mean(each) for method, each in sorted(differences.items())}


def losses_beside_synchronous(results: Results) -> dict[str, float]:
    """Returns the last validation loss of hybrid with slow workers over synchronous's, as a mean over seeds."""
    ratios: dict[str, list[float]] = {}
    for (method, seed), result in results.items():
        loss, reference = result.get("valid_loss"), results.get(("sync", seed), {}).get("valid_loss")
        if method.startswith("hybrid, slowed") and loss and reference:
            ratios.setdefault(method, []).append(loss / reference)
    return {method: mean(each) for method, each in sorted(ratios.items())}


def main(
    out: Annotated[Path, typer.Option(help="The recipe's --out, with its results.json.")] = Path("runs/multi30k_en_de"),
    size: Annotated[Size, typer.Option(help="The recipe's --size.")] = Size.BASE,
    seeds: Annotated[int, typer.Option(min=1, help="With --run: seeds 1 to this number.")] = 3,
    run_missing: Annotated[bool, typer.Option("--run", help="Run what is missing.")] = False,
    recipe_flags: Annotated[list[str] | None, typer.Argument(metavar="[-- RECIPE FLAGS]", show_default=False)] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare the BLEU of the methods; exit code 1 if hybrid is more than 0.3 below synchronous, or with compressed
    updates 0.5 below itself, or if its last validation loss with slow workers is more than 1.02 of synchronous."""
    report = Report(f"Quality: Multi30k en-de, {size.value} model, sacreBLEU on test_2016_flickr")
    if recipe_flags and not run_missing:
        raise RecipeError(f"{recipe_flags[0]}: flags for the recipe are of use with --run only")
    path = out / "results.json"
    for method, seed in missing(load(path, size), range(1, seeds + 1)) if run_missing else []:
        run(method, seed, out, size, recipe_flags or [])
    results = load(path, size)
    shared = check(results, path)
    report.table("runs", by_run(results))
    report.table("BLEU", by_method(results, sorted({seed for _, seed in results})))
    print(next(iter(results.values()))["signature"])
    differences = [results["hybrid", seed]["bleu"] - results["sync", seed]["bleu"] for seed in shared]
    what = f"hybrid minus sync, mean over seeds {', '.join(map(str, shared))}"
    report.bound(what, mean(differences), -BELOW_SYNCHRONOUS, at_least=True)
    for method, difference in scores_beside_plain(results).items():
        report.bound(f"{method}, minus hybrid, mean over seeds", difference, -COMPRESSED_BELOW, at_least=True)
    for method, ratio in losses_beside_synchronous(results).items():
        report.bound(f"last validation loss of {method}, over synchronous", ratio, LOSS_WITH_A_SLOW_WORKER)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
