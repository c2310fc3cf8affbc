"""The real server and rules in a simulated trial: equal to what is known, repeatable, resumable."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.algorithms import adasum
from fairseq_async.simulation.problems.gaussians import Gaussians
from fairseq_async.simulation.rules import AdaScaleRule
from fairseq_async.worker.shards import ShardOrder, shard_sizes
from tests.helpers.simulations import BASE, DN, METHODS, Log, experiment, finish, run, trial


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path: Path, method: dict[str, Any]) -> None:
    first, second = run(tmp_path, method)[0], run(tmp_path, method)[0]
    assert first.finished and torch.equal(first.parameters, second.parameters)
    assert not torch.equal(first.parameters, run(tmp_path, method, seed=2)[0].parameters)


def test_a_synchronous_simulation_is_plain_training_on_the_workers_batches(tmp_path: Path) -> None:
    given = experiment(tmp_path, methods={"sync": METHODS["synchronous"]}, optimizer={"type": "adamw", "lr": 0.01})
    simulated = finish(trial(given))
    torch.manual_seed(1)
    problem = Gaussians(1, torch.device("cpu"), samples=256, hidden=8)
    order = ShardOrder(shard_sizes(256, 3), seed=1)
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(12):
        optimizer.zero_grad()
        rates = [(step + 1) / 3 if step < 3 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 3) / 9))]
        optimizer.param_groups[0]["lr"] = 0.01 * rates[0]
        for worker in range(3):
            (problem.loss(problem.batch(order.indices(worker, 4 * step, 4)))[0] / 3).backward()
        optimizer.step()
    plain = torch.cat([parameter.detach().flatten() for parameter in problem.model.parameters()])
    assert torch.allclose(simulated, plain, rtol=0, atol=1e-6)


def test_delayed_nesterov_with_equal_workers_and_grace_is_diloco(tmp_path: Path) -> None:
    equal = {"cluster": {"workers": 4, "seconds_per_step": 0.7}}
    ours, log = run(tmp_path, DN | {"grace_period": 0.0, "dynamic_local_steps": True}, **equal)
    theirs, _ = run(tmp_path, METHODS["DiLoCo"], **equal)
    assert torch.allclose(ours.parameters, theirs.parameters, rtol=0, atol=1e-6)
    assert len(log.events) == 16 and ours.clock.now == pytest.approx(theirs.clock.now)


def test_no_time_goes_by_waiting_for_workers_that_cannot_come_in_the_grace_period(tmp_path: Path) -> None:
    """Two equal workers, one of which begins later and stays behind."""
    shifted = {"workers": 2, "seconds_per_step": 1.0, "absences": [{"worker": 1, "from": 0, "to": 2.2}]}
    _, log = run(tmp_path, DN | {"grace_period": 1.0}, cluster=shifted)
    _, plain = run(tmp_path, DN, cluster=shifted)
    assert log.of(0)[0] == 4.0 and plain.of(0)[0] == 3.0  # in the first round the other may come at any moment
    assert [time - 1.0 for time in log.of(0)][1:] == plain.of(0)[1:] and log.of(1) == plain.of(1)


def test_a_method_does_something_and_training_helps(tmp_path: Path) -> None:
    for method in (METHODS["hybrid"], DN):
        simulated = trial(experiment(tmp_path, methods={"it": method}, steps=150))
        before = simulated.evaluate()
        finish(simulated)
        assert simulated.evaluate() < 0.8 * before


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_simulation_that_was_saved_goes_on_to_the_same_bits(tmp_path: Path, method: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"cluster": BASE["cluster"] | {"absences": [{"worker": 1, "from": 5.2, "to": 9.0}]}}
    given = experiment(tmp_path, methods={"it": method}, **changes)
    log = Log()
    straight = trial(given, log)
    happened = 0
    while straight.advance():
        happened += 1
    for stop in (1, happened // 3, happened // 2, happened - 1):
        first, rest = trial(given), Log()
        for _ in range(stop):
            first.advance()
        buffer = io.BytesIO()
        torch.save(first.state_dict(), buffer)
        buffer.seek(0)
        second = trial(given, rest)
        second.load_state_dict(torch.load(buffer, weights_only=True))
        assert torch.equal(finish(second), straight.parameters)
        assert second.clock.now == straight.clock.now
        ends = [(time, receipt.worker, receipt.norm) for time, receipt, _ in rest.events]
        assert ends == [(time, receipt.worker, receipt.norm) for time, receipt, _ in log.events][-len(ends) :]


def test_workers_share_one_model_and_keep_one_copy_and_their_inner_state(tmp_path: Path) -> None:
    simulated, _ = run(tmp_path, DN)
    size = simulated.model.layout.size
    for worker in simulated.workers:
        assert worker.optimizer is not None
        kept = sum(t.numel() for state in worker.optimizer.state.values() for t in state.values() if t.numel() > 1)
        ones = sum(t.numel() == 1 for p in simulated.model.parameters for t in [p])
        assert worker.delta.numel() == size and kept == 2 * (size - ones)


def test_adasum_combines_the_ranks_steps_tensor_by_tensor(tmp_path: Path) -> None:
    plain = {"type": "sgd", "lr": 0.1}
    given = experiment(
        tmp_path, methods={"it": {"method": "adasum"}}, steps=1, optimizer=plain, schedule={}, cluster={"workers": 3}
    )
    simulated = trial(given)
    before = simulated.parameters.clone()
    finish(simulated)
    torch.manual_seed(1)
    problem = Gaussians(1, torch.device("cpu"), samples=256, hidden=8)
    order, model = ShardOrder(shard_sizes(256, 3), seed=1), problem.model
    steps = []
    for worker in range(3):
        model.zero_grad()
        problem.loss(problem.batch(order.indices(worker, 0, 4)))[0].backward()
        steps.append([0.1 * p.grad for p in model.parameters() if p.grad is not None])
    expected = torch.cat([adasum(list(tensors)).flatten() for tensors in zip(*steps, strict=True)])
    assert torch.allclose(before - simulated.parameters, expected, rtol=0, atol=1e-6)


def test_adasums_last_round_counts_also_where_it_has_no_steps_for_all_ranks(tmp_path: Path) -> None:
    """Two rounds of 5 steps leave 6 of the 36 steps: 5 for one rank, 1 for another, none for the third."""
    plain = {"type": "sgd", "lr": 0.1}
    simulated = trial(experiment(tmp_path, methods={"it": METHODS["adasum"] | {"local_steps": 5}}, optimizer=plain))
    while simulated.version < 2:
        assert simulated.advance()
    before = simulated.parameters.clone()
    left = [worker.delta.clone() for worker in simulated.workers[:2]]
    finish(simulated)
    tensors = zip(*(simulated.model.layout.views(delta) for delta in left), strict=True)
    expected = torch.cat([adasum(pair).flatten() for pair in tensors])
    assert torch.allclose(before - simulated.parameters, expected, rtol=0, atol=1e-6) and expected.any()
    assert simulated.version == 3 and simulated.steps == 36


def test_adascale_steps_by_the_gain_of_its_ranks_and_ends_at_its_scale_invariant_steps(tmp_path: Path) -> None:
    simulated, log = run(tmp_path, METHODS["adascale"] | {"smoothing": 0.0}, steps=20)
    events = zip(log.events, log.extra, strict=True)
    gains = [extra["gain"] for (_, receipt, _), extra in events if receipt.worker == 2]
    assert isinstance(simulated.rule, AdaScaleRule)
    assert sum(gains) == pytest.approx(simulated.rule.gain.scale_invariant_steps)
    assert sum(gains[:-1]) < 20 <= sum(gains) and all(1 <= gain <= 3 for gain in gains) and max(gains) > 1.05
