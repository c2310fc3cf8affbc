"""Parameters that cannot be exchanged are one line before a server is started."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch.parameters import check_memory


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    return model


def with_parameter(value: torch.Tensor, trained: bool = True) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_parameter("more", nn.Parameter(value, requires_grad=trained))
    return model


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: nn.LazyLinear(2), "weight is lazy .*: compute one batch"),
        (lambda: nn.Linear(2, 2, device="meta").requires_grad_(False), "weight is on meta .*: call to_empty"),
        (lambda: with_parameter(torch.eye(2).to_sparse(), trained=False), "more is a sparse tensor"),
        (lambda: with_parameter(torch.ones(2, dtype=torch.complex64)), "more is complex"),
        (shared, "1.weight shares its memory with 0.weight"),
    ],
)
def test_a_parameter_that_cannot_be_exchanged_is_one_line(make: Callable[[], nn.Module], line: str) -> None:
    with pytest.raises(ConfigurationError, match=line):
        check_memory(make())


def test_parts_of_one_flat_tensor_and_tied_parameters_are_parameters_like_others() -> None:
    model, flat = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(8)
    model[0].weight.data, model[1].weight.data = flat[:4].view(2, 2), flat[4:].view(2, 2)
    model[1].bias = model[0].bias
    check_memory(model)
