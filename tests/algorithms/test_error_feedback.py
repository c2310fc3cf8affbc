"""What a codec loses is kept, and nothing is lost or doubled, whatever becomes of an update."""

import math
from collections.abc import Callable
from copy import deepcopy
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import BF16, DQSGD, E3M0, AdaComp, AdaCompBins, Codec, ErrorFeedback, Int8, TopK
from fairseq_async.errors import CodecError


def biased() -> list[Codec]:
    return [BF16(), Int8(8), E3M0(8), TopK(20, 3), AdaComp(10), AdaCompBins(10), DQSGD(3)]


def name_of(codec: Codec) -> str:
    return type(codec).__name__


def exact_sum(vectors: list[Tensor], size: int) -> list[Fraction]:
    return [sum((Fraction(float(vector[i])) for vector in vectors), Fraction(0)) for i in range(size)]


@pytest.mark.parametrize("codec", biased(), ids=name_of)
@settings(max_examples=12, deadline=None)
@given(
    applied=st.lists(st.booleans(), min_size=1, max_size=12),
    size=st.integers(1, 45),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_what_was_applied_and_the_residual_are_the_sum_of_all_updates_to_the_last_bit(
    codec: Codec, applied: list[bool], size: int, seed: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    feedback = ErrorFeedback(codec)
    updates, sent = [], []
    for number, is_applied in enumerate(applied):
        updates.append(torch.randn(size, generator=generator) * scale)
        before = feedback.residual.clone()
        payload = feedback.send(updates[-1], seed=number)
        assert torch.equal(feedback.residual, before if before.numel() else torch.zeros(size))
        if is_applied:
            sent.append(codec.decode(payload, size))
            feedback.acknowledge()
        else:
            feedback.refuse()
    total = exact_sum(updates, size)
    for i, (all_, gone) in enumerate(zip(total, exact_sum(sent, size), strict=True)):
        assert all_ - gone == Fraction(float(feedback.state_dict()["residual"][i]))
        assert float(all_ - gone) == pytest.approx(float(feedback.residual[i]), rel=1e-7)


def test_answers_that_come_twice_or_for_nothing_change_nothing() -> None:
    feedback = ErrorFeedback(Int8(4))
    feedback.acknowledge()
    feedback.send(torch.tensor([1.0, 0.3]))
    feedback.acknowledge()
    once = feedback.residual
    feedback.acknowledge()
    feedback.refuse()
    assert torch.equal(feedback.residual, once)


def test_an_update_that_cannot_be_sent_leaves_all_as_it_was() -> None:
    feedback = ErrorFeedback(E3M0(4))
    feedback.send(torch.tensor([1.0, 0.3]))
    with pytest.raises(CodecError, match="neither"):
        feedback.send(torch.tensor([1.0, 0.3]))
    feedback.acknowledge()
    before = feedback.residual
    for bad, said in ((torch.tensor([1.0, math.nan]), "NaN"), (torch.ones(3), "those before had 2")):
        with pytest.raises(CodecError, match=said):
            feedback.send(bad)
        assert not feedback.pending and torch.equal(feedback.residual, before)


def test_a_first_update_that_cannot_be_sent_fixes_no_size() -> None:
    feedback = ErrorFeedback(AdaComp(4), sizes=(2, 3))
    for bad in (torch.tensor([math.nan]), torch.ones(4)):
        with pytest.raises(CodecError):
            feedback.send(bad)
        assert not feedback.residual.numel()
    assert feedback.send(torch.ones(5))


def test_the_update_may_change_after_it_was_sent() -> None:
    feedback, update = ErrorFeedback(TopK(4, 1)), torch.tensor([4.0, 1.0, 2.0, 0.0])
    feedback.send(update)
    update.zero_()  # a slot of shared memory is used again
    feedback.acknowledge()
    assert feedback.residual.tolist() == [0.0, 1.0, 2.0, 0.0]


def test_what_is_small_is_sent_when_enough_of_it_has_come() -> None:
    feedback, codec = ErrorFeedback(TopK(4, 1)), TopK(4, 1)
    sent = []
    for _ in range(4):
        sent.append(codec.decode(feedback.send(torch.tensor([4.0, 3.0, 0.0, 0.0])), 4).tolist())
        feedback.acknowledge()
    assert sent == [[4, 0, 0, 0], [0, 6, 0, 0], [8, 0, 0, 0], [0, 6, 0, 0]]


def test_adacomp_gets_the_newest_gradient_besides_the_sum() -> None:
    feedback, codec = ErrorFeedback(AdaComp(3)), AdaComp(3)
    feedback.send(torch.tensor([8.0, 3.0, 1.0]))  # |2G| >= 8: the first
    feedback.acknowledge()
    assert feedback.residual.tolist() == [0.0, 3.0, 1.0]
    payload = feedback.send(torch.tensor([1.0, 0.5, 3.0]))  # G = 1, 3.5, 4 and H = 2, 4, 7
    assert codec.decode(payload, 3).tolist() == [0.0, 4.0, 4.0]


def test_error_feedback_goes_on_from_its_state() -> None:
    updates = [torch.randn(30, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    first = ErrorFeedback(DQSGD(3))
    for update in updates[:2]:
        first.send(update)
        first.acknowledge()
    second = ErrorFeedback(DQSGD(3))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.residual, second.residual)
    assert first.send(updates[2], 5) == second.send(updates[2], 5)
    kept = first.residual
    second.refuse()
    assert torch.equal(first.residual, kept) and not torch.equal(second.residual, kept), "each has its own"


@pytest.mark.parametrize("settle", [ErrorFeedback.acknowledge, ErrorFeedback.refuse, ErrorFeedback.withdraw])
@pytest.mark.parametrize("without", [[], [slice(0, 7), slice(12, 20)]], ids=["whole", "with gaps"])
@pytest.mark.parametrize("codec", [*biased(), TopK(5, 3, bits=1)], ids=name_of)
def test_an_update_that_was_on_its_way_at_a_stop_is_settled_as_without_it(
    codec: Codec, without: list[slice], settle: Callable[[ErrorFeedback], None]
) -> None:
    updates = [torch.randn(30, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    undisturbed, resumed = ErrorFeedback(deepcopy(codec)), ErrorFeedback(codec)
    undisturbed.send(updates[0])
    undisturbed.acknowledge()
    undisturbed.send(updates[1], 1, without)
    resumed.load_state_dict(deepcopy(undisturbed.state_dict()))
    for each in (undisturbed, resumed):
        settle(each)
    assert torch.equal(undisturbed.residual, resumed.residual) and not resumed.pending
    assert undisturbed.send(updates[2], 2, without) == resumed.send(updates[2], 2, without)


@pytest.mark.parametrize("codec", [*biased(), TopK(5, 3, bits=1)], ids=name_of)
def test_what_is_left_out_of_an_update_stays_in_the_residual_whole(codec: Codec) -> None:
    """A codec may send values that are 0 as others."""
    feedback, update = ErrorFeedback(codec), torch.tensor([5.0, -6.0, 7.0, 8.0, 1.0])
    feedback.send(update, without=[slice(0, 2), slice(2, 4)])
    feedback.acknowledge()
    assert torch.equal(feedback.residual[:4], update[:4])
    feedback.send(update)
    feedback.acknowledge()
    assert not torch.equal(feedback.residual[:4], 2 * update[:4])
