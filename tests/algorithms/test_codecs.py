"""Codecs against references in float64 that are written from the formulas, and against bytes that lie."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import BF16, DQSGD, E3M0, AdaComp, AdaCompBins, Codec, Int8, TopK
from fairseq_async.algorithms.codecs import bits, blocks, dqsgd, top_k
from fairseq_async.errors import AsyncError, CodecError
from recipes.rules.count_sketch import CountSketch
from tests.helpers.other_device import elsewhere

LARGEST = torch.finfo(torch.float32).max
SIZES = st.one_of(st.sampled_from([0, 1, 2, 255, 256, 257, 4095, 4097]), st.integers(0, 700))
SCALES = st.sampled_from([0.0, 1e-44, 1e-38, 1e-3, 1.0, 1e20, 1e38])


def codecs() -> list[Codec]:
    small = [Int8(16), E3M0(7), TopK(100, 3), TopK(8, 8, 4), TopK(9, 2, 1), AdaComp(10), AdaComp(300), DQSGD(3, 16)]
    small += [AdaCompBins(1), AdaCompBins(10), AdaCompBins(300)]
    small += [DQSGD(norm="max"), DQSGD(3, 16, "max")]
    return [BF16(), Int8(), E3M0(), TopK(), AdaComp(), DQSGD(), CountSketch(columns=64), *small]


def name_of(codec: Codec) -> str:
    return type(codec).__name__


def vector(size: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal values with some zeros among them, none above what fp32 has."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=torch.float64) * scale
    values[torch.rand(size, generator=generator) < 0.1] = 0.0
    return values.clamp(-LARGEST, LARGEST).float()


def decoded(codec: Codec, values: Tensor, seed: int = 0) -> Tensor:
    return codec.decode(codec.encode(values, seed), values.numel())


@pytest.mark.parametrize("codec", [Int8(), E3M0()], ids=name_of)
def test_a_vector_too_large_for_ordinary_pages_is_decoded_as_its_parts_are(codec: Codec) -> None:
    """3 million values and one; a block of zeros between its parts has the scale of neither."""
    part, zeros = vector(1_500_160, 3.0), torch.zeros(256)
    whole = torch.cat([part, zeros, part, torch.tensor([-7.0])])
    back = decoded(codec, whole)
    assert back.shape == whole.shape and not back[part.numel() : part.numel() + 256].any()
    assert torch.equal(back[: part.numel()], decoded(codec, part))
    assert torch.equal(back[-1 - part.numel() : -1], decoded(codec, part)) and back[-1] == pytest.approx(-7.0)


@pytest.mark.parametrize("codec", codecs(), ids=name_of)
@settings(max_examples=12, deadline=None)
@given(size=SIZES, scale=SCALES, seed=st.integers(0, 1000))
def test_whatever_is_finite_is_encoded_to_a_vector_of_its_size_that_is_finite(
    codec: Codec, size: int, scale: float, seed: int
) -> None:
    values = vector(size, scale, seed)
    try:
        data = codec.encode(values, seed)
    except CodecError:
        assert isinstance(codec, CountSketch) and scale > 1e37  # sums of many huge values have no fp32
        return
    back = codec.decode(data, size)
    assert back.shape == (size,) and back.dtype is torch.float32 and torch.isfinite(back).all()
    assert len(data) <= codec.most_bytes([size])
    assert data == type(codec).encode(codec, values.clone(), seed)
    if not isinstance(codec, CountSketch | DQSGD):
        assert (back * values >= 0).all(), "no value changes its sign"
        assert float(back.double().norm()) <= 2 * float(values.double().norm()) + 1e-40


@pytest.mark.parametrize("codec", codecs(), ids=name_of)
def test_a_vector_of_no_tensors_has_a_payload(codec: Codec) -> None:
    assert codec.decode(codec.encode(torch.empty(0), sizes=[]), 0).numel() == 0


@pytest.mark.parametrize("codec", codecs(), ids=name_of)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused_wherever_they_are(codec: Codec, bad: float) -> None:
    for place in (0, 299, 599):
        values = vector(600)
        values[place] = bad
        with pytest.raises(CodecError, match="NaN or Inf"):
            codec.encode(values)
    assert issubclass(CodecError, AsyncError) and issubclass(CodecError, ValueError)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 600), block=st.integers(1, 300), scale=SCALES, seed=st.integers(0, 1000))
def test_int8_is_within_half_a_level_of_each_value(size: int, block: int, scale: float, seed: int) -> None:
    values = vector(size, scale, seed)
    exact, back = values.double().numpy(), decoded(Int8(block), values).double().numpy()
    for begin in range(0, size, block):
        here = slice(begin, begin + block)
        level = np.abs(exact[here]).max() / 127
        # where values have no more than a bit or two, as the smallest have, so has their scale
        allowed = level * (0.5 + 2e-5) if level > 1e-36 else np.abs(exact[here]).max() + 1e-45
        assert np.abs(exact[here] - back[here]).max() <= allowed


def test_int8_by_hand() -> None:
    values = torch.tensor([127.0, -63.4, 0.0, 1.5, -254.0])  # scales 1 and 2
    assert decoded(Int8(4), values).tolist() == [127.0, -63.0, 0.0, 2.0, -254.0]


def e3m0_reference(values: Tensor, block: int) -> np.ndarray:
    exact = values.double().numpy()
    levels = np.array([0.0] + [2.0 ** (level - 7) for level in range(1, 8)])
    back = np.zeros(exact.size)
    for begin in range(0, exact.size, block):
        part = exact[begin : begin + block]
        scale = np.abs(part).max()
        share = np.abs(part) / scale if scale else part
        distance = np.abs(share[:, None] - levels)
        back[begin : begin + block] = np.sign(part) * levels[distance.argmin(axis=1)] * scale
    return back


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 600),
    block=st.integers(1, 300),
    scale=st.sampled_from([1e-30, 1, 1e38]),
    seed=st.integers(0, 99),
)
def test_e3m0_takes_the_nearest_of_its_levels(size: int, block: int, scale: float, seed: int) -> None:
    values = vector(size, scale, seed)
    back = decoded(E3M0(block), values).double().numpy()
    np.testing.assert_allclose(back, e3m0_reference(values, block), rtol=1e-6)


def test_e3m0_by_hand() -> None:
    values = torch.tensor([64.0, -33.0, 24.0, 23.9, -1.0, 0.5, 0.49, 0.0])
    assert decoded(E3M0(8), values).tolist() == [64.0, -32.0, 32.0, 16.0, -1.0, 1.0, 0.0, 0.0]


def best_two_levels(largest: np.ndarray) -> float:
    """The least squared error with which sorted values can have two levels, by trying all divisions."""
    ordered = np.sort(largest)
    parts = ((ordered[:at], ordered[at:]) for at in range(1, ordered.size))
    return min(float(((low - low.mean()) ** 2).sum() + ((high - high.mean()) ** 2).sum()) for low, high in parts)


@pytest.mark.parametrize("size", [4096, 5000, 40, 3])
def test_top_k_sends_the_largest_of_each_chunk_at_the_best_two_levels(size: int) -> None:
    values = vector(size, seed=3)
    back = decoded(TopK(chunk=1024, keep=16), values).double()
    exact = values.double()
    for begin in range(0, size, 1024):
        part, sent = exact[begin : begin + 1024], back[begin : begin + 1024]
        keep = min(16, part.numel())
        largest = part.abs().topk(keep).indices.sort().values
        assert set(sent.nonzero().view(-1).tolist()) <= set(largest.tolist())
        assert (sent[largest] * part[largest] >= 0).all()
        error = float(((part - sent)[largest] ** 2).sum())
        # bf16 has 8 bits: its levels are within 2^-8 of the best ones, as a share
        assert error <= best_two_levels(part[largest].abs().numpy()) + float((sent**2).sum()) * 2**-16 + 1e-12


@given(st.integers(0, 2**32 - 1), st.sampled_from([(512, 3), (4096, 64), (100, 12), (100, 13)]), st.integers(1, 40))
def test_topk_sends_the_largest_values_of_each_chunk(seed: int, lengths: tuple[int, int], levels: int) -> None:
    """Values in few levels are equal in many places, and some chunks have fewer values than are sent."""
    chunk, keep = lengths
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(3, chunk, generator=draw).mul_(levels / 4).round_()
    values[1] *= torch.rand(chunk, generator=draw) < keep / chunk
    back = decoded(TopK(chunk, keep, 3), values.view(-1)).view_as(values)
    for exact, sent in zip(values.abs(), back != 0, strict=True):
        assert int(sent.sum()) == keep or int((exact > 0).sum()) < keep
        if bool(sent.any()):
            assert float(exact[sent].min()) >= float(exact[~sent].max())


@pytest.mark.parametrize("bits", [2, 3, 5])
def test_top_k_takes_the_nearest_of_the_levels_that_are_sent(bits: int) -> None:
    """These are rounded to bf16, by up to a part in 512, which decides about values near the middle of two."""
    values = vector(1 << 13).abs() + 1.0
    back = decoded(TopK(chunk=64, keep=64, bits=bits), values)
    levels = [chunk.unique() for chunk in back.view(-1, 64).double()]
    chunks = zip(levels, values.view(-1, 64).double(), back.view(-1, 64).double(), strict=True)
    for own, exact, sent in chunks:
        nearest = (exact[:, None] - own).abs().min(dim=1).values
        assert ((exact - sent).abs() <= nearest + 1e-6 * own.max()).all()


def test_top_k_has_141_times_fewer_bytes() -> None:
    assert 4 * (1 << 20) / len(TopK().encode(vector(1 << 20))) >= 140


def adacomp_reference(residual: np.ndarray, newest: np.ndarray, sizes: list[int], bin_size: int) -> np.ndarray:
    """What is sent of residual + newest, in the words of the paper's pseudo-code."""
    total = residual + newest
    sent, begin = np.zeros(total.size), 0
    for size in sizes:
        tensor = range(begin, begin + size)
        bins = [list(tensor)[at : at + bin_size] for at in range(0, size, bin_size)]
        largest = [max(abs(total[j]) for j in each) for each in bins]
        for each, limit in zip(bins, largest, strict=True):
            for j in each:
                if limit > 0 and abs(total[j] + newest[j]) >= limit:
                    sent[j] = np.sign(total[j]) * sum(largest) / len(largest)
        begin += size
    return sent


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=5), bin_size=st.integers(1, 40), seed=st.integers(0, 99))
def test_adacomp_sends_what_its_pseudo_code_sends(sizes: list[int], bin_size: int, seed: int) -> None:
    size = sum(sizes)
    newest = vector(size, seed=seed)
    total = newest + vector(size, 0.5, seed + 1)
    codec = AdaComp(bin_size)
    back = codec.decode(codec.encode(total, sizes=sizes, newest=newest), size).double().numpy()
    # H is a sum of fp32 values, rounded as in fp32
    exact = adacomp_reference((total.double() - newest.double()).numpy(), newest.double().numpy(), sizes, bin_size)
    np.testing.assert_allclose(back, exact, rtol=1e-6)


