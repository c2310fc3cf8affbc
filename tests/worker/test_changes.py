"""Parameters that something else than the run has changed are noticed, however it was done."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fairseq_async.worker.changes import LoopWatch, ParameterWatch


def swap_rows(weight: Tensor) -> None:
    weight.copy_(weight[[1, 0, *range(2, len(weight))]])


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda weight: weight.mul_(2),
    "through data, which no version counts": lambda weight: weight.data.view(-1)[-1].add_(0.01),
    "other data": lambda weight: setattr(weight, "data", weight + 1),
    "the sign of every value": lambda weight: weight.neg_(),
    "the same values in other places": swap_rows,
    "another type": lambda weight: setattr(weight, "data", weight.half()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@torch.no_grad()
def test_a_changed_parameter_is_named(change: Callable[[Tensor], object], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(33, 21), nn.Linear(21, 3)).to(dtype)
    before = net[0].weight.clone()
    watch = ParameterWatch(list(net.named_parameters()))
    assert watch.changed() is None  # nothing was noted
    watch.note()
    assert watch.changed() is None
    change(net[1].weight)
    assert watch.changed() == "1.weight"
    net[0].weight.data = before.t().contiguous().t()  # the same values, laid out in another way
    watch.note()
    net[0].weight.data = before
    assert watch.changed() is None


def test_passes_are_counted_from_the_last_step() -> None:
    watch = LoopWatch(lambda: [], [])
    for _ in range(3):
        watch.step()
        assert not any(watch.count_pass() for _ in range(7))
    assert watch.count_pass()
