"""A script may change torch's default type or device; the bits of a codec, and the data's order, must not follow."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import (
    BF16,
    DQSGD,
    E3M0,
    AdaComp,
    AdaCompBins,
    Codec,
    ErrorFeedback,
    Int8,
    TopK,
    adasum,
    shard_probabilities,
)
from fairseq_async.algorithms.adasum import combine
from fairseq_async.worker.shards import ShardOrder
from recipes.rules.count_sketch import CountSketch

CODECS = [
    BF16,
    Int8,
    E3M0,
    TopK,
    AdaComp,
    AdaCompBins,
    DQSGD,
    lambda: DQSGD(3, block=4),
    lambda: DQSGD(norm="max"),
    CountSketch,
]


@pytest.fixture(params=[torch.float64, torch.bfloat16, "meta"], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype | str]:
    """The meta device stands for a GPU: a tensor that is made there cannot be read."""
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)
    torch.set_default_device(None)


def follow(default: torch.dtype | str) -> None:
    if isinstance(default, str):
        torch.set_default_device(default)
    else:
        torch.set_default_dtype(default)


def vector() -> Tensor:
    return torch.linspace(-3, 4, 37, dtype=torch.float32, device="cpu")


def exchanged(codec: Codec) -> tuple[bytes, list[float], list[float]]:
    feedback = ErrorFeedback(codec)
    payload = feedback.send(vector(), seed=5)
    feedback.acknowledge()
    found = codec.decode(payload, 37)
    assert found.dtype == feedback.residual.dtype == torch.float32
    return payload, found.tolist(), feedback.residual.tolist()


@pytest.mark.parametrize("make", CODECS)
def test_codecs_make_the_same_bits(make: type[Codec], default: torch.dtype | str) -> None:
    expected = exchanged(make())
    follow(default)
    assert exchanged(make()) == expected


def test_adasum_and_the_order_of_the_data_are_the_same(default: torch.dtype | str) -> None:
    def everything() -> list[list[float]]:
        mine = vector()
        combine(mine, vector().flip(0), [0.5, 0.25])
        order = [float(sample) for sample in ShardOrder([20, 30], seed=3).indices(1, 5, 9)]
        return [
            adasum([vector(), vector() * 2]).tolist(),
            mine.tolist(),
            shard_probabilities([3, 1], [1, 1]).tolist(),
            order,
        ]

    expected = everything()
    follow(default)
    assert everything() == expected
