"""Runs of one worker that must end where fairseq's own SGD ends: in fp16, and with validations amid a round."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import FP16_USER_DIR, Processes, train_alone
from tests.helpers.run_files import load, relative_differences

USER = ["--user-dir", FP16_USER_DIR]
# Neither Adam nor a clipped gradient would show a factor that is too much in all gradients.
COMMON = [*USER, "--lr", "0.5", "--dropout", 0, "--clip-norm", 0, "--log-interval", 1, "--max-update", 12]
SGD = ["--inner-optimizer", "sgd", *COMMON]
HYBRID = ["--optimizer", "hybrid_async", "--updates-per-step", 1, *SGD]
LOCAL = ["--optimizer", "local_sgd", "--outer", "sgd", "--outer-lr", 1.0, "--local-steps", 4, *SGD]
ADASCALE = ["--optimizer", "adascale", *SGD, "--update-freq", 4]
FP16 = ["--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 16]
GROWING = [*FP16, "--fp16-scale-window", 5]  # it doubles at every fifth update
MORE = [*FP16, "--max-update", 13]


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    jobs: dict[str, list[object]] = {
        "plain": ["--optimizer", "sgd", *COMMON],
        "hybrid_fp16": [*HYBRID, *GROWING],
        "local_fp16": [*LOCAL, *GROWING],
        "hybrid_more": [*HYBRID, *MORE, "--restore-file", folder / "hybrid_fp16" / "checkpoint_last.pt"],
        "local_more": [*LOCAL, *MORE, "--restore-file", folder / "local_fp16" / "checkpoint_last.pt"],
        "validated": [*LOCAL, "--validate-interval-updates", 2, "--save-interval-updates", 6],
        "adascale_fp32": ADASCALE,
        "adascale_fp16": [*ADASCALE, *FP16],
    }
    with Processes() as processes:
        train_alone(processes, data, folder, jobs, seconds=280)
    return folder


def log(runs: Path, name: str) -> list[str]:
    """Of a job that has come to its end."""
    text = (runs / f"{name}-0.log").read_text()
    assert text.endswith("exit code 0\n"), text[-2000:]
    return text.splitlines()


def saved(runs: Path, name: str, file: str = "checkpoint_last.pt") -> Path:
    assert log(runs, name)
    return runs / name / file


def differences(runs: Path, left: str, right: str) -> float:
    """The largest of the tensors', but for a key's bias, whose gradient is rounding noise."""
    found = relative_differences(saved(runs, left), saved(runs, right))
    return max(value for name, value in found.items() if not name.endswith("k_proj.bias"))


def logged(runs: Path, name: str, quantity: str) -> list[float]:
    """What fairseq has logged of each step."""
    found: list[dict[str, Any]] = [json.loads(line) for line in log(runs, name) if line.startswith('{"epoch"')]
    return [float(line[quantity]) for line in found if "update" in line]


def events(runs: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / name / "events.jsonl").open()]


@pytest.mark.parametrize("name", ["hybrid_fp16", "local_fp16"])
def test_in_fp16_the_loss_scale_is_in_no_step(runs: Path, name: str) -> None:
    assert differences(runs, "plain", name) < 0.02
    losses = logged(runs, "plain", "loss")
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.2  # else this would be an easy thing
    assert logged(runs, name, "loss") == pytest.approx(losses, rel=0.01)


def test_in_fp16_the_loss_scale_is_in_no_norm(runs: Path) -> None:
    norms = logged(runs, "plain", "gnorm")
    assert logged(runs, "hybrid_fp16", "gnorm") == pytest.approx(norms, rel=0.02)
    assert [event["norm"] for event in events(runs, "hybrid_fp16")] == pytest.approx(norms, rel=0.02)


def test_in_fp16_the_loss_scale_is_in_no_gain(runs: Path) -> None:
    gains = logged(runs, "adascale_fp32", "gain")
    assert logged(runs, "adascale_fp16", "gain") == pytest.approx(gains, rel=0.02) and 1.1 < max(gains) < 4.0
    assert differences(runs, "adascale_fp32", "adascale_fp16") < 0.02


@pytest.mark.parametrize("method", ["hybrid", "local"])
def test_a_resumed_run_goes_on_with_the_loss_scale_of_its_checkpoint(runs: Path, method: str) -> None:
    """It had doubled twice, from 16, with which the flags say to begin."""
    names = [f"{method}_fp16", f"{method}_more"]
    scales = [load(saved(runs, name))["last_optimizer_state"]["loss_scale"] for name in names]
    assert scales[0] == 64
    assert scales[1] in (scales[0], 2 * scales[0])  # a new scaler doubles it with its first update


def test_a_validation_amid_a_round_is_of_the_servers_parameters_and_the_worker_goes_on_with_its_own(runs: Path) -> None:
    """Rounds of four steps, validations after every two: of what was there after 0, 4, 4, 8, 8 and 12 steps."""
    assert differences(runs, "plain", "validated") < 1e-4
    lines = [json.loads(line) for line in log(runs, "validated") if line.startswith("{") and '"valid_loss"' in line]
    losses = {int(line["valid_num_updates"]): line["valid_loss"] for line in lines}
    assert sorted(losses) == [2, 4, 6, 8, 10, 12]
    assert losses[4] == losses[6] and losses[8] == losses[10] and len(set(losses.values())) == 4
    amid = load(saved(runs, "validated", "checkpoint_1_6.pt"))
    server = amid["extra_state"]["async_server"]["server"]
    assert server["version"] == 1
    weight = amid["model"]["encoder.embed_tokens.weight"]
    assert torch.equal(weight.flatten(), server["parameters"][: weight.numel()])
