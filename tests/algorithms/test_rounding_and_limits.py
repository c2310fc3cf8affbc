"""Numbers that come out just beside a limit: a zero step, a quotient of whole numbers, vectors that cancel."""

import pytest
import torch

from fairseq_async.algorithms import BufferedNesterov, DelayedNesterov, NormGate, Update, adasum, local_steps
from fairseq_async.algorithms.adasum import gram, tree_weights
from fairseq_async.algorithms.lamb import Lamb


def test_lamb_leaves_a_tensor_where_it_is_whose_update_is_zero() -> None:
    """An embedding whose word has not come yet: |θ| / |u| would be 5 / 0."""
    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = Lamb([parameter], lr=0.1)
    parameter.grad = torch.zeros(2)
    optimizer.step()
    assert parameter.tolist() == [3.0, 4.0]
    parameter.grad = torch.tensor([1.0, 0.0])
    optimizer.step()
    assert parameter.isfinite().all() and parameter[0] < 3.0


@pytest.mark.parametrize(("slow", "fast", "maximum", "steps"), [(3, 11, 55, 15), (3, 11, 54, 14), (1, 3, 300, 100)])
def test_local_steps_round_down_but_not_below_a_whole_number(slow: int, fast: int, maximum: int, steps: int) -> None:
    """In floating point 3 / 11 · 55 is below 15."""
    assert local_steps({0: float(fast), 1: float(slow)}, maximum) == {0: maximum, 1: steps}


def test_a_step_on_a_buffer_that_holds_more_than_its_size_takes_the_mean_of_all_in_it() -> None:
    """Three updates wait for a fourth when two of the four workers leave."""
    rule, theta = BufferedNesterov(lr=1.0, momentum=0.5, buffer_size=4), torch.zeros(1)
    for value in (1.0, 2.0, 3.0):
        assert not rule.apply(theta, Update(0, 0, 0, 1.0, torch.tensor([value])))
    rule.limit_round(2)
    assert rule.apply(theta, Update(0, 0, 0, 1.0, torch.tensor([6.0])))
    # mean = 12/4 = 3, m = 3, θ = −(0.5·3 + 3)
    assert theta.item() == -4.5 and rule.state_dict()["momentum_buffer"].item() == 3.0


def test_delayed_nesterovs_momentum_takes_the_mean_of_all_in_a_buffer_of_more_workers() -> None:
    before, theta = DelayedNesterov(lr=1.0, momentum=0.5, delay=4), torch.zeros(1)
    for value in (1.0, 2.0, 3.0):
        before.apply(theta, Update(0, 0, 0, 1.0, torch.tensor([value])))
    assert theta.item() == -1.5  # −(1 + 2 + 3)/4
    after = DelayedNesterov(lr=1.0, momentum=0.5, delay=2)
    after.load_state_dict(before.state_dict())
    assert after.apply(theta, Update(0, 0, 0, 1.0, torch.tensor([6.0])))
    # m = (1 + 2 + 3 + 6)/4 = 3, θ = −1.5 − 0.5·3 − 6/2
    assert theta.item() == -6.0 and after.state_dict()["momentum_buffer"].item() == 3.0


@pytest.mark.parametrize("size", [1.0, 1e9, 1e-20])
def test_what_cancels_in_adasums_tree_has_no_part_in_the_weights_of_the_others(size: float) -> None:
    """0 and 1 leave s, 2 and 3 leave −s: of their sum only rounding errors are left, and those are no direction."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        a, b, c, d, e, f = size * torch.randn(6, 33, generator=generator, dtype=torch.float64)
        left = [a, b, -a, -b]
        right = [c, d, e, f]
        weights = tree_weights(gram([*left, *right]))
        torch.testing.assert_close(weights[4:], tree_weights(gram(right)), rtol=1e-12, atol=0.0)
        torch.testing.assert_close(weights[:4], tree_weights(gram(left)), rtol=1e-12, atol=0.0)


def test_a_short_pair_beside_long_vectors_is_not_taken_for_rounding() -> None:
    """Rounding is measured by the vectors that a sum has in it: the others do not make 1 negligible."""
    short, long = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1e9], dtype=torch.float64)
    vectors = [short, short, long, long]
    assert tree_weights(gram(vectors)).tolist() == [0.5] * 4
    assert adasum(vectors).tolist() == [1.0, 1e9]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_new_worker_is_measured_by_the_last_101_norms_of_all(restarts: bool) -> None:
    """Of 101 norms of 1 and 51 of 9, the last 101 have the median 9."""
    gate = NormGate(10.0)
    for norm in (*[1.0] * 101, *[9.0] * 51):
        gate.note(0, norm)
        if restarts:
            state, gate = gate.state_dict(), NormGate(10.0)
            gate.load_state_dict(state)
    assert not gate.refuses(1, 81.0) and gate.refuses(1, 91.0)
