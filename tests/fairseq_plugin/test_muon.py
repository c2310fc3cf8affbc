"""Runs of one worker with Muon that must end where fairseq ends with it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.fairseq_plugin.compat.muon import FairseqMuon, MuonConfig
from tests.helpers.commands import HELPERS, Processes, train_alone
from tests.helpers.run_files import load, relative_differences

COMMON = ["--user-dir", HELPERS / "muon_alone", "--lr", 0.01, "--dropout", 0, "--clip-norm", 0, "--max-update", 8]
INNER = ["--inner-optimizer", "muon", *COMMON]
JOBS: dict[str, list[object]] = {
    "plain": ["--optimizer", "muon", *COMMON],
    "adam": ["--optimizer", "adam", *COMMON],
    "hybrid": ["--optimizer", "hybrid_async", "--updates-per-step", 1, *INNER],
    "local": ["--optimizer", "local_sgd", "--outer", "sgd", "--outer-lr", 1.0, "--local-steps", 4, *INNER],
    "fp16": ["--optimizer", "local_sgd", "--fp16", "--fp16-no-flatten-grads", *INNER],
}


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, str]]]:
    folder = tmp_path_factory.mktemp("muon")
    with Processes() as processes:
        return folder, train_alone(processes, data, folder, JOBS, seconds=280)


def saved(runs: tuple[Path, dict[str, tuple[int, str]]], name: str) -> Path:
    code, log = runs[1][name]
    assert code == 0, log[-2000:]
    return runs[0] / name / "checkpoint_last.pt"


@pytest.mark.parametrize(("name", "tolerance"), [("hybrid", 1e-6), ("local", 0.01)])
def test_one_worker_with_muon_is_fairseq_with_muon(
    runs: tuple[Path, dict[str, tuple[int, str]]], name: str, tolerance: float
) -> None:
    """After local steps, where the server has subtracted how far they went, within the rounding of bfloat16, in which
    Muon iterates: 2^-8 of a number of one step. Adam is far off."""
    found = relative_differences(saved(runs, "plain"), saved(runs, name))
    of_adam = relative_differences(saved(runs, "plain"), saved(runs, "adam"))
    for tensor, value in found.items():
        if not tensor.endswith("k_proj.bias"):  # whose gradient is rounding noise
            assert value <= tolerance, tensor
    assert of_adam["encoder.layers.0.fc1.weight"] > 0.05


def test_a_checkpoint_has_a_momentum_for_each_matrix_and_two_moments_for_all_else(
    runs: tuple[Path, dict[str, tuple[int, str]]],
) -> None:
    state = load(saved(runs, "local"))["last_optimizer_state"]
    muon, rest = ([state["state"][n] for n in group["params"]] for group in state["param_groups"])
    assert all(each.keys() == {"momentum_buffer"} and each["momentum_buffer"].dim() == 2 for each in muon)
    assert all({"exp_avg", "exp_avg_sq"} <= each.keys() for each in rest) and len(muon) > 5
    assert any(torch.is_tensor(each["exp_avg"]) and each["exp_avg"].dim() == 2 for each in rest)  # embeddings


def test_the_optimizer_has_the_options_of_the_flags() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))]
    for parameter in parameters:
        vars(parameter)["use_muon"] = parameter.dim() == 2
    given = {"lr": 0.125, "weight_decay": 0.25, "momentum": 0.5, "betas": (0.8, 0.7)}
    rates: list[Any] = [[0.125, 0.5], 0.125]  # of the first epoch, or of all
    for rate in rates:
        cfg = MuonConfig(muon_momentum=0.5, muon_betas="(0.8, 0.7)", weight_decay=0.25, lr=rate)
        for group in FairseqMuon(cfg, parameters).optimizer.param_groups:
            assert group.items() >= given.items()


def test_a_worker_in_fp16_is_one_line_of_error(runs: tuple[Path, dict[str, tuple[int, str]]]) -> None:
    code, log = runs[1]["fp16"]
    (line,) = [line for line in log.splitlines() if "error: " in line]
    assert code == 2 and "leave out --fp16" in line and "Traceback" not in log
