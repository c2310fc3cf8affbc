"""Checks that this tree trains to the same bits as another commit: what moves code must not move a bit.

Runs every case with both trees on this machine, and compares checksums of the parameters: jobs of one worker, or of two
behind a barrier, whose results do not depend on the order of arrival; simulations; and recordings of asynchronous runs
of fairseq, which the other tree makes and both replay.

    python scripts/bench/same_bits.py --against COMMIT [--only pytorch,deepspeed,fairseq,recorded,simulated]
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.made_up_pair.run import SETTINGS  # noqa: E402
from recipes.steps import RecipeError, console_script, run_main, run_step  # noqa: E402
from recipes.training import flags  # noqa: E402
from recipes.translation import load_checkpoint  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

WORKER = jobs.ROOT / "scripts/bench/same_bits_worker.py"  # the same job for both trees
KINDS = ("pytorch", "deepspeed", "fairseq", "recorded", "simulated")
UPDATES = 24


@dataclass(frozen=True)
class Case:
    """A method with its options, by the names that all front ends share, and its number of workers."""

    name: str
    method: str
    options: Mapping[str, object]
    workers: int = 1

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "_").replace(",", "")


# Not overlap: where in its steps a worker takes an answer depends on when it comes, also with one worker.
CASES = (
    Case("hybrid", "hybrid_async", {}),
    Case("hybrid, N = 2", "hybrid_async", {"updates_per_step": 2, "look_ahead": "off"}),
    Case("hybrid, barrier", "hybrid_async", {"barrier": True}, 2),
    Case("hybrid, int8 with pull", "hybrid_async", {"compress": "int8,pull=int8"}),
    Case("hybrid, shards", "hybrid_async", {"server_shards": 2, "barrier": True}, 2),
    Case("outer SGD", "local_sgd", {"outer": "sgd", "outer_lr": 0.7, "local_steps": 4}),
    Case("DiLoCo", "local_sgd", {"outer": "diloco", "local_steps": 4}, 2),
    Case("DN", "local_sgd", {"outer": "delayed_nesterov", "local_steps": 4, "dynamic_local_steps": True}),
    Case("fragments", "local_sgd", {"outer": "sgd", "local_steps": 4, "fragments": 2, "fragment_delay": 1}),
    Case("int8 with pull", "local_sgd", {"outer": "diloco", "local_steps": 4, "compress": "int8,pull=int8"}, 2),
    Case("shards", "local_sgd", {"outer": "diloco", "local_steps": 4, "server_shards": 2}, 2),
)
DYNAMIC = {"outer": "delayed_nesterov", "local_steps": 4, "dynamic_local_steps": True, "grace_period": 0.05}
RECORDED = (
    Case("hybrid", "hybrid_async", {}, 3),
    Case("hybrid, N = 2", "hybrid_async", {"updates_per_step": 2, "look_ahead": "off"}, 3),
    Case("hybrid, shards, int8", "hybrid_async", {"server_shards": 2, "compress": "int8"}, 3),
    Case("outer SGD", "local_sgd", {"outer": "sgd", "local_steps": 4}, 3),
    Case("DN with dynamic steps and grace", "local_sgd", DYNAMIC, 3),
    Case("int8 with pull", "local_sgd", {"local_steps": 4, "compress": "int8,pull=int8"}, 3),
    Case("shards", "local_sgd", {"local_steps": 4, "server_shards": 2}, 3),
)
SLOW = {"workers": 4, "seconds_per_step": [0.58, 0.75, 1.51, 3.33]}
APART = {"regions": 2, "between_regions": {"seconds": 5.0}}
PARTS = {
    "in turn": {"method": "local_sgd", "outer": "sgd", "local_steps": 6, "fragments": 2, "fragment_delay": 1},
    "HeLoCo": {"method": "local_sgd", "outer": "heloco", "local_steps": 6},
}
SIMULATED: dict[str, dict[str, Any]] = {  # by the name of a recipe; these keys take the place of its own
    "toy": {"clusters": {"unequal": SLOW}, "target": None},
    "regions_toy": {"clusters": {"apart": SLOW | APART}},
    "compression_toy": {},
    "fragments": {
        "problem": {"type": "gaussians"},
        "clusters": {"unequal": SLOW},
        "evaluate_every": 60,
        "methods": PARTS,
    },
}
SHORT = {"steps": 60, "batch_size": 16, "pretraining": {"steps": 60, "lr": 0.003}}


@dataclass(frozen=True)
class Tree:
    """A checkout of the project, with a directory for what its runs leave."""

    root: Path
    out: Path

    def run(self, name: str, command: list[str]) -> None:
        """Runs ``python ARGUMENTS`` with this tree's package; raises RecipeError with the log's end if it fails."""
        variables = f"PYTHONPATH={self.root}", "CUDA_VISIBLE_DEVICES=", "DS_ACCELERATOR=cpu"
        # in its root: python -m takes the package of the working directory before that of PYTHONPATH
        run_step(name, ["env", f"--chdir={self.root}", *variables, sys.executable, *command], self.out / f"{name}.log")

    def launch(self, name: str, case: Case, command: list[str], *options: str) -> None:
        """Runs a job of the case's workers."""
        launch = ["-m", "fairseq_async", "launch", "--workers", str(case.workers), *options]
        self.run(name, [*launch, "--", *command])


def checksum(path: Path) -> str:
    """Returns the first 16 hexadecimal digits of a state dict's SHA-256, tensor by tensor in its order."""
    state = load_checkpoint(path)
    digest = hashlib.sha256()
    for name, tensor in state.get("model", state).items():
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def script(tree: Tree, front_end: str, case: Case) -> str:
    """Trains the small job in PyTorch or DeepSpeed; returns the checksum of worker 0's model."""
    out = tree.out / f"{front_end}-{case.slug}.pt"
    job = ["python", str(WORKER), front_end, case.method, json.dumps(case.options), str(out)]
    tree.launch(out.stem, case, job)
    return checksum(out)


