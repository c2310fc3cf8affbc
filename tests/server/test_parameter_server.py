"""The state machine, driven by hand."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_async.algorithms import (
    FragmentedRule,
    HybridAccumulation,
    NesterovMomentum,
    StalenessPolicy,
    Update,
    fragments_of,
)
from fairseq_async.errors import RefusedError
from fairseq_async.protocol import Status
from fairseq_async.server import ParameterServer


def server(n: int = 1, size: int = 2, **options: Any) -> ParameterServer:
    parameters = torch.zeros(size)
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), n)
    return ParameterServer(parameters, rule, **options)


def update(worker: int, sequence: int, value: float, base: int = 0, weight: float = 1.0, size: int = 2) -> Update:
    return Update(worker, sequence, base, weight, torch.full((size,), value))


def test_a_pull_is_a_copy_of_one_version() -> None:
    it = server()
    before = it.pull(0)
    it.push(update(0, 0, 1.0))
    after = it.pull(0)
    assert (before.version, after.version) == (0, 1)
    assert before.values.tolist() == [0, 0] and after.values.tolist() == [-1, -1]


def test_staleness_counts_the_steps_since_the_pull() -> None:
    it = server()
    assert [it.push(update(0, i, 1.0, base=0)).staleness for i in range(3)] == [0, 1, 2]
    assert it.push(update(1, 0, 1.0, base=3)).staleness == 0


def test_an_update_that_is_held_again_is_as_stale_as_when_it_came() -> None:
    it = server()
    for sequence in range(3):
        it.push(update(0, sequence, 1.0, base=sequence))
    it.hold(update(1, 0, 1.0, base=0), version=1)
    assert [(each.staleness, each.version) for each in it.complete_round()] == [(1, 4)]


def test_an_update_that_comes_twice_is_applied_once() -> None:
    it = server()
    assert it.push(update(0, 0, 1.0)).status is Status.APPLIED
    assert it.push(update(0, 0, 1.0)).status is Status.DUPLICATE
    assert it.push(update(1, 0, 1.0)).status is Status.APPLIED
    assert it.parameters.tolist() == [-2, -2] and it.version == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused_and_counted_and_change_nothing(bad: float) -> None:
    it = server(n=2)
    it.push(update(0, 0, 1.0))
    receipt = it.push(Update(1, 0, 0, 1.0, torch.tensor([0.0, bad])))
    assert receipt.status is Status.REFUSED and it.refused == {1: 1}
    assert it.version == 0 and it.parameters.tolist() == [0, 0]
    it.push(update(1, 1, 3.0))
    assert it.version == 1 and it.parameters.tolist() == [-2, -2]


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, 2.0**54, 1e39])
def test_a_weight_that_fp32_cannot_multiply_with_is_refused(weight: float) -> None:
    it = server()
    with pytest.raises(RefusedError, match=f"weight {re.escape(str(weight))}: it must be a number from 0 to {2**53}"):
        it.push(update(0, 0, 1.0, weight=weight))
    assert it.version == 0 and it.push(update(0, 0, 1.0, weight=2.0**53)).status is Status.APPLIED


def test_starts_are_ahead_along_the_last_step_also_while_gradients_wait_for_the_next() -> None:
    parameters, ahead = torch.zeros(2), torch.empty(2)
    it = ParameterServer(parameters, HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), 2), keeps_last_step=True)
    for number in range(3):  # the third waits for a fourth
        it.push(update(0, number, 1.0))
    it.write_ahead(ahead, 1.0)
    assert it.parameters.tolist() == [-1, -1] and ahead.tolist() == [-2, -2]


def test_a_finished_run_takes_no_more_steps() -> None:
    it = server(last_version=1)
    assert it.push(update(0, 0, 1.0)).status is Status.APPLIED
    assert it.push(update(1, 0, 1.0)).status is Status.FINISHED
    assert it.version == 1 and it.parameters.tolist() == [-1, -1]


def test_the_barrier_applies_a_round_in_the_order_of_the_workers() -> None:
    it = server(n=2, holds=True)
    assert it.push(update(1, 0, 3.0)).status is Status.HELD
    assert it.push(update(1, 0, 3.0)).status is Status.HELD  # sent again while it waits
    assert it.push(update(0, 0, 1.0)).status is Status.HELD and it.version == 0
    assert [(r.worker, r.status) for r in it.complete_round()] == [(0, Status.APPLIED), (1, Status.APPLIED)]
    assert it.complete_round() == [] and it.version == 1 and it.parameters.tolist() == [-2, -2]


def test_the_update_of_a_worker_that_died_behind_the_barrier_is_withdrawn() -> None:
    it = server(n=2, holds=True)
    it.push(update(0, 0, 9.0))
    it.withdraw(0)
    assert it.push(update(1, 0, 1.0)).status is Status.HELD and it.held == {1}
    it.push(update(0, 0, 3.0))
    it.complete_round()
    assert it.version == 1 and it.parameters.tolist() == [-2, -2]


def test_the_order_of_arrival_does_not_change_a_bit_behind_the_barrier() -> None:
    torch.manual_seed(1)
    sent = [Update(w, 0, 0, float(w + 1), torch.randn(50)) for w in range(4)]

    def result(order: list[int]) -> torch.Tensor:
        it = server(n=4, size=50, holds=True)
        for worker in order:
            it.push(sent[worker])
        it.complete_round()
        return it.parameters

    assert torch.equal(result([0, 1, 2, 3]), result([3, 1, 0, 2]))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.floats(-1, 1, width=16)), max_size=40),
    st.integers(0, 40),
)
def test_any_sequence_of_messages_leaves_what_a_simple_model_says(
    n: int, sent: list[tuple[int, int, float]], stop: int
) -> None:
    """Resent, out of order, stopped and restored in the middle: each update counts once."""
    it, seen, accepted = server(n), dict[int, int](), list[float]()
    may_skip: set[int] = set()
    for index, (worker, sequence, value) in enumerate(sent):
        if index == stop:
            restored = server(n)
            restored.load_state_dict(it.state_dict())
            it, may_skip = restored, {0, 1, 2}
        if sequence > seen.get(worker, -1) + 1 and worker not in may_skip:
            with pytest.raises(RefusedError, match=f"the next of worker {worker} is {seen.get(worker, -1) + 1}"):
                it.push(update(worker, sequence, value))
            continue
        fresh = sequence > seen.get(worker, -1)
        assert (it.push(update(worker, sequence, value)).status is Status.APPLIED) == fresh
        if fresh:
            seen[worker] = sequence
            may_skip.discard(worker)
            accepted.append(value)
    steps = len(accepted) // n
    assert it.version == steps and it.sequences == seen
    assert it.parameters[0].item() == pytest.approx(-sum(accepted[: steps * n]) / n, abs=1e-5)


def compensated() -> ParameterServer:
    return server(staleness=StalenessPolicy(compensation=1.0))


def test_delay_compensation_compares_with_the_start_of_the_version_that_the_update_names() -> None:
    """The copy is of then, and an update from another version, as after a restart, is applied as it is."""
    it = compensated()
    it.note_pull(0, it.parameters)
    it.push(update(1, 0, 1.0))
    stale = it.push(update(0, 0, 2.0, base=0))
    assert stale.staleness == 1 and it.parameters.tolist() == [1, 1], "-1 - (2 + 1·2·2·(-1 - 0))"
    it.push(update(0, 1, 2.0, base=1))
    assert it.parameters.tolist() == [-1, -1]


def test_after_a_restart_each_worker_may_skip_numbers_once() -> None:
    """What it had sent to the server before this one, after the snapshot, was acknowledged and is lost."""
    it, again = server(), server()
    it.push(update(0, 0, 1.0)), it.push(update(1, 0, 1.0))
    again.load_state_dict(it.state_dict())
    for worker in (0, 1):
        assert again.push(update(worker, 3, 1.0)).status is Status.APPLIED
        with pytest.raises(RefusedError, match=f"sequence number 6: the next of worker {worker} is 4"):
            again.push(update(worker, 6, 1.0))
    again.load_state_dict(it.state_dict())
    assert again.push(update(0, 3, 1.0)).status is Status.APPLIED, "another restart, another number to skip"


def test_an_update_that_comes_again_counts_as_its_first_copy_did() -> None:
    it = server()
    for sequence, value in enumerate((1.0, math.nan, math.nan, 1.0)):
        assert it.takes(it.push(update(0, sequence, value))) is math.isfinite(value)
        assert it.takes(it.push(update(0, sequence, 1.0))) is math.isfinite(value), "a duplicate"
    assert it.refused == {0: 2} and it.rejected == {0: 2} and it.sequences == {0: 3}
    assert it.takes(it.push(update(1, 0, 1.0))) and it.takes(it.push(update(1, 0, 1.0)))


def test_a_fragment_is_of_the_version_at_which_it_changed_last() -> None:
    parts = fragments_of([2, 3, 1], 3)
    rule = FragmentedRule(parts, [NesterovMomentum(1.0, 0.0, 1) for _ in parts])
    it = ParameterServer(torch.zeros(6), rule)
    assert [it.changed_at(number) for number in range(4)] == [0, 0, 0, 0]
    for sequence in range(4):
        it.push(Update(0, sequence, it.version, 1.0, torch.ones(parts[sequence % 3].size)))
    assert [it.changed_at(number) for number in range(4)] == [4, 2, 3, 4]
    assert it.parameters.tolist() == [-2.0, -2.0, -1.0, -1.0, -1.0, -1.0]
    state, again = it.state_dict(), ParameterServer(torch.zeros(6), rule)
    again.load_state_dict(state)
    assert [again.changed_at(number) for number in range(3)] == [4, 2, 3]
    del state["changed_at"]  # as in a snapshot of before: any of them may have changed in the last version
    again.load_state_dict(state)
    assert [again.changed_at(number) for number in range(3)] == [4, 4, 4]
