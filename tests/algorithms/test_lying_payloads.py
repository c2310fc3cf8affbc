"""Payloads that lie are refused."""

import math
import struct
import warnings
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import BF16, DQSGD, E3M0, AdaComp, AdaCompBins, Codec, Int8, TopK
from fairseq_async.algorithms.codecs.payload import seal
from fairseq_async.errors import CodecError
from recipes.rules.count_sketch import CountSketch

CODECS = [BF16(), Int8(), E3M0(), TopK(9, 2, 1), AdaComp(10), AdaCompBins(10), DQSGD(), DQSGD(3, 16, "max")]


def name_of(codec: Codec) -> str:
    return type(codec).__name__


OF_EACH = pytest.mark.parametrize("codec", [*CODECS, CountSketch(columns=64)], ids=name_of)


def vector(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def sealed(data: bytes) -> bytes:
    """The same bytes with the checksum that belongs to them."""
    return data[:20] + struct.pack("<I", zlib.crc32(data[24:], zlib.crc32(data[:20]))) + data[24:]


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    yield "nothing", b""
    yield "half a header", data[:11]
    yield "a byte too few", data[:-1]
    yield "a byte too many", data + b"\0"
    yield "another byte", data[:-1] + bytes([data[-1] ^ 1])
    yield "another magic", sealed(b"XSAC" + data[4:])
    yield "a later version", sealed(data[:4] + b"\2" + data[5:])
    yield "another codec", sealed(data[:5] + b"\x63" + data[6:])
    yield "tensors without end", sealed(data[:8] + b"\xff\xff\xff\xff" + data[12:])
    yield "a body without end", sealed(data[:12] + b"\xff" * 8 + data[20:])
    yield "values without end", sealed(data[:24] + b"\xff" * 8 + data[32:])


@OF_EACH
def test_a_header_that_lies_is_refused(codec: Codec) -> None:
    for what, data in damaged(codec.encode(vector(300))):
        with pytest.raises(CodecError):
            codec.decode(data, 300)
            pytest.fail(what)
    with pytest.raises(CodecError, match="300 values: 299 were expected"):
        codec.decode(codec.encode(vector(300)), 299)


@OF_EACH
def test_a_body_with_a_byte_behind_its_last_value_is_refused(codec: Codec) -> None:
    body = codec.encode(vector(300))[32:]
    with pytest.raises(CodecError):
        codec.decode(seal(codec.number, (300,), [body, b"\0"]), 300)


@pytest.mark.parametrize(
    ("codec", "at", "new", "said"),
    [
        (Int8(4), 32 + 4, struct.pack("<f", math.nan), "scale"),
        (Int8(4), 32 + 4, struct.pack("<f", -1.0), "scale"),
        (Int8(4), 32 + 4, struct.pack("<f", 3e38), "scale"),
        (Int8(4), 32, struct.pack("<I", 2), "blocks of 2"),
        (Int8(4), 32 + 4 + 8, b"\x80", "-128"),
        (E3M0(4), 32 + 4, struct.pack("<f", math.inf), "scale"),
        (BF16(), 32, b"\xc0\x7f", "NaN"),
        (TopK(4, 2), 32 + 12, b"\xc0\x7f", "level"),
        (TopK(4, 2), 32 + 12, b"\x00\x7f", "level"),
        (TopK(4, 2), 32, struct.pack("<I", 8), "parameters"),
        (TopK(4, 2), 32 + 12 + 8, b"\x00", "places"),
        (AdaComp(4), 32 + 4, struct.pack("<f", math.nan), "scale"),
        (AdaComp(4), 32, struct.pack("<I", 8), "bins"),
        (AdaComp(4), 32 + 8, b"\xff", "more than it has"),
        (AdaCompBins(4), 32, struct.pack("<I", 8), "bins"),
        (AdaCompBins(4), 36, b"\x09", "ends in the middle"),
        (AdaCompBins(4), 36 + 4, b"\xf8\x07", "NaN or Inf"),
        (AdaCompBins(4), 36 + 4, b"\x00\x00", "NaN or Inf"),
        (AdaCompBins(4), 36, struct.pack("<IHBBB", 1, 3, 3, 255, 2), "scale of a payload is 0"),
        (AdaCompBins(4), 36 + 6, b"\xff", "more or fewer bins"),
        (AdaCompBins(4), 36 + 8, b"\x00", "more or fewer bins"),
        (AdaCompBins(4), 36, struct.pack("<IH", 1, 5) + b"\xff\xff\x00", "more or fewer bins"),
        (DQSGD(4), 32, b"\x09", "9 bits"),
        (DQSGD(4), 33, struct.pack("<f", math.nan), "norm"),
        (DQSGD(4), 37, b"\xff", "above its norm"),
        (DQSGD(4), 32, b"\x84", "values: a tensor was expected"),
        (DQSGD(4, 8), 32, b"\x04", "a tensor: 8 values was expected"),
        (CountSketch(1, 3, 1), 32 + 16, struct.pack("<f", math.nan), "NaN"),
    ],
)
def test_a_body_that_lies_is_refused(codec: Codec, at: int, new: bytes, said: str) -> None:
    data = codec.encode(torch.tensor([1.0, -2.0, 3.0, 0.5, 0.25, 4.0, -1.0, 2.0]))
    with pytest.raises(CodecError, match=said):
        codec.decode(sealed(data[:at] + new + data[at + len(new) :]), 8)


def test_half_a_byte_behind_the_last_value_has_to_be_zero() -> None:
    data = E3M0(4).encode(torch.tensor([1.0, 0.5, 0.25]))
    with pytest.raises(CodecError, match="behind the last value"):
        E3M0(4).decode(sealed(data[:-1] + bytes([data[-1] | 0xF0])), 3)


@pytest.mark.parametrize("codec", [AdaComp(4), AdaCompBins(4), DQSGD(4), DQSGD(4, 2)], ids=name_of)
@pytest.mark.parametrize("lies", [(1, 3), (4,), (2, 2, 0), (2, 0, 2)])
def test_tensors_of_other_sizes_than_the_models_are_refused(codec: Codec, lies: tuple[int, ...]) -> None:
    values = torch.tensor([1.0, -2.0, 3.0, 0.5])
    assert codec.decode(codec.encode(values, sizes=(2, 2)), 4, (2, 2)).shape == (4,)
    with pytest.raises(CodecError, match="tensors"):
        codec.decode(codec.encode(values, sizes=lies), 4, (2, 2))


def test_sketches_are_of_one_vector_and_their_sum_is_finite() -> None:
    sketch = CountSketch(1, 4)
    data = sketch.encode(torch.full((4,), 1e38))
    two = seal(sketch.number, (4, 0), [data[32:]])
    for use in (lambda: sketch.add(data, two), lambda: sketch.estimate(two, torch.tensor([0]))):
        with pytest.raises(CodecError, match="2 tensors"):
            use()
    large = sketch.encode(torch.tensor([3e38, 0.0, 0.0, 0.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CodecError, match="Inf"):
            sketch.add(large, large)


@OF_EACH
@settings(max_examples=25, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4))
def test_no_change_of_a_body_makes_anything_but_a_vector_or_an_error(
    codec: Codec, flips: list[tuple[int, int]]
) -> None:
    data = bytearray(codec.encode(vector(500)))
    for place, change in flips:
        data[24 + place % (len(data) - 24)] ^= change
    try:
        back = codec.decode(sealed(bytes(data)), 500)
    except CodecError:
        return
    assert back.shape == (500,) and torch.isfinite(back).all()
