"""Shares by speed in DeepSpeed: a step is that of a synchronous run with the same micro-batches."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fairseq_async.deepspeed_plugin.checks import micro_batches
from tests.helpers.commands import DEEPSPEED, Processes, command
from tests.helpers.deepspeed_shares import AVERAGE, BATCH, SAMPLES, SAVED_AT, Sines, make_model


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``tests/helpers/deepspeed_shares.py`` has left."""
    path = tmp_path_factory.mktemp("shares")
    with Processes() as processes:
        processes.run([command("python"), "-m", "tests.helpers.deepspeed_shares", path], seconds=280, **DEEPSPEED)
    return path


def left(out: Path, name: str, ranks: int = 2) -> list[dict[str, Any]]:
    logs = (out / f"{name}.log").read_text()[-3000:]
    assert all((out / f"{name}-{rank}.pt").exists() for rank in range(ranks)), logs
    return [torch.load(out / f"{name}-{rank}.pt", weights_only=True) for rank in range(ranks)]


def synchronous(*gradients: list[list[int]]) -> Tensor:
    """Where a run in float64 ends that takes the same samples in the same steps."""
    model, data = make_model().double(), Sines()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in zip_longest(*gradients, fillvalue=[]):
        chosen = [data[sample] for each in step for sample in each]
        if chosen:
            optimizer.zero_grad()
            _, inputs, targets = zip(*chosen, strict=True)
            nn.functional.mse_loss(model(torch.stack(inputs).double()), torch.stack(targets).double()).backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(("name", "tolerance"), [("whole", 1e-6), ("asked", 1e-6), ("bf16", 1e-2), ("island", 1e-6)])
def test_a_step_is_synchronous_with_the_same_micro_batches(out: Path, name: str, tolerance: float) -> None:
    ranks = 4 if name == "island" else 2
    ended = left(out, name, ranks)
    rows = [BATCH * 2 // ranks * number for number in (4, 6, 6, 6, 6, 6)]
    assert [len(each) for each in ended[0]["samples"][:6]] == rows
    assert [len(each) for each in ended[-1]["samples"][:6]] == [rows[0], *[rows[1] // 3] * 5]
    expected = synchronous(*(each["samples"][:6] for each in ended))
    for each in ended:
        torch.testing.assert_close(each["parameters"].double(), expected, rtol=tolerance, atol=tolerance)


def test_a_run_that_goes_on_counts_micro_batches(out: Path) -> None:
    """It draws what the run would have drawn, and ends where that ends."""
    for whole, resumed in zip(left(out, "whole"), left(out, "resumed"), strict=True):
        assert resumed["samples"] == whole["samples"][SAVED_AT:]
        assert torch.equal(resumed["parameters"], whole["parameters"])


def test_a_loop_over_the_data_is_one_pass(out: Path) -> None:
    """Of both workers together: the fast one has more of it, and no batch is trained twice."""
    ended = left(out, "pass")
    numbers = [[len(each) // BATCH for each in worker["samples"]] for worker in ended]
    assert numbers == [[4, 6, 6, 0], [4, 2, 2, 0]]
    gradients = [worker["samples"] for worker in ended]
    assert sorted(sample for worker in gradients for step in worker for sample in step) == list(range(SAMPLES))
    for each in ended:
        torch.testing.assert_close(each["parameters"].double(), synchronous(*gradients), rtol=1e-6, atol=1e-6)


def test_equal_shares_change_no_bit(out: Path) -> None:
    for ours, theirs in zip(left(out, "equal shares"), left(out, "equal"), strict=True):
        assert ours["samples"] == theirs["samples"] and [len(each) for each in ours["samples"]][0] == BATCH * AVERAGE
        assert torch.equal(ours["parameters"], theirs["parameters"])


def test_a_script_that_ends_its_steps_elsewhere_is_one_line(out: Path) -> None:
    log = (out / "not asked.log").read_text()
    assert 'a step after 4 micro-batches, of which it has 6 by "shares": give "equal" there' in log
    assert "Traceback" not in log and not (out / "not asked-0.pt").exists()


@pytest.mark.parametrize(
    ("batch", "micro_batch", "accumulation", "expected"),
    [(None, 2, 4, 4), (24, 2, None, 6), (24, None, 3, 3), (8, None, None, 1)],
)
def test_the_average_is_what_deepspeed_accumulates(
    batch: int | None, micro_batch: int | None, accumulation: int | None, expected: int
) -> None:
    """In a worker of two ranks."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = dict(zip(keys, (batch, micro_batch, accumulation), strict=True))
    assert micro_batches({key: value for key, value in given.items() if value is not None}, 2) == expected
