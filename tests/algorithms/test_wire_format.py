"""docs/wire.md is enough to read a payload: a decoder that uses struct and numpy, and nothing of this package."""

import struct
import zlib

import numpy as np
import pytest
import torch

from fairseq_async.algorithms import BF16, DQSGD, E3M0, AdaComp, AdaCompBins, Codec, Int8, TopK
from recipes.rules.count_sketch import CountSketch

Floats = np.ndarray


def numbers(data: bytes, count: int, width: int) -> list[int]:
    whole = int.from_bytes(data, "little")
    return [whole >> width * i & (1 << width) - 1 for i in range(count)]


def bf16(data: bytes) -> Floats:
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def read(data: bytes) -> tuple[int, tuple[int, ...], bytes]:
    magic, version, codec, zero, tensors, length, checksum = struct.unpack_from("<4sBBHIQI", data)
    assert (magic, version, zero) == (b"FSAC", 1, 0)
    assert checksum == zlib.crc32(data[:20] + data[24:])
    sizes = struct.unpack_from(f"<{tensors}Q", data, 24)
    body = data[24 + 8 * tensors :]
    assert len(body) == length
    return codec, sizes, body


def blocks(body: bytes, size: int) -> tuple[Floats, bytes]:
    (block,) = struct.unpack_from("<I", body)
    count = -(-size // block)
    scales = np.frombuffer(body, "<f4", count, 4)
    return scales[np.arange(size) // block], body[4 + 4 * count :]


def read_int8(body: bytes, sizes: tuple[int, ...]) -> Floats:
    scales, rest = blocks(body, sizes[0])
    return scales * np.frombuffer(rest, "i1").astype("f4")


def read_e3m0(body: bytes, sizes: tuple[int, ...]) -> Floats:
    scales, rest = blocks(body, sizes[0])
    codes = np.array(numbers(rest, sizes[0], 4))
    level = codes % 8
    size = np.where(level == 0, 0, 2.0 ** (level - 7.0)).astype("f4") * scales
    return np.where(codes >= 8, -size, size)


def read_topk(body: bytes, sizes: tuple[int, ...]) -> Floats:
    chunk, keep, width = struct.unpack_from("<3I", body)
    lengths = [min(chunk, sizes[0] - begin) for begin in range(0, sizes[0], chunk)]
    sent = [min(keep, length) for length in lengths]
    ends = bf16(body[12 : 12 + 4 * len(lengths)]).reshape(-1, 2)
    bits = max(1, (chunk - 1).bit_length())
    start = 12 + 4 * len(lengths)
    end = start + -(-sum(sent) * bits // 8)
    places, codes = numbers(body[start:end], sum(sent), bits), numbers(body[end:], sum(sent), width)
    values, levels, at = np.zeros(sizes[0], "f4"), 1 << width - 1, 0
    for number, count in enumerate(sent):
        for place, code in zip(places[at : at + count], codes[at : at + count], strict=True):
            share = np.float32((code >> 1) / (levels - 1)) if levels > 1 else np.float32(0)
            size = ends[number, 0] * (1 - share) + ends[number, 1] * share
            values[number * chunk + place] = -size if code & 1 else size
        at += count
    return values


def read_adacomp(body: bytes, sizes: tuple[int, ...]) -> Floats:
    (length,) = struct.unpack_from("<I", body)
    index, at = np.dtype("u1" if length <= 255 else "<u2"), 4
    tensors = []
    for size in sizes:
        (scale,) = struct.unpack_from("<f", body, at)
        counts = np.frombuffer(body, index, -(-size // length), at + 4)
        at += 4 + counts.nbytes
        places = np.frombuffer(body, index, int(counts.sum()), at)
        at += places.nbytes
        signs = numbers(body[at : at + -(-places.size // 8)], places.size, 1)
        at += -(-places.size // 8)
        values = np.zeros(size, "f4")
        for bin_, place, sign in zip(np.repeat(np.arange(counts.size), counts), places, signs, strict=True):
            values[bin_ * length + place] = -scale if sign else scale
        tensors.append(values)
    assert at == len(body)
    return np.concatenate(tensors)


def read_adacomp_bins(body: bytes, sizes: tuple[int, ...]) -> Floats:
    (length,) = struct.unpack_from("<I", body)
    width, at = 2 + max(1, (length - 1).bit_length()), 4
    tensors = []
    for size in sizes:
        sent, top = struct.unpack_from("<IH", body, at)
        steps = np.frombuffer(body, "u1", -(-size // length), at + 6)
        at += 6 + steps.nbytes
        end = at + -(-sent * width // 8)
        values, bins = np.zeros(size, "f4"), (number for number, step in enumerate(steps) if step < 255)
        bin_ = next(bins, None)
        for number in numbers(body[at:end], sent, width):
            assert bin_ is not None
            scale = np.array((top - int(steps[bin_])) << 20, "<u4").view("<f4")
            values[bin_ * length + (number >> 2)] = -scale if number & 1 else scale
            bin_ = next(bins, None) if number & 2 else bin_
        at = end
        tensors.append(values)
    assert at == len(body)
    return np.concatenate(tensors)


def read_dqsgd(body: bytes, sizes: tuple[int, ...]) -> Floats:
    width, start, lengths = body[0], 1, list(sizes)
    if width > 127:
        width, start, (block,) = width - 128, 5, struct.unpack_from("<I", body, 1)
        lengths = [min(block, size - begin) for size in sizes for begin in range(0, size, block)]
    levels = 2 ** (width - 1) - 1
    norms = np.frombuffer(body, "<f4", len(lengths), start)
    codes = np.array(numbers(body[start + 4 * len(lengths) :], sum(sizes), width))
    return (codes - levels).astype("f4") / np.float32(levels) * np.repeat(norms, lengths)


def read_sketch(body: bytes, sizes: tuple[int, ...]) -> Floats:
    rows, columns, seed = struct.unpack_from("<IIQ", body)
    table = np.frombuffer(body, "<f4", rows * columns, 16).reshape(rows, columns)
    whole = 1 << 64

    def next_number() -> int:
        nonlocal seed
        seed = (seed + 0x9E3779B97F4A7C15) % whole
        mixed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 % whole
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % whole
        return mixed ^ mixed >> 31

    found = np.zeros((rows, sizes[0]))
    for row in range(rows):
        a, b, a_of_sign, b_of_sign = (next_number() for _ in range(4))
        for i in range(sizes[0]):
            column = ((a * i + b) % whole >> 32) * columns >> 32
            found[row, i] = table[row, column] * (-1.0 if (a_of_sign * i + b_of_sign) % whole >> 63 else 1.0)
    return np.median(found, axis=0).astype("f4")


READERS = {
    1: lambda body, sizes: bf16(body),
    2: read_int8,
    3: read_e3m0,
    4: read_topk,
    5: read_adacomp,
    6: read_dqsgd,
    7: read_sketch,
    8: read_adacomp_bins,
}
CODECS = [BF16(), Int8(100), E3M0(25), TopK(300, 9), TopK(64, 5, 4), TopK(64, 5, 1)]
CODECS += [
    AdaComp(300),
    AdaComp(20),
    AdaCompBins(300),
    AdaCompBins(7),
    DQSGD(4),
    DQSGD(4, 100),
    DQSGD(4, 100, "max"),
    CountSketch(3, 50, 11),
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_another_program_reads_the_same_bits(codec: Codec) -> None:
    values = torch.randn(1003, generator=torch.Generator().manual_seed(4))
    data = codec.encode(values, seed=1, sizes=[700, 0, 303])
    number, sizes, body = read(data)
    assert number == codec.number and sum(sizes) == 1003
    there = READERS[number](body, sizes).astype("f4")
    assert there.tobytes() == codec.decode(data, 1003).numpy().tobytes()
