"""AdaScale between real processes."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fairseq_async.algorithms import AdaScaleGain
from fairseq_async.collective import AdaScale
from tests.helpers.rank_cases import GROUPS, Cases, Small, assert_same_bits, check_case, loss_of, members, place_in

case = CASES = Cases()


@case
def the_gain_counts_ranks_and_accumulation(rank: int) -> None:
    size, accumulation = 4, 2
    if not members(size):
        return
    model = DistributedDataParallel(Small(), process_group=GROUPS[size])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    adascale = AdaScale(optimizer, accumulation=accumulation, process_group=GROUPS[size])
    assert adascale.scale == 8
    expected = AdaScaleGain(8)
    for start in (0, 2, 4):
        single = []
        twin = Small()
        twin.load_state_dict(model.module.state_dict())
        for each in range(size):
            for step in (start, start + 1):
                loss = loss_of(twin, each, step, True)
                single.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(twin.parameters()))]))
        stacked = torch.stack(single).double()
        gain = expected.update(stacked.square().sum(1).tolist(), float(stacked.mean(0).square().sum()))
        with model.no_sync():
            (loss_of(model, place_in(size), start, True) / 2).backward()
        (loss_of(model, place_in(size), start + 1, True) / 2).backward()
        adascale.step()
        adascale.zero_grad()
        assert abs(adascale.gain / gain - 1) < 1e-4
    assert abs(adascale.gains.whole.variance / expected.variance - 1) < 1e-4 and adascale.gain > 1.05
    assert abs(adascale.scale_invariant_steps / expected.scale_invariant_steps - 1) < 1e-4
    assert_same_bits([torch.tensor([adascale.gain]), *model.parameters()], size)


@case
def sums_over_unequal_batches_are_weighted_by_their_tokens(rank: int) -> None:
    """Against σ̂² = G/(G−1)·(Σ w_i|g_i|² − |ḡ|²), of a batch of the mean size."""
    size, tokens = 3, {0: (4.0, 0.0), 1: (2.0, 5.0), 2: (3.0, 6.0)}
    if not members(size):
        return
    model = Small()
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), accumulation=2, process_group=GROUPS[size])
    single, weights = [], []
    for each in range(size):
        for step, count in enumerate(tokens[each]):
            if count:
                gradients = torch.autograd.grad(loss_of(model, each, step, True), list(model.parameters()))
                single.append(torch.cat([g.flatten() for g in gradients]).double())
                weights.append(count / 20)
    for step, count in enumerate(tokens[place_in(size)]):
        adascale.begin_pass(count)
        (loss_of(model, place_in(size), step, True) * count * 512).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=GROUPS[size])
    adascale.measure_sums(sum(tokens[place_in(size)]), factor=1 / (20 * 512), loss_scale=512)
    adascale.gains.advance()  # the step is taken: what was measured counts for the next ones
    mean = torch.stack([w * g for w, g in zip(weights, single, strict=True)]).sum(0)
    weighted = sum(w * float(g.square().sum()) for w, g in zip(weights, single, strict=True))
    variance = 5 / 4 * (weighted - float(mean.square().sum()))
    assert abs(adascale.gains.whole.variance / variance - 1) < 1e-4
    assert abs(adascale.gains.whole.square_mean / (float(mean.square().sum()) - variance / 5) - 1) < 1e-4
    assert adascale.gains.whole.scale == 5.0


@case
def nan_on_one_rank_keeps_the_averages_of_all_ranks_as_they_are(rank: int) -> None:
    if members(2):
        model = DistributedDataParallel(Small(), process_group=GROUPS[2])
        adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), process_group=GROUPS[2])
        (loss_of(model, place_in(2), 0, True) * (float("nan") if place_in(2) else 1.0)).backward()
        adascale.measure()
        adascale.gains.advance()
        assert adascale.gains.whole.estimates == 0 and adascale.gain == 1.0


@pytest.mark.parametrize("name", list(CASES))
def test_between_processes(name: str, results: dict[str, list[str]]) -> None:
    check_case(name, results)
