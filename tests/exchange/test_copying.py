"""Copies between tensors of any kind and one flat vector."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.exchange import copy, pack, unpack
from fairseq_async.worker.hybrid import gradient


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    square = torch.randn(3, 5, generator=generator)
    return [
        square,
        torch.randn((), generator=generator),
        square.clone().t(),  # not contiguous
        torch.zeros(0, 4),
        torch.randn(7, generator=generator).half(),
        torch.randn(2, 2, generator=generator).double(),
        Parameter(torch.randn(4, generator=generator)),
        torch.randn(6, generator=generator).bfloat16(),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_tensors_lie_end_to_end_and_come_back(dtype: torch.dtype) -> None:
    given = tensors()
    expected = torch.cat([each.detach().to(dtype).reshape(-1) for each in given])
    flat = torch.full_like(expected, torch.nan)
    pack(flat, given)
    assert torch.equal(flat, expected)
    taken = [torch.zeros_like(each) for each in given]
    unpack(taken, flat)
    assert all(torch.equal(one, other.detach().to(one.dtype)) for one, other in zip(taken, given, strict=True))
    assert taken[2].stride() == given[2].stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written_there(dtype: torch.dtype) -> None:
    memory = torch.zeros(8, dtype=dtype)
    with pytest.raises(ValueError, match="4 numbers are not enough"):
        pack(memory[:4], [torch.ones(3), torch.ones(2)])
    assert memory.tolist() == [1.0] * 3 + [0.0] * 5
    with pytest.raises(ValueError, match="4 numbers are not enough"):
        unpack([torch.ones(5, dtype=dtype)], memory[:4])


def test_a_copy_does_not_ask_how_the_two_lie_in_memory() -> None:
    source, destination = torch.arange(12.0).view(3, 4).t(), torch.zeros(8, 3)[::2]
    copy(destination, source)
    assert torch.equal(destination, source)
    copy(half := torch.zeros(4, 3).half(), source)
    assert torch.equal(half, source.half())


def test_a_parameter_that_no_loss_depends_on_is_pushed_as_zeros() -> None:
    used, unused = Parameter(torch.ones(3)), Parameter(torch.ones(2, 2))
    (2 * used).sum().backward()
    flat = torch.full((7,), torch.nan)
    pack(flat, map(gradient, (used, unused)))
    assert flat.tolist() == [2, 2, 2, 0, 0, 0, 0]