@pytest.mark.parametrize("codec", codecs(), ids=name_of)
def test_in_whatever_parts_a_vector_is_encoded_and_decoded_the_bits_are_the_same(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are of half a million values elsewhere: of a tensor as small as these, that is all of it."""
    sizes, newest = [70, 0, 1300], vector(1370, seed=4)
    values, found = newest + vector(1370, 0.5, 5), []
    for parts in (False, True):
        if parts:
            for module, name in ((blocks, "_VALUES"), (dqsgd, "_AT_A_TIME"), (bits, "_AT_A_TIME"), (top_k, "_ROWS")):
                monkeypatch.setattr(module, name, 32)
        data = copy.deepcopy(codec).encode(values, 5, sizes=sizes, newest=newest)
        found.append((data, codec.decode(data, values.numel()).tolist()))
    assert found[0] == found[1]


def test_a_tensor_that_is_shorter_than_what_a_bin_usually_sends_is_assumed_to_send_all_of_itself() -> None:
    """Behind the header and T: of each tensor its scale, counts and places of two bytes, and signs."""
    small, large = 4 + 2 * (1 + 7) + 1, 4 + 2 * (2 + 40) + 5
    assert AdaComp(500).usual_bytes([7, 1000]) == 24 + 2 * 8 + 4 + small + large


def test_adacomp_sends_no_value_that_has_cancelled_out() -> None:
    """As sign(0) it would be 0, however large the newest gradient is."""
    data = AdaComp(2).encode(torch.tensor([0.0, 1.0]), newest=torch.tensor([5.0, 0.0]))
    assert AdaComp(2).decode(data, 2).tolist() == [0.0, 1.0]


def test_adacomp_by_hand_a_bin_of_zeros_sends_nothing_and_lowers_the_mean() -> None:
    residual, gradient = torch.tensor([3.0, 0.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([-1.0, 1.5, 0.9, 0.0, 0.0, 0.0])
    codec = AdaComp(3)  # G = 2, 1.5, 1.9: the largest is 2; H = 1, 3, 2.8
    sent = codec.decode(codec.encode(residual + gradient, newest=gradient), 6)
    assert sent.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]  # the mean of 2 and 0


def adacomp_bins_reference(total: np.ndarray, newest: np.ndarray, sizes: list[int], bin_size: int) -> np.ndarray:
    """What is sent where each bin has its own scale: its largest |G|, with four bits of precision."""
    sent, begin = np.zeros(total.size), 0
    for size in sizes:
        tensor = range(begin, begin + size)
        for each in (tensor[at : at + bin_size] for at in range(0, size, bin_size)):
            largest = max(abs(total[j]) for j in each)
            for j in each:
                if largest > 0 and abs(total[j] + newest[j]) >= largest:
                    fraction, exponent = math.frexp(largest)
                    sent[j] = np.sign(total[j]) * math.ldexp(math.floor(fraction * 16 + 0.5) / 16, exponent)
        begin += size
    return sent


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=5), bin_size=st.integers(1, 40), seed=st.integers(0, 99))
def test_adacomp_with_a_scale_for_each_bin_sends_the_bins_largest_value(
    sizes: list[int], bin_size: int, seed: int
) -> None:
    size = sum(sizes)
    newest = vector(size, seed=seed)
    total = newest + vector(size, 0.5, seed + 1) * vector(size, 1.0, seed + 2)
    codec = AdaCompBins(bin_size)
    back = codec.decode(codec.encode(total, sizes=sizes, newest=newest), size, sizes).double().numpy()
    exact = adacomp_bins_reference(total.double().numpy(), newest.double().numpy(), sizes, bin_size)
    assert back.tolist() == exact.tolist()


def test_adacomp_bins_by_hand_small_bins_keep_their_own_size() -> None:
    """34/64 is half way between two scales, and goes up to 36/64; a bin 2^-40 times as large sends nothing."""
    values = torch.tensor([8.0, -8.0, 34 / 64, 0.0, 0.0, 0.0, 2.0**-40, 0.0, -7.9])
    sent = decoded(AdaCompBins(2), values)
    assert sent.tolist() == [8.0, -8.0, 0.5625, 0.0, 0.0, 0.0, 0.0, 0.0, -8.0]


def test_adacomp_bins_never_sends_inf() -> None:
    assert decoded(AdaCompBins(2), torch.tensor([LARGEST, 0.0])).tolist() == [1.875 * 2.0**127, 0.0]


def test_adacomp_bins_is_shorter_than_adacomp_with_bins_that_are_short() -> None:
    values = vector(1 << 16) ** 3
    assert len(AdaCompBins(25).encode(values)) < 0.9 * len(AdaComp(25).encode(values))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_dqsgd_is_right_in_the_mean_and_never_off_by_more_than_a_level(bits: int) -> None:
    values = vector(40, seed=5)
    level = float(values.double().norm()) / (2 ** (bits - 1) - 1)
    codec = DQSGD(bits)
    draws = torch.stack([decoded(codec, values, seed) for seed in range(1000)]).double()
    assert float((draws - values.double()).abs().max()) <= level * (1 + 1e-6)
    # a draw's deviation is at most half a level: the mean of 1,000 is within five deviations of it
    assert float((draws.mean(dim=0) - values.double()).abs().max()) <= 5 * level / 2 / math.sqrt(1000)
    assert torch.equal(decoded(codec, values, 7), decoded(codec, values, 7))


def test_dqsgd_bits_follow_the_norm() -> None:
    codec = DQSGD(bits=4)
    assert codec.bits_for(1e9) == 4  # nothing is known yet
    codec.encode(torch.tensor([3.0, 4.0]))
    assert codec.t == pytest.approx(7 / 5)
    # log2(t|g| + 1) + 1, rounded: 7 -> 4; 0.7 -> 1.77; 14 -> 4.9; 70,000 -> 17
    assert [codec.bits_for(norm) for norm in (5.0, 0.5, 10.0, 50000.0, 0.0)] == [4, 2, 5, 8, 2]
    other = DQSGD(bits=4)
    other.load_state_dict(codec.state_dict())
    assert other.encode(torch.tensor([1.0, 2.0]), 3) == codec.encode(torch.tensor([1.0, 2.0]), 3)
    assert other.t == codec.t == pytest.approx(7 / 5), "the first vector's"


def test_dqsgd_has_a_norm_for_each_tensor() -> None:
    codec = DQSGD(bits=8)
    values = torch.tensor([1.0, 0.0, 1000.0])  # 1 is a level of its own norm, and lost beside 1000
    assert codec.decode(codec.encode(values, sizes=[2, 1]), 3).tolist() == [1.0, 0.0, 1000.0]


def test_dqsgd_in_blocks_is_nearer_and_right_in_the_mean() -> None:
    values = vector(4096, seed=5)
    codec, whole = DQSGD(4, block=64), DQSGD(4)
    draws = torch.stack([decoded(codec, values, seed) for seed in range(400)]).double()
    levels = values.double().view(-1, 64).norm(dim=1).repeat_interleave(64) / 7
    off = draws - values.double()
    assert bool((off.abs() <= levels * (1 + 1e-6)).all())
    assert bool((off.mean(dim=0).abs() <= 6 * levels / 2 / math.sqrt(400)).all())
    assert float(off[0].norm()) < 0.4 * float((decoded(whole, values).double() - values.double()).norm())


def test_dqsgd_in_blocks_as_long_as_the_tensor_is_that_of_the_tensor() -> None:
    values = vector(300, seed=5)
    assert torch.equal(decoded(DQSGD(4, block=300), values, 7), decoded(DQSGD(4), values, 7))


@pytest.mark.parametrize("block", [64, None])
def test_dqsgd_by_the_largest_value_is_nearer_and_right_in_the_mean(block: int | None) -> None:
    """Its levels are max|g_j| / s apart, by hand 1 / 7 here, where the L2 norm of a block of 64 is about 8."""
    values = vector(4096, seed=5).clamp_(-1, 1)
    values[::64] = 1.0
    codec, by_norm = DQSGD(4, block, "max"), DQSGD(4, block)
    draws = torch.stack([decoded(codec, values, seed) for seed in range(400)]).double()
    off = draws - values.double()
    assert bool((off.abs() <= 1 / 7 + 1e-6).all())
    assert bool((off.mean(dim=0).abs() <= 6 / 7 / 2 / math.sqrt(400)).all())
    assert torch.allclose(draws[0] * 7, (draws[0] * 7).round(), atol=1e-6)
    assert float(off[0].norm()) < 0.4 * float((decoded(by_norm, values).double() - values.double()).norm())


def test_dqsgd_by_the_largest_value_has_the_same_number_of_bits() -> None:
    """The paper's rule is of the L2 norm, whatever the values are divided by."""
    by_norm, by_largest = DQSGD(4, 8), DQSGD(4, 8, "max")
    for scale in (1.0, 0.1, 3.0, 40.0):
        values = vector(200, scale, 3)
        assert len(by_norm.encode(values)) == len(by_largest.encode(values)) and by_norm.t == by_largest.t


def test_sketches_add_as_vectors_do_and_find_the_largest_values() -> None:
    codec = CountSketch(rows=5, columns=256, seed=9)
    first, second = vector(2000, 0.01, 1), vector(2000, 0.01, 2)
    first[77], second[77], second[1500] = 3.0, 4.0, -20.0
    added = codec.add(codec.encode(first), codec.encode(second))
    torch.testing.assert_close(codec.decode(added, 2000), decoded(codec, first + second), rtol=0, atol=1e-5)
    found = codec.estimate(added, torch.tensor([77, 1500, 3]))
    torch.testing.assert_close(found, torch.tensor([7.0, -20.0, 0.0]), rtol=0, atol=0.2)
    assert torch.equal(found, codec.decode(added, 2000)[[77, 1500, 3]])


def test_a_sketch_estimates_at_places_that_are_on_another_device() -> None:
    codec, values = CountSketch(columns=512), torch.zeros(50)
    values[20] = -2.5
    found = codec.estimate(codec.encode(values), elsewhere(torch.tensor([[20]])))
    assert type(found) is Tensor and found.tolist() == [-2.5]


def test_a_sketch_of_a_single_value_is_exact_and_another_seed_is_refused() -> None:
    values = torch.zeros(50)
    values[20] = -2.5
    codec = CountSketch(columns=512, seed=1)
    assert decoded(codec, values)[20] == -2.5
    with pytest.raises(CodecError, match="other parameters"):
        codec.add(codec.encode(values), CountSketch(columns=512, seed=2).encode(values))
    with pytest.raises(CodecError, match="values"):
        codec.add(codec.encode(values), codec.encode(values[:40]))
    with pytest.raises(CodecError, match="outside"):
        codec.estimate(codec.encode(values), torch.tensor([50]))


@pytest.mark.parametrize("codec", codecs(), ids=name_of)
def test_one_and_two_threads_make_the_same_bits(codec: Codec) -> None:
    values, before = vector(150_000, seed=8), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            data = codec.encode(values, 5, sizes=[50_000, 100_000])
            found.append((data, codec.decode(data, values.numel()).numpy().tobytes()))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "make",
    [lambda: Int8(0), lambda: E3M0(-1), lambda: TopK(8, 9), lambda: TopK(1 << 17, 1), lambda: AdaCompBins(16385)],
)
def test_parameters_out_of_their_range_are_refused(make: type[Codec]) -> None:
    with pytest.raises(CodecError, match="must be in"):
        make()


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(CodecError, match="add up to 3: there are 4"):
        AdaComp().encode(vector(4), sizes=[1, 2])


def test_numbers_of_every_codec_differ() -> None:
    numbers = [codec.number for codec in codecs()[:7]]
    assert all(one != other for one, other in itertools.combinations(numbers, 2))
