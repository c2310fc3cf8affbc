"""Passes on several threads: the same bits as on one."""

import runpy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_async.algorithms import HybridAccumulation, Update, threads
from fairseq_async.algorithms.pieces import pieces
from fairseq_async.algorithms.threads import PIECE, copy_in_threads, in_threads, set_threads, step_in_threads

SIZE = 5 * PIECE + 17  # no multiple of a piece, nor of the number of threads


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    set_threads(1)


def trained(threads: int, optimizer: str, clip_norm: float, steps: int = 3) -> tuple[torch.Tensor, dict[str, object]]:
    """The parameters after steps of three gradients, and the rule's state."""
    set_threads(threads)
    generator = torch.Generator().manual_seed(1)
    parameters = torch.randn(SIZE, generator=generator)
    kinds = {
        "adam": lambda views: torch.optim.Adam(views, lr=0.01, weight_decay=0.1),
        "sgd": lambda views: torch.optim.SGD(views, lr=0.01, momentum=0.9),
        "groups": lambda views: torch.optim.AdamW(
            [{"params": views[:2], "lr": 0.1}, {"params": views[2:], "weight_decay": 0.5}], lr=0.01
        ),
    }
    inner = kinds[optimizer](pieces(parameters))
    whole = [Parameter(parameters)]
    rule = HybridAccumulation(inner, 3, clip_norm, whole, elementwise=True)
    for n in range(3 * steps):
        rule.apply(parameters, Update(n % 3, n // 3, n // 3, 1.0 + n, torch.randn(SIZE, generator=generator)))
    return parameters, rule.state_dict()


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "groups"])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("threads", [2, 3, 64])
def test_a_step_on_several_threads_is_that_on_one_to_the_bit(optimizer: str, clip_norm: float, threads: int) -> None:
    expected, state = trained(1, optimizer, clip_norm)
    found, same = trained(threads, optimizer, clip_norm)
    assert torch.equal(found, expected)
    torch.testing.assert_close(same, state, rtol=0, atol=0)


class SquareRoots(TorchDispatchMode):
    """Collects the types of the tensors whose square roots are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Tensor, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.sqrt.default:
            self.types.add(args[0].dtype)
        return func(*args, **kwargs or {})


def test_the_first_square_roots_of_a_process_are_taken_before_there_are_threads() -> None:
    """Two threads that take the first one at once may get inexact ones of MKL: too rarely for a test that waits."""
    with SquareRoots() as found:
        runpy.run_path(threads.__file__)
    assert found.types == {torch.float32, torch.float64}


def test_what_an_optimizer_keeps_in_its_groups_is_kept() -> None:
    class Counting(torch.optim.SGD):
        """Keeps its steps in the group, as fairseq's NAG does with its learning rate."""

        def step(self, closure: None = None) -> None:
            for group in filter(lambda each: each["params"], self.param_groups):
                group["steps"] = group.get("steps", 0) + 1
            super().step()

    parameters = torch.zeros(5 * PIECE)
    parts = pieces(parameters)
    optimizer = Counting([{"params": parts[:4]}, {"params": parts[4:]}], lr=1.0)
    for part in parts:
        part.grad = torch.ones(PIECE)
    set_threads(2)
    step_in_threads(optimizer)
    step_in_threads(optimizer)
    assert [(group["steps"], len(group["params"])) for group in optimizer.param_groups] == [(2, 4), (2, 1)]
    assert parameters.eq(-2.0).all()


def test_several_threads_do_take_part_and_results_keep_their_order() -> None:
    for count in (2, 3):
        set_threads(count)
        all_ = threading.Barrier(count)  # fewer threads would wait here until the time is over

        def meet(number: int, all_: threading.Barrier = all_) -> int:
            all_.wait(timeout=10)
            return number

        assert in_threads(meet, range(count)) == list(range(count))


def test_an_error_in_one_thread_is_raised_when_all_have_ended() -> None:
    set_threads(2)
    ended = threading.Event()

    def fail_or_end(number: int) -> None:
        if number == 0:
            raise MemoryError("no room")
        ended.wait(0.2)
        ended.set()

    with pytest.raises(MemoryError, match="no room"):
        in_threads(fail_or_end, [0, 1])
    assert ended.is_set()


@pytest.mark.parametrize("size", [0, 1, 2, 7])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_copy_on_several_threads_is_whole(size: int, threads: int) -> None:
    set_threads(threads)
    destination = torch.zeros(size)
    copy_in_threads(destination, torch.arange(size) + 1.0)
    assert destination.tolist() == [n + 1.0 for n in range(size)]
