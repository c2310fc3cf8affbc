"""Buffers that workers make by themselves are told apart by a few sums."""

import pytest
import torch
from torch import Tensor

from fairseq_async.protocol.sketches import different, sketch_of

ONES = torch.ones(16)


def with_last(value: float, of: Tensor = ONES) -> Tensor:
    return torch.cat([of[:-1], torch.tensor([value], dtype=of.dtype)])


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [
        (ONES, with_last(1.03), False),
        (ONES, with_last(1.1), True),
        (with_last(torch.inf), with_last(-torch.inf), False),
        (with_last(torch.inf), with_last(2.0), True),
        (ONES * 1j, with_last(2j, ONES * 1j), True),
    ],
    ids=["rounding", "in the last eighth", "not finite", "finite in one", "imaginary"],
)
def test_two_buffers_differ_where_no_rounding_explains_it(first: Tensor, second: Tensor, differ: bool) -> None:
    assert different({"a": sketch_of(first)}, {"a": sketch_of(second), "b": [1.0]}) == ("a" if differ else "")
