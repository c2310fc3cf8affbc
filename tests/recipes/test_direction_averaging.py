"""Direction averaging against its formula in float64, and by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_async.algorithms import Update
from fairseq_async.errors import ConfigurationError
from fairseq_async.method import methods
from fairseq_async.method.methods import RuleContext
from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions
from recipes.rules.baselines import HeavyBall, OuterAdam
from recipes.rules.direction_averaging import DirectionAveraging, DirectionAveragingOptions, build


def update(delta: list[float], steps: float = 1.0, tokens: float = 0.0) -> Update:
    return Update(0, 0, 0, steps, torch.tensor(delta), tokens)


def test_updates_that_point_apart_are_as_long_as_they_are() -> None:
    """The mean of (3, 0) and (0, 1) has the length 1.58; their mean length is 2, between the two directions."""
    rule, theta = DirectionAveraging(1.0, 0.0, 2, [2]), torch.zeros(2)
    assert [rule.apply(theta, update(delta)) for delta in ([3.0, 0.0], [0.0, 1.0])] == [False, True]
    assert theta.tolist() == pytest.approx([-2 / math.sqrt(2)] * 2)


def test_an_embedding_is_averaged_as_it_is() -> None:
    rule, theta = DirectionAveraging(1.0, 0.0, 2, [2], embeddings=[0]), torch.zeros(2)
    for delta in ([3.0, 0.0], [0.0, 1.0]):
        rule.apply(theta, update(delta))
    assert theta.tolist() == pytest.approx([-1.5, -0.5])


def test_an_update_weighs_its_tokens_squared_over_its_steps() -> None:
    """20²/4 = 100 and 10²/4 = 25: four fifths and one fifth. Without tokens, 4 and 1 steps are the same."""
    for first, second in (((4.0, 20.0), (4.0, 10.0)), ((4.0, 0.0), (1.0, 0.0))):
        rule, theta = DirectionAveraging(1.0, 0.0, 2, [1], embeddings=[0]), torch.zeros(1)
        rule.apply(theta, update([1.0], *first))
        rule.apply(theta, update([6.0], *second))
        assert theta.item() == pytest.approx(-2.0)


def test_a_round_of_which_nothing_is_left_moves_nothing() -> None:
    """Two that cancel have no direction; two of no steps have no weight."""
    for steps in (1.0, 0.0):
        rule, theta = DirectionAveraging(1.0, 0.9, 2, [1]), torch.zeros(1)
        assert rule.apply(theta, update([1.0], steps)) is False
        assert rule.apply(theta, update([-1.0], steps)) is True
        assert theta.item() == 0.0


@pytest.mark.parametrize("tokens", [0.0, 2.0**53])
@pytest.mark.parametrize("steps", [1e-300, 2.0**53])
def test_the_largest_and_smallest_weights_overflow_nothing(steps: float, tokens: float) -> None:
    rule, theta = DirectionAveraging(1.0, 0.0, 2, [1, 1], embeddings=[0]), torch.zeros(2)
    for delta in ([1e18, 1.0], [1e18, 3.0]):
        rule.apply(theta, update(delta, steps, tokens))
    weighs = tokens > 0 or steps > 1  # fp32 has no 1e-300: such an update counts as one of no steps
    assert theta.tolist() == pytest.approx([-1e18, -2.0] if weighs else [0.0, 0.0])


def test_an_update_of_denormal_numbers_has_a_length_and_no_direction() -> None:
    """1 / 1e-40 is more than fp32 has. The mean length of 2 and next to nothing is 1."""
    rule, theta = DirectionAveraging(1.0, 0.0, 2, [1]), torch.zeros(1)
    for delta in (1e-40, 2.0):
        rule.apply(theta, update([delta]))
    assert theta.item() == -1.0


def test_rounds_have_as_many_updates_as_there_were() -> None:
    rule, theta = DirectionAveraging(1.0, 0.0, 3, [1]), torch.zeros(1)
    rule.limit_round(1)
    assert rule.moves_parameters() and rule.apply(theta, update([1.0]))
    rule.limit_round(2)
    assert [rule.moves_parameters(ahead) for ahead in range(3)] == [False, True, False]


@given(st.integers(0, 2**31), st.integers(1, 4))
def test_it_is_the_papers_formula_with_a_nesterov_step(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes, theta = [3, 2], torch.randn(5, generator=generator)
    rule = DirectionAveraging(0.7, 0.9, count, sizes, embeddings=[1])
    reference, m = theta.double(), torch.zeros(5, dtype=torch.float64)
    for _ in range(3):
        deltas = torch.randn(count, 5, generator=generator)
        tokens = torch.randint(1, 99, (count,), generator=generator).tolist()
        for delta, n in zip(deltas, tokens, strict=True):
            rule.apply(theta, Update(0, 0, 0, 2.0, delta, float(n)))
        w = torch.tensor(tokens, dtype=torch.float64) ** 2 / 2
        v = deltas[:, :3].double()
        length = (w * v.norm(dim=1)).sum() / w.sum()
        direction = (w[:, None] * v / v.norm(dim=1, keepdim=True)).sum(0)
        embedding = (w[:, None] * deltas[:, 3:].double()).sum(0) / w.sum()
        mean = torch.cat([length * direction / direction.norm(), embedding])
        m = 0.9 * m + mean
        reference = reference - 0.7 * (0.9 * m + mean)
        assert torch.allclose(theta.double(), reference, rtol=1e-3, atol=1e-3)


@given(st.floats(0.01, 100.0), st.floats(0.01, 100.0), st.integers(1, 40), st.integers(0, 999))
def test_directions_that_cancel_move_nothing(first: float, second: float, size: int, seed: int) -> None:
    """What rounding leaves of their sum would be a step of full length, in any direction."""
    rule, theta = DirectionAveraging(1.0, 0.0, 2, [size, 1]), torch.zeros(size + 1)
    values = torch.randn(size + 1, generator=torch.Generator().manual_seed(seed))
    for factor in (first, -second):
        rule.apply(theta, Update(0, 0, 0, 1.0, factor * values))
    assert not theta.any()


def test_direction_averaging_takes_no_norm_after_an_embedding_for_one() -> None:
    """Names of fairseq's, Llama's, GPT-2's and BERT's."""
    embeddings = ["encoder.embed_tokens.weight", "model.embed_tokens.weight", "transformer.wpe.weight"]
    others = ["encoder.layernorm_embedding.weight", "bert.embeddings.LayerNorm.bias", "lm_head.weight"]
    context = RuleContext(2, [1] * 6, [*embeddings, *others])
    assert build(DirectionAveragingOptions(), context).embeddings == {0, 1, 2}


@pytest.mark.usefixtures("recipe_rules")
def test_the_rules_of_the_recipe_are_a_flag_away() -> None:
    """Named in FAIRSEQ_ASYNC_PLUGINS, as any rule of a user."""
    chosen = methods.parse(LocalSGDOptions, {"outer": "direction_averaging", "quorum": 2}, "here")
    assert isinstance(chosen, methods.outer_rule("direction_averaging").options)
    with pytest.raises(ConfigurationError, match="outer direction_averaging does not go with --fragments"):
        options = {"outer": "direction_averaging", "fragments": 2}
        local_sgd_spec(methods.parse(LocalSGDOptions, options, "here"), 2, [], None, {})
    for name in ("heavy_ball", "adam", "adamw"):
        options = methods.parse(LocalSGDOptions, {"outer": name, "outer_lr": 0.5}, "here")
        built = methods.outer_rule(name).build(options, RuleContext(2, [1]))
        assert isinstance(built, HeavyBall | OuterAdam) and built.lr == 0.5
