"""Simulated workers that exchange a model in fragments."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment
from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import Assignment
from fairseq_async.simulation.fragments import FragmentedWork
from fairseq_async.simulation.problems.gaussians import Gaussians
from fairseq_async.simulation.workers import SharedModel, StreamedParameters
from tests.helpers.references import DelayedNesterov64
from tests.helpers.simulations import DN, Log, experiment, finish, run, trial

STREAMING: dict[str, Any] = {
    "method": "local_sgd",
    "outer": "delayed_nesterov",
    "local_steps": 4,
    "fragments": 2,
    "fragment_delay": 1,
}
PLAIN: dict[str, Any] = {"optimizer": {"type": "sgd", "lr": 0.1}, "schedule": {}}
EQUAL: dict[str, Any] = {"cluster": {"workers": 2, "seconds_per_step": 1.0}}


@pytest.mark.parametrize("outer", ["delayed_nesterov", "mla", "heloco"])
def test_one_fragment_without_delay_is_the_whole_model_to_the_bit(tmp_path: Path, outer: str) -> None:
    """Through the code of fragments, which such options do not take by themselves."""
    method = DN | {"outer": outer, "dynamic_local_steps": True}
    plain, log = run(tmp_path, method)
    forced = trial(experiment(tmp_path, methods={"it": method}))
    whole = forced.model.layout.fragments(1)
    forced.fragments = FragmentedWork(whole, 0, forced.model, forced.rate, clip_norm=0.0)
    assert torch.equal(finish(forced), plain.parameters)
    assert forced.clock.now == plain.clock.now
    assert [receipt.staleness for _, receipt, _ in log.events].count(0) < len(log.events)


class Streaming64:
    """Streaming local SGD in float64, step by step: two equal workers, of which 0 comes first."""

    def __init__(self, theta: Tensor, fragments: tuple[Fragment, ...], delay: int, turn: int) -> None:
        self.fragments, self.delay, self.turn = fragments, delay, turn
        self.servers = [DelayedNesterov64(fragment.of(theta), 0.7, 0.9, 2) for fragment in fragments]
        self.local = [theta.double().clone() for _ in range(2)]
        self.anchor = [theta.double().clone() for _ in range(2)]
        self.problem = Gaussians(1, torch.device("cpu"), samples=256, hidden=8)
        self.problem.model.double()

    def step(self, worker: int, samples: Sequence[int]) -> None:
        parameters = list(self.problem.model.parameters())
        torch.nn.utils.vector_to_parameters(self.local[worker], parameters)
        features, labels = self.problem.batch(samples)
        loss = self.problem.loss((features.double(), labels))[0]
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
        self.local[worker] = self.local[worker] - 0.1 * gradient

    def run(self, batches: list[Sequence[int]]) -> Tensor:
        """The batches of worker 0's turn, of worker 1's, and so on."""
        turns, drawn = len(batches) // (2 * self.turn), iter(batches)
        given: list[Tensor] = [torch.empty(0)] * 2
        sent: list[Tensor] = [torch.empty(0)] * 2
        for turn in range(turns):
            for worker in range(2):
                for step in range(self.turn):
                    self.step(worker, next(drawn))
                    if turn and step + 1 == self.delay:
                        at = self.fragments[(turn - 1) % len(self.fragments)].elements
                        self.anchor[worker][at] = given[worker]
                        self.local[worker][at] += given[worker] - sent[worker]
            at = self.fragments[turn % len(self.fragments)].elements
            for worker in range(2):
                delta = self.anchor[worker][at] - self.local[worker][at]
                sent[worker] = self.local[worker][at].clone()
                given[worker] = self.servers[turn % len(self.fragments)].arrive(delta).clone()
        return torch.cat([server.theta for server in self.servers])


def test_the_simulation_is_a_reference_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = trial(experiment(tmp_path, methods={"it": STREAMING}, **PLAIN, **EQUAL))
    fragments = simulated.model.layout.fragments(2)
    reference = Streaming64(simulated.parameters, fragments, delay=1, turn=2)
    batches: list[Sequence[int]] = []
    indices = simulated.model.order.indices

    def noted(shard: int, start: int, count: int) -> Sequence[int]:
        batches.append(indices(shard, start, count))
        return batches[-1]

    monkeypatch.setattr(simulated.model.order, "indices", noted)
    after = finish(simulated)
    assert len(batches) == 24
    assert torch.allclose(after.double(), reference.run(batches), rtol=0, atol=1e-5)


def test_steps_beside_an_exchange_count_where_a_slow_worker_is_to_take_fewer(tmp_path: Path) -> None:
    """The delay is two steps, and a worker of a fourth of the speed is given one."""
    method = STREAMING | {"fragment_delay": 2, "dynamic_local_steps": True}
    _, log = run(tmp_path, method, cluster={"workers": 2, "seconds_per_step": [1.0, 4.0]}, **PLAIN)
    assert {(report.local_steps, receipt.weight) for _, receipt, report in log.events} == {(2, 2.0)}


def test_steps_beside_an_exchange_go_on_in_the_data_and_in_the_schedule() -> None:
    given = Assignment(local_steps=4, offset=5, progress=3.0, progress_per_step=2.0)
    streamed = StreamedParameters(torch.zeros(1), torch.zeros(1), given, done=4)
    assert streamed.meanwhile == replace(given, offset=9, progress=11.0)


def test_an_update_has_the_bytes_of_its_fragment_and_so_has_the_answer(tmp_path: Path) -> None:
    simulated, log = run(tmp_path, STREAMING, **EQUAL)
    sizes = [4 * fragment.size for fragment in simulated.model.layout.fragments(2)]
    own = [report for _, receipt, report in log.events if receipt.worker == 0]
    assert [report.bytes_sent for report in own] == sizes * 3
    assert [report.bytes_received for report in own] == [sum(sizes), *sizes, *sizes, sizes[0]]
    assert simulated.tokens == 4 * simulated.steps == 96, "also those of the steps beside an exchange"


def test_a_worker_that_comes_back_begins_with_the_whole_model(tmp_path: Path) -> None:
    cluster = {"workers": 1, "seconds_per_step": 1.0, "absences": [{"worker": 0, "from": 9.5, "to": 12.0}]}
    simulated, log = run(tmp_path, STREAMING, **EQUAL | {"cluster": cluster})
    received = [report.bytes_received for _, _, report in log.events]
    assert received.count(4 * simulated.model.layout.size) == 2 and received[0] == max(map(float, received))  # type: ignore[arg-type]


@pytest.mark.parametrize(("codec", "bytes_a_value"), [("bf16", 2), ("int8:block=8", 1 + 4 / 8), ("e3m0", 0.5)])
def test_a_fragment_comes_back_in_few_bytes_and_the_first_whole_model_in_fp32(
    tmp_path: Path, codec: str, bytes_a_value: float
) -> None:
    simulated, log = run(tmp_path, STREAMING | {"compress": f"pull={codec}"}, **EQUAL)
    sizes = [fragment.size for fragment in simulated.model.layout.fragments(2)]
    received = [report.bytes_received for _, receipt, report in log.events if receipt.worker == 0]
    header = 100
    assert received[0] == 4 * sum(sizes)
    for got, size in zip(received[1:], [*sizes, *sizes, sizes[0]], strict=True):
        assert got is not None and bytes_a_value * size <= got <= bytes_a_value * (size + 8) + header


def test_a_worker_waits_only_for_what_is_longer_than_the_delay(tmp_path: Path) -> None:
    """A way takes 0.4 s, and steps 1 s: an answer is there 0.8 s after the update was sent."""
    slow = {"cluster": {"workers": 1, "seconds_per_step": 1.0, "exchange": {"seconds": 0.4}}}
    for delay, waited in ((0, 0.8), (1, 0.0), (2, 0.0)):
        simulated, log = run(tmp_path, STREAMING | {"fragment_delay": delay}, **slow)
        waits = [report.waiting_seconds for _, _, report in log.events]
        assert waits == pytest.approx([0.4] + [waited] * 5)
        assert [report.computing_seconds for _, _, report in log.events] == pytest.approx([2.0] * 6)
        assert simulated.clock.now == pytest.approx(0.4 + 12 + 5 * waited + 0.4)


def test_a_longer_way_than_the_delay_is_waited_for(tmp_path: Path) -> None:
    slow = {"cluster": {"workers": 1, "seconds_per_step": 1.0, "exchange": {"seconds": 0.75}}}
    _, log = run(tmp_path, STREAMING, **slow)
    assert [report.waiting_seconds for _, _, report in log.events] == pytest.approx([0.75] + [0.5] * 5)


def test_training_in_fragments_lowers_the_loss(tmp_path: Path) -> None:
    simulated = trial(experiment(tmp_path, methods={"it": STREAMING | {"fragments": 4}}, steps=150))
    before = simulated.evaluate()
    finish(simulated)
    assert simulated.evaluate() < 0.8 * before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"local_steps": 5}, "--local-steps is 5: with --fragments 2 give a multiple of it"),
        ({"fragment_delay": 3}, "--fragment-delay is 3: the next fragment goes after 2 local steps; give at most 2"),
        ({"delay_compensation": 0.5}, "--delay-compensation does not go with --fragments"),
        ({"global": {}}, '"fragments" do not go with "global"'),
        ({"outer": "diloco"}, '"fragments" is of no use with "outer" diloco'),
    ],
)
def test_what_does_not_go_with_fragments_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        experiment(tmp_path, methods={"it": STREAMING | changes})
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fragments": 40, "local_steps": 40}, "fragments is 40: the model has 4 tensors"),
    ],
)
def test_what_shows_with_the_model_or_the_rule_is_refused_too(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        trial(experiment(tmp_path, methods={"it": STREAMING | {"fragment_delay": 0} | changes}))
    assert said in str(caught.value)


class Ones(SharedModel):
    """Each batch has a loss of 1."""

    def _loss(self, shard: int, number: int) -> tuple[Tensor, float]:
        loss, weight = super()._loss(shard, number)
        return loss - loss.detach() + 1.0, weight


def test_the_loss_of_an_update_is_the_mean_of_all_steps_since_the_one_before(tmp_path: Path) -> None:
    log = Log()
    finish(trial(experiment(tmp_path, methods={"it": STREAMING}, **EQUAL), log, kind=Ones))
    assert {report.loss for _, _, report in log.events} == {1.0}
