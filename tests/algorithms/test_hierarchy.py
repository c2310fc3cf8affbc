"""HALoS's two levels against a reference in float64 that is written from the paper, and by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import DelayedNesterov, Region, Update
from tests.helpers.references import HALoS64

# the paper's rates are those of one arrival: ours, of N together, are N times as large
LOCAL, GLOBAL = (0.2 * 16, 0.9, 16), (0.15 * 2, 0.5, 2)


def update(worker: int, delta: Tensor) -> Update:
    return Update(worker, 0, 0, 1.0, delta)


class Ours:
    """Two regions and a global server with our rules; messages take no time."""

    def __init__(self, theta: Tensor, every: int, alpha: float) -> None:
        self.theta, self.rule = theta.clone(), DelayedNesterov(*GLOBAL)
        self.locals = [(theta.clone(), DelayedNesterov(*LOCAL), Region(theta, every, alpha)) for _ in range(2)]

    def arrive(self, region: int, delta: Tensor) -> None:
        parameters, rule, level = self.locals[region]
        rule.apply(parameters, update(0, delta))
        level.note_update()
        if level.due:
            self.rule.apply(self.theta, update(region, level.send(parameters)))
            level.merge(parameters, self.theta)


@given(st.integers(0, 2**31), st.integers(1, 20), st.sampled_from([0.0, 0.25, 0.8]))
def test_two_regions_are_the_papers_formulas(seed: int, every: int, alpha: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(5, generator=generator)
    paper, ours = HALoS64(theta, 2, LOCAL, GLOBAL, every, alpha), Ours(theta, every, alpha)
    for region in torch.randint(2, (60,), generator=generator).tolist():
        delta = torch.randn(5, generator=generator)
        paper.arrive(region, delta)
        ours.arrive(region, delta)
        assert torch.allclose(ours.theta.double(), paper.above.theta, rtol=1e-4, atol=1e-4)
        for (parameters, _, _), expected in zip(ours.locals, paper.regions, strict=True):
            assert torch.allclose(parameters.double(), expected.theta, rtol=1e-4, atol=1e-4)


def test_a_round_trip_by_hand() -> None:
    """θ_r goes from 4 to 2: δ = 2. The answer, −4, comes when θ_r is 1: 0.75·1 − 0.25·4 = −0.25, from where the next δ
    is counted: the 1 between is in none."""
    parameters = torch.tensor([4.0])
    region = Region(parameters, updates=2, merge=0.25)
    region.note_update()
    assert not region.due
    region.note_update()
    parameters.fill_(2.0)
    assert region.due and region.send(parameters).item() == 2.0
    region.note_update()
    region.note_update()
    parameters.fill_(1.0)
    assert not region.due, "one is on its way"
    region.merge(parameters, torch.tensor([-4.0]))
    assert parameters.item() == -0.25 and (region.count, region.waiting) == (0, False)
    assert region.send(torch.tensor([-1.0])).item() == 0.75


def test_a_region_that_merges_nothing_goes_the_way_of_its_rule_alone_to_the_bit() -> None:
    torch.manual_seed(0)
    alone, rule = torch.randn(5), DelayedNesterov(*LOCAL)
    ours = Ours(alone, every=3, alpha=0.0)
    for _ in range(40):
        delta = torch.randn(5)
        rule.apply(alone, update(0, delta))
        ours.arrive(0, delta)
        ours.arrive(1, torch.randn(5))
        assert torch.equal(ours.locals[0][0], alone)


def test_a_region_goes_on_from_its_state() -> None:
    region, theta = Region(torch.zeros(2), updates=3), torch.ones(2)
    region.note_update()
    region.send(theta)
    other = Region(torch.ones(2), updates=3)
    other.load_state_dict(region.state_dict())
    assert (other.count, other.waiting) == (1, True) and torch.equal(other.send(theta), region.send(theta))


@pytest.mark.parametrize(("updates", "merge", "named"), [(0, 0.5, "updates is 0"), (1, 1.5, "merge is 1.5")])
def test_a_value_out_of_its_range_is_named(updates: int, merge: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Region(torch.zeros(1), updates, merge)