def fairseq_train(case: Case, data: Path, save_dir: Path, **settings: object) -> list[str]:
    """Returns the command of a translation model's training by the case's method."""
    fixed = {
        "user-dir": "fairseq_async",  # relative to the tree's root, in which the command runs
        "max-tokens": 512,
        "max-update": UPDATES,
        "max-epoch": 0,
        "no-epoch-checkpoints": True,
    }
    method = {"optimizer": case.method, "inner-optimizer": "adam", "save-dir": save_dir}
    options = {name.replace("_", "-"): value for name, value in case.options.items()}
    return [console_script("fairseq-train"), str(data), *flags(SETTINGS | fixed | method | options | settings)]


def in_fairseq(tree: Tree, data: Path, case: Case) -> str:
    """Trains a translation model; returns the checksum of its last checkpoint."""
    save_dir = tree.out / f"fairseq-{case.slug}"
    tree.launch(save_dir.name, case, fairseq_train(case, data, save_dir, **{"disable-validation": True}))
    return checksum(save_dir / "checkpoint_last.pt")


def record(tree: Tree, data: Path, case: Case) -> Path:
    """Makes a recording of an asynchronous run; returns its directory."""
    save_dir = tree.out / f"recorded-{case.slug}"
    command = fairseq_train(case, data, save_dir, **jobs.TIMED, record=True)
    tree.launch(save_dir.name, case, command, "--slowdown", "1,1.5,3")
    return save_dir


def replay(tree: Tree, recording: Path) -> str:
    """Replays a recording; returns the line that counts the equal checksums. Raises RecipeError if one differs."""
    name = f"replayed-{recording.name}"
    tree.run(name, ["-m", "fairseq_async", "replay", str(recording)])
    return (tree.out / f"{name}.log").read_text().strip().splitlines()[-1]


def simulate(tree: Tree, name: str, changes: Mapping[str, Any]) -> str:
    """Simulates the methods of a recipe, in short; returns the checksum of their events."""
    experiment = yaml.safe_load((jobs.ROOT / f"recipes/paper/{name}.yaml").read_text()) | SHORT | dict(changes)
    file, out = tree.out / f"{name}.yaml", tree.out / f"simulated-{name}"
    present = {key: value for key, value in experiment.items() if value is not None}
    file.write_text(yaml.safe_dump(present, sort_keys=False))
    tree.run(out.name, ["-m", "fairseq_async", "simulate", str(file), "--out", str(out)])
    digest = hashlib.sha256()
    for written in sorted(out.rglob("*.jsonl")):
        digest.update(written.relative_to(out).as_posix().encode() + written.read_bytes())
    return digest.hexdigest()[:16]


def compared(kind: str, here: Tree, there: Tree, data: Path) -> Iterator[dict[str, Any]]:
    """Yields a row for each case of a kind: its name, and what both trees give, which run at the same time."""
    runs: list[tuple[str, Callable[[Tree], str]]] = []
    if kind == "simulated":
        runs = [(name, partial(simulate, name=name, changes=changes)) for name, changes in SIMULATED.items()]
    elif kind == "recorded":
        for case in RECORDED:
            runs.append((case.name, partial(replay, recording=record(there, data, case))))
    elif kind == "fairseq":
        runs = [(case.name, partial(in_fairseq, data=data, case=case)) for case in CASES]
    else:
        runs = [(case.name, partial(script, front_end=kind, case=case)) for case in CASES]
    for name, run in runs:
        with ThreadPoolExecutor() as pool:
            theirs, ours = pool.map(run, (there, here))
        print(f"{kind}, {name}: {theirs}{'' if theirs == ours else f' here {ours}'}", flush=True)
        yield {"kind": kind, "case": name, "other commit": theirs, "this tree": ours, "equal": str(theirs == ours)}


def main(
    against: Annotated[str, typer.Option(metavar="COMMIT", help="The other commit.")],
    only: Annotated[str, typer.Option(metavar="KINDS", help="Kinds, with commas between.")] = ",".join(KINDS),
    out: Annotated[Path, typer.Option(help="For all files of the runs.")] = Path("runs/same_bits"),
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare this tree with another commit; exit code 1 if a bit differs."""
    kinds = only.split(",")
    if unknown := set(kinds) - set(KINDS):
        raise RecipeError(f"--only {', '.join(sorted(unknown))}: known are {', '.join(KINDS)}")
    jobs.claim(out)
    here, there = (Tree(root, (out / side).resolve()) for root, side in ((jobs.ROOT, "here"), (out / "tree", "there")))
    for side in (here.out, there.out):
        shutil.rmtree(side, ignore_errors=True)
        side.mkdir(parents=True)
    git = ["git", "-C", str(jobs.ROOT), "worktree"]
    subprocess.run(
        [*git, "add", "--force", "--detach", str(there.root.resolve()), against], check=True, capture_output=True
    )
    try:
        report = Report(f"The same bits as {against}")
        data = jobs.corpus(None, out.resolve())
        rows = [row for kind in kinds for row in compared(kind, here, Tree(there.root.resolve(), there.out), data)]
    finally:
        subprocess.run([*git, "remove", "--force", str(there.root.resolve())], check=True, capture_output=True)
    report.table("checksums", rows)
    report.bound(
        "share of the cases that are equal", sum(row["equal"] == "True" for row in rows) / len(rows), 1.0, True
    )
    report.end(json)


if __name__ == "__main__":
    run_main(main)
