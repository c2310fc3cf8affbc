"""The experiments of recipes/paper, and the program that gives each method its best outer learning rate."""

import math
import sys
from pathlib import Path

import pytest
import yaml

from fairseq_async.options.config import AsyncLocalSGDOptions
from fairseq_async.simulation.experiment import read
from scripts.bench.outer_rules import SCHEDULING, Bench, Outcome, Run, Search, rows
from tests.helpers.commands import ROOT, Processes
from tests.helpers.waiting import wait_until

FILES = sorted((ROOT / "recipes" / "paper").glob("*.yaml"))


@pytest.mark.usefixtures("recipe_rules")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_is_an_experiment_and_is_in_the_list(path: Path) -> None:
    given = read(path)
    assert len(given.methods) > 1 and given.steps > 0
    assert f"`{path.name}`" in (path.parent / "README.md").read_text()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    experiment = {
        "problem": {"type": "gaussians", "samples": 64, "hidden": 2},
        "steps": 8,
        "batch_size": 2,
        "optimizer": {"type": "sgd", "lr": 0.1},
        "pretraining": {"steps": 2},
        "clusters": {"equal": {"workers": 2}, "unequal": {"workers": 2, "seconds_per_step": [1.0, 3.0]}},
        "methods": {
            "DiLoCo": {"method": "local_sgd", "outer": "diloco", "local_steps": 2},
            "MLA": {"method": "local_sgd", "outer": "mla", "local_steps": 2, "outer_lr": 0.5},
        },
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    return Bench(read(tmp_path / "experiment.yaml"), tmp_path / "out", grace=0.1)


def test_equal_workers_have_staleness_0_whatever_the_scheduling_and_unequal_ones_do_not(bench: Bench) -> None:
    stale = {kind: bench.run(Run("MLA", "equal", kind, 1, 1.0)).staleness for kind in SCHEDULING}
    assert set(stale.values()) == {0.0}
    assert bench.run(Run("MLA", "unequal", "none", 1, 1.0)).staleness > 0


def test_scheduling_and_rate_are_the_runs(bench: Bench) -> None:
    options = bench.scheduled(Run("MLA", "unequal", "grace and dynamic steps", 1, 0.5)).options
    assert isinstance(options, AsyncLocalSGDOptions)
    assert (options.grace_period, options.dynamic_local_steps) == (pytest.approx(0.2), True)
    assert options.model_dump()["outer_lr"] == 0.25
    assert "grace_period" not in bench.scheduled(Run("DiLoCo", "equal", "grace", 1, 1.0)).options.model_dump()


def search(bench: Bench, method: str = "MLA") -> Search:
    return Search(bench, method, "equal", "none", seeds=[1, 2], rates=[10.0, 0.1, 1.0, 3.0])


def test_the_first_seed_goes_up_to_a_hopeless_rate_and_then_all_seeds_run_at_its_best(bench: Bench) -> None:
    losses, order = {0.1: 1.0, 1.0: 1.2, 3.0: 0.9, 10.0: 3.0}, list[tuple[int, float]]()
    searched = search(bench)
    while wanted := searched.wanted():
        for run in wanted:
            bench.done[run.key] = Outcome(losses[run.rate] + 0.1 * run.seed, 9.0, 0.5)
            order.append((run.seed, run.rate))
    assert order == [(1, 0.1), (1, 1.0), (1, 3.0), (1, 10.0), (2, 3.0)]  # 0.1 is a minimum, too, but not the least


def test_no_rate_above_a_hopeless_one_is_run(bench: Bench) -> None:
    for rate, loss in {0.1: 2.0, 1.0: math.nan}.items():
        bench.done[Run("MLA", "equal", "none", 1, rate).key] = Outcome(loss, 9.0, 0.5)
    assert [(run.seed, run.rate) for run in search(bench).wanted()] == [(2, 0.1)]


def test_each_method_is_taken_at_its_best_rate_and_a_diverged_run_is_the_worst(bench: Bench) -> None:
    losses = {0.1: (2.0, 2.0), 1.0: (1.0, 1.2), 3.0: (math.nan, 0.1)}
    for rate, found in losses.items():
        for seed, loss in enumerate(found, start=1):
            for method in ("DiLoCo", "MLA"):
                bench.done[Run(method, "equal", "none", seed, rate).key] = Outcome(loss, 9.0, 0.5)
    first, second = rows([search(bench, "DiLoCo"), search(bench)])
    assert (first["method"], second["method"], second["outer lr"]) == ("DiLoCo", "MLA", 0.5)
    assert second["perplexity"] == pytest.approx((math.exp(1.0) + math.exp(1.2)) / 2)
    assert second["± (standard error)"] == pytest.approx((math.exp(1.2) - math.exp(1.0)) / 2)
    assert second["of DiLoCo's"] == 1.0 and second["best is"] == "inside"


def test_differences_from_plain_sgd_are_taken_seed_by_seed(bench: Bench) -> None:
    bench.methods["SGD"] = bench.methods["MLA"]
    for name, losses in {"SGD": (2.0, 3.0), "MLA": (1.9, 2.7)}.items():
        for seed, loss in enumerate(losses, start=1):
            bench.done[Run(name, "equal", "none", seed, 1.0).key] = Outcome(loss, 9.0, 0.5)
    _, beside = rows([search(bench, "SGD"), search(bench)])
    assert beside["loss − SGD's"] == pytest.approx(-0.2) and beside["± (of pairs)"] == pytest.approx(0.1)


def test_what_was_run_is_not_run_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.compare([1], [1.0], ["none"], processes=1)
    again = Bench(bench.experiment, bench.out, grace=0.1)
    monkeypatch.setattr(again, "run", None)  # whatever would be run would want it
    again.compare([1], [1.0], ["none"], processes=1)
    assert again.done == bench.done and len(again.done) == 4


@pytest.mark.usefixtures("executed")  # its processes import its main module
def test_the_processes_of_runs_end_with_a_program_that_is_killed(bench: Bench, processes: Processes) -> None:
    """They would go on with runs of which nobody takes the result."""
    script = [sys.executable, ROOT / "scripts" / "bench" / "outer_rules.py", bench.experiment.path]
    program = processes.start([*script, "--processes", 2, "--out", bench.out])
    results, children = bench.out / "experiment.jsonl", Path(f"/proc/{program.pid}/task/{program.pid}/children")
    wait_until(results.exists, 120)
    started = [Path(f"/proc/{child}/cmdline") for child in children.read_text().split()]
    program.kill()
    program.wait(30)
    assert len(started) > 1
    wait_until(lambda: not any(each.exists() and each.read_bytes() for each in started), 30)
