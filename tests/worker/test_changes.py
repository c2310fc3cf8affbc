"""Parameters that something else than the run has changed are noticed, however it was done."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fairseq_async.worker import changes
from fairseq_async.worker.changes import LoopWatch, OtherModels, ParameterWatch, WholeWatch


def swap_rows(weight: Tensor) -> None:
    """The first and the last: of values within 127 words, only the sum shows."""
    weight.copy_(weight[[-1, *range(1, len(weight) - 1), 0]])


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda weight: weight.mul_(2),
    "through data, which no version counts": lambda weight: weight.data.view(-1)[-1].add_(0.01),
    "other data": lambda weight: setattr(weight, "data", weight + 1),
    "the sign of every value": lambda weight: weight.neg_(),
    "the same values in other places": swap_rows,
    "the same memory the other way round": lambda weight: setattr(weight, "data", weight.data.t()),
    "another type": lambda weight: setattr(weight, "data", weight.half()),
}


@pytest.fixture(params=[False, True], ids=["a kernel for each", "as on a GPU"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        at_once = changes._RowsAtOnce()
        monkeypatch.setattr(ParameterWatch, "_rows_of", lambda watch, device: at_once)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("layer", [0, 1], ids=["of several rows of words", "of less than a row"])
@torch.no_grad()
def test_a_changed_parameter_is_named(change: Callable[[Tensor], object], layer: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(33, 41), nn.Linear(41, 3)).to(dtype)
    watch = ParameterWatch(list(net.named_parameters()))
    assert watch.changed() is None  # nothing was noted
    watch.note()
    assert watch.changed() is None
    change(net[layer].weight)
    assert watch.changed() == f"{layer}.weight"
    net[1].bias.data += 1
    assert watch.changed() == f"{layer}.weight", "the first of two"
    now = net[0].weight.data
    net[0].weight.data = now.t().contiguous().t()  # the same values, laid out in another way
    watch.note()
    net[0].weight.data = now
    assert watch.changed() is None


@pytest.mark.parametrize(("begin", "kind", "kept"), [(4, "_Rows", True), (1, "_Rows", False), (1, "_RowsAtOnce", True)])
def test_views_are_kept_unless_they_are_of_copies(begin: int, kind: str, kept: bool) -> None:
    """On a CPU the bits of an element that begins within 8 bytes are copied."""
    rows, tensor = getattr(changes, kind)(), torch.zeros(600, dtype=torch.bfloat16)[begin:]
    rows.sums([tensor])
    placed = rows._parts
    before, _ = rows.sums([tensor])
    assert (rows._parts is placed) is kept
    tensor[-1] = 1
    assert not torch.equal(rows.sums([tensor])[0], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_parameters_may_begin_anywhere_in_a_flat_tensor(dtype: torch.dtype) -> None:
    """Also within a word of 8 bytes."""
    flat = torch.arange(901.0).to(dtype)
    named = [(str(start), flat[start : start + 299]) for start in (0, 301, 602)]
    watch = ParameterWatch(named)
    watch.note()
    assert watch.changed() is None
    flat[601] = -1.0  # between two of them
    assert watch.changed() is None
    flat[602 + 298] = -1.0
    assert watch.changed() == "602"


def test_passes_are_counted_from_the_last_step() -> None:
    watch = LoopWatch(lambda: [], [])
    for _ in range(3):
        watch.step()
        assert not any(watch.count_pass() for _ in range(7))
    assert watch.count_pass()


def test_the_place_of_a_value_counts_wherever_it_is() -> None:
    """Also across the rows that are summed first, and in the bytes behind the last whole word."""
    weight = torch.zeros(2 * 2 * 127 + 3)
    watch = ParameterWatch([("w", weight)])
    for one, other in ((0, 254), (253, 254), (507, 508), (508, 510), (509, 510)):
        weight.zero_()[one] = 1.0
        watch.note()
        weight.zero_()[other] = 1.0
        assert watch.changed() == "w", (one, other)


def test_all_parameters_that_are_replaced_at_once_are_noticed_by_one_element_of_each_of_some() -> None:
    tensors = [torch.full((3, 5), float(number)) for number in range(10)]
    watch = WholeWatch([torch.empty(0), *tensors])
    assert not watch.changed(), "nothing was noted"
    watch.note()
    tensors[0][0, 0] = tensors[9][1, 2] = 99.0  # not the element that is looked at, and not one of the first eight
    assert not watch.changed()
    tensors[7][1, 2] = 99.0
    assert watch.changed()
    watch.note()
    assert not watch.changed()


def test_a_loop_is_seen_to_have_trained_before_it_joins_by_gradients_and_changes_together() -> None:
    weight = nn.Parameter(torch.ones(3))
    watch = LoopWatch(lambda: [("w", weight)], [weight])
    weight.data += 1
    assert not watch.trained_before(), "as where a script loads weights"
    weight.sum().backward()
    assert watch.trained_before()
    watch.join()
    weight.data += 1
    weight.sum().backward()
    assert not watch.has_stepped and watch.trained_without_step() is None and not watch.trained_before()
    assert not watch.count_pass() and watch.trained_without_step() is None
    weight.data += 1
    assert watch.trained_without_step() == "w" and [watch.count_pass() for _ in range(7)] == [False] * 6 + [True]
    watch.step()
    assert watch.has_stepped and watch.trained_without_step() is None
    for _ in range(3):
        watch.count_pass()
        weight.data += 1
    assert watch.trained_without_step() is None, "of so many passes a step may be"
    watch.count_pass()
    weight.data += 1
    assert watch.trained_without_step() == "w"
    watch.begin_again()
    assert watch.trained_without_step() is None


@pytest.mark.parametrize(("workers", "lines"), [(1, 0), (2, 1)])
def test_the_third_step_of_an_optimizer_of_other_parameters_is_told_once(
    capsys: pytest.CaptureFixture[str], workers: int, lines: int
) -> None:
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    others = OtherModels(workers, "give them to the run")
    for optimizer in (first, second, first, second):
        others.count(optimizer)
    thread = threading.Thread(target=lambda: [others.count(first) for _ in range(3)])  # as of a server
    thread.start()
    thread.join()
    assert not capsys.readouterr().err
    for optimizer in (first, second, first, second):
        others.count(optimizer)
    told = capsys.readouterr()
    said = [
        line for line in (told.err + told.out).splitlines() if "each worker trains its own: give them to the" in line
    ]
    assert len(said) == lines
