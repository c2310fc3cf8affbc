"""Parameter groups, optimizers and schedules of a script, whose workers must end where plain DeepSpeed ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import DEEPSPEED, Processes, command

STEPS = 8
KINDS = {"bf16": torch.bfloat16, "sums": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``tests/helpers/deepspeed_pairs.py`` has left."""
    path = tmp_path_factory.mktemp("pairs")
    with Processes() as processes:
        processes.run([command("python"), "-m", "tests.helpers.deepspeed_pairs", path], seconds=280, **DEEPSPEED)
    return path


@pytest.fixture
def parameters(out: Path) -> Callable[[str], dict[str, torch.Tensor]]:
    def load(name: str) -> dict[str, torch.Tensor]:
        assert (out / f"{name}.pt").exists(), [log.read_text()[-3000:] for log in out.glob("*.log")]
        state: dict[str, torch.Tensor] = torch.load(out / f"{name}.pt", weights_only=True)
        return state

    return load


def seen(out: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return loaded


@pytest.mark.parametrize(
    ("name", "worker"),
    [
        ("position", 1),
        *((each, 0) for each in ("json", "script", "position", "checkpoint", "local", "bf16", "sums", "fp16")),
    ],
)
def test_a_worker_steps_each_group_as_plain_deepspeed_does(
    parameters: Callable[[str], dict[str, torch.Tensor]], out: Path, name: str, worker: int
) -> None:
    """So does a parameter that no loss uses, which decays in DeepSpeed. The moments of an optimizer that has stepped,
    and those of a checkpoint of plain DeepSpeed, are the server's, and the schedule goes on at its place."""
    start, expected, found = (parameters(each) for each in ("start", f"{name}.plain", f"{name}.worker-{worker}"))
    for key, tensor in expected.items():
        assert found[key].dtype is tensor.dtype is KINDS.get(name, torch.float32)
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)
        assert torch.equal(tensor, start[key].to(tensor)) == (key == "4.bias")  # whose group has no rate
    rates, plain = (seen(out, f"{name}.{each}")["rates"] for each in (f"worker-{worker}", "plain"))
    assert rates == plain[-len(rates) :]


# In "muon" DeepSpeed's compiled steps are compared with torch's, both in bfloat16 here. Elsewhere the steps are equal,
# and with local steps what differs is the last bit of a difference that the server has subtracted: which bits of
# bfloat16 that flips depends on the CPU.
_ROUNDED = torch.finfo(torch.bfloat16).eps
MUON = {"muon": 0.05, "muon_local": _ROUNDED, "muon_adamw": 1e-6, "muon_adamw_local": _ROUNDED}


@pytest.mark.parametrize(("name", "tolerance"), MUON.items())
def test_a_worker_with_muon_ends_where_plain_deepspeed_does(
    parameters: Callable[[str], dict[str, torch.Tensor]], out: Path, name: str, tolerance: float
) -> None:
    """The difference of each tensor is a part of how far it has gone."""
    start, expected, found = (parameters(each) for each in ("start", f"{name}.plain", f"{name}.worker-0"))
    for key, tensor in expected.items():
        assert (found[key] - tensor).norm() <= tolerance * (tensor - start[key]).norm(), key
        assert not torch.equal(tensor, start[key])
    rates, plain = (seen(out, f"{name}.{each}")["rates"] for each in ("worker-0", "plain"))
    assert rates == plain


def test_steps_that_overflow_are_skipped_as_plain_deepspeed_skips_them(out: Path) -> None:
    applied, plain = (seen(out, f"fp16.{each}")["applied"] for each in ("worker-0", "plain"))
    assert applied[:STEPS] == plain and plain.count(False) == 3


@pytest.mark.parametrize("name", ["bf16", "sums", "fp16"])
def test_the_norm_of_a_step_is_what_plain_deepspeed_answers_with_zero(out: Path, name: str) -> None:
    """Of the mean gradient without the loss scale. A script prints it, or logs its item()."""
    plain, found = (seen(out, f"{name}.{each}") for each in ("plain", "worker-0"))
    taken = [step for step, applied in enumerate(plain["applied"]) if applied]
    expected = [plain["norms"][step] for step in taken]
    assert min(expected) > 0.0 and [found["norms"][step] for step in taken] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["json", "script", "local"])
def test_steps_after_the_last_one_only_count_and_say_so_once(out: Path, name: str) -> None:
    both = seen(out, f"{name}.worker-0")
    assert both["applied"] == [True] * STEPS + [False] * 2 and both["steps"] == STEPS + 2
    assert (out / f"{name}.log").read_text().count("the run is over, and engine.step() does nothing any more") == 1


@pytest.mark.parametrize("name", ["json", "script"])
def test_progress_is_printed_as_plain_deepspeed_prints_it(out: Path, name: str) -> None:
    log = (out / f"{name}.log").read_text()
    assert [log.count(f"step={step}, skipped=0, lr=") for step in (4, 8)] == [2, 2]
