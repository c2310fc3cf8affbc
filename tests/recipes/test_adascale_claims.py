"""The program that measures AdaScale's claims."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.bench import adascale_claims
from scripts.bench.adascale_claims import Bench, best_rate, gain_rows, keep_to_limit, row
from scripts.bench.adascale_runs import Optimizer, Outcome, Rule, Run, gain_of_many, gradients, outcome, rate
from scripts.bench.batches import Batches, Name
from scripts.bench.report import Report

SHORT = Run(Optimizer.SGD, 0.1, seed=1, steps=6)


@pytest.fixture(scope="module")
def batches(data: Path) -> Batches:
    return Batches(Name.BYTES, data, seed=1, tokens=64)


def test_the_gain_of_many_batches_is_that_worked_out_by_hand() -> None:
    """Gradients 3 and 1: variance 2, square of the mean 4 - 2/2 = 3, so r = (2 + 3)/(2/4 + 3)."""
    means = [torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.0])]
    assert gain_of_many(means, scale=4, each=1) == pytest.approx(5 / 3.5)
    # as means of two batches each: variance 4, and of the mean 4 - 4/4 = 3
    assert gain_of_many(means, scale=4, each=2) == pytest.approx(7 / 4)
    assert gain_of_many([torch.ones(2), -torch.ones(2)], scale=4, each=1) == pytest.approx(4)  # noise alone


def test_gradients_are_divided_by_adams_denominator_and_unseen_elements_do_not_count(batches: Batches) -> None:
    parameters = list(batches.fresh().parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.0, betas=(0.9, 0.98), eps=1e-8)
    batches.loss(0).backward()
    seen = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
    optimizer.step()  # v̂ is now the square of this gradient
    (own,) = gradients(batches, range(0, 1), optimizer)
    where = seen.abs() > 1e-4
    assert where.any() and not seen.all()
    torch.testing.assert_close(own[where], seen[where].sign(), atol=1e-3, rtol=0)
    assert not own[seen == 0].any()


def test_with_one_batch_in_a_step_every_rule_is_plain_training(batches: Batches) -> None:
    losses = [outcome(replace(SHORT, rule=rule, iterations=6), batches).loss for rule in Rule]
    optimizer = torch.optim.SGD(batches.fresh().parameters(), lr=1.0, momentum=0.9)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = rate(0.1, step / 6)
        optimizer.zero_grad()
        batches.loss(step).backward()
        optimizer.step()
    assert losses == pytest.approx([batches.score()] * 3, rel=1e-6)


def test_a_pass_over_several_batches_has_the_mean_of_their_gradients(batches: Batches) -> None:
    batches.fresh()
    one, other = batches.gradients([4, 5])
    both = torch.autograd.grad(batches.loss(4, 5), list(batches.problem.model.parameters()))
    for first, second, mean in zip(one, other, both, strict=True):
        torch.testing.assert_close(mean, (first + second) / 2, atol=1e-6, rtol=1e-4)


def test_the_number_of_batches_changes_during_a_run_and_the_gain_is_compared(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, loss = list[tuple[int, ...]](), batches.loss

    def noted(*numbers: int) -> torch.Tensor:
        taken.append(numbers)
        return loss(*numbers)

    monkeypatch.setattr(batches, "loss", noted)
    found = outcome(replace(SHORT, batches=(1, 2), reference=16), batches)
    trained = [numbers[0] for numbers in taken if len(numbers) == 1]
    assert trained == list(range(3 + 2 * (found.iterations - 3)))  # three steps of one batch, then two in each
    of_reference = [number for numbers in taken if len(numbers) > 1 for number in numbers]
    assert len(set(of_reference)) == 16 * len(found.gains) and max(of_reference) < 0
    assert len(found.gains) >= 4 and all(1 <= each <= 2 for pair in found.gains for each in pair)


def test_a_run_that_diverges_has_no_loss(batches: Batches) -> None:
    found = outcome(replace(SHORT, lr=1e30, rule=Rule.LINEAR, batches=(2,), iterations=6), batches)
    assert math.isnan(found.loss) and found.iterations < 6
    line = row({}, [found, Outcome(1.0, 6)], [Outcome(1.0, 6)] * 2)
    assert line["loss"] == line["of one batch"] == math.inf


def test_a_loss_that_is_a_fifth_lower_misses_the_claim_too(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("a test")
    for ratio in (0.8, 0.99, 1.01, 1.2, math.inf):
        keep_to_limit(report, "a run", ratio)
    assert [bound.holds for bound in report.bounds] == [False, True, True, False, False]
    assert "loss below that of one batch, as a share of it: 0.2 (at most 0.02: BROKEN)" in capsys.readouterr().out


def test_ratios_are_of_runs_with_the_same_seed_and_have_a_standard_error() -> None:
    single = [Outcome(1.0, 8), Outcome(2.0, 8)]
    line = row({"θ": "none"}, [Outcome(1.1, 2), Outcome(2.6, 4)], single)
    assert (line["iterations"], line["of one batch"]) == pytest.approx((3.0, 1.2))
    assert line["± of one batch"] == pytest.approx(0.1)  # 1.1 and 1.3
    (first,) = gain_rows([Outcome(1.0, 2, [(3.0, 2.0)]), Outcome(1.0, 2, [(1.0, 2.0)])])
    assert (first["gain"], first["relative difference"], first["± relative difference"]) == pytest.approx((2, 0, 0.5))


def test_what_was_run_is_kept_and_a_best_rate_at_the_edge_of_the_grid_breaks_a_bound(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adascale_claims, "SEEDS", (1, 2))
    monkeypatch.setitem(adascale_claims.RATES, Optimizer.SGD, (0.03, 0.1, 0.3))
    bench = Bench(data, tmp_path, steps=6)
    for lr, loss in zip((0.03, 0.1, 0.3), (2.0, 1.0, 3.0), strict=True):
        for run in bench.runs(Optimizer.SGD, lr):
            bench._keep(run, Outcome(loss, 6, [(1.5, 2.0)]))
    again, report = Bench(data, tmp_path, steps=6), Report("a test")  # which has no process, and runs nothing
    assert again.seeds(Optimizer.SGD, 0.1) == [Outcome(1.0, 6, [(1.5, 2.0)])] * 2
    assert best_rate(again, report, Optimizer.SGD) == 0.1
    monkeypatch.setitem(adascale_claims.RATES, Optimizer.SGD, (0.1, 0.3))
    assert best_rate(again, report, Optimizer.SGD) == 0.1
    assert [bound.holds for bound in report.bounds] == [True, False]
