"""The real server and rules under a virtual clock, on tasks of a second."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from fairseq_async.algorithms import adasum
from fairseq_async.errors import ConfigurationError
from fairseq_async.reporting import page
from fairseq_async.reporting.runs import COMPUTING, WAITING, load
from fairseq_async.server import Receipt
from fairseq_async.server.checksum import checksum
from fairseq_async.simulation.cluster import Absence, Distribution, Presence, Speed, Trace
from fairseq_async.simulation.experiment import Experiment, read
from fairseq_async.simulation.gaussians import Gaussians
from fairseq_async.simulation.simulate import Interrupted, Simulator
from fairseq_async.simulation.trial import Trial
from fairseq_async.simulation.workers import SharedModel
from fairseq_async.worker.shards import ShardOrder, shard_sizes
from tests.conftest import MODEL, Processes, command

BASE: dict[str, Any] = {
    "problem": {"type": "gaussians", "samples": 256, "hidden": 8},
    "steps": 12,
    "batch_size": 4,
    "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "schedule": {"type": "cosine", "warmup": 3, "minimum": 0.1},
    "cluster": {"workers": 3, "seconds_per_step": [1.0, 1.5, 4.0]},
}
DN = {"method": "local_sgd", "local_steps": 3}
METHODS = {
    "hybrid": {"method": "hybrid_async"},
    "synchronous": {"method": "hybrid_async", "barrier": True},
    "DiLoCo": {"method": "local_sgd", "outer": "diloco", "local_steps": 3},
    "DN with grace": DN | {"dynamic_local_steps": True, "grace_period": 2.0},
    "compensated": {"method": "local_sgd", "outer": "nesterov", "local_steps": 2, "delay_compensation": 0.5},
    "buffered": {"method": "local_sgd", "outer": "buffered_nesterov", "local_steps": 2, "staleness_power": -0.5},
    "adasum": {"method": "adasum", "local_steps": 2},
    "adascale": {"method": "adascale", "optimizer": {"type": "sgd", "lr": 0.1}},
}


class Log:
    """What a trial writes."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Receipt, dict[str, Any]]] = []

    def __call__(self, time: float, receipt: Receipt, report: dict[str, Any]) -> None:
        self.events.append((time, receipt, report))

    def of(self, worker: int) -> list[float]:
        return [time for time, receipt, _ in self.events if receipt.worker == worker]


def experiment(tmp_path: Path, **changes: Any) -> Experiment:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({"methods": {"DN": DN}} | BASE | changes, sort_keys=False))
    return read(path)


def trial(given: Experiment, log: Log | None = None) -> Trial:
    """The first method on the first cluster."""
    torch.manual_seed(given.seed)
    arguments = {key: value for key, value in given.head.problem.items() if key != "type"}
    problem = Gaussians(given.seed, torch.device("cpu"), **arguments)
    (cluster,) = given.clusters.values()
    order = ShardOrder(shard_sizes(problem.samples, cluster.workers), given.seed)
    model = SharedModel(problem, given.head.batch_size, order, given.seed)
    return Trial(given, given.methods[0], cluster, model, model.flat.clone(), log or Log())


def finish(given: Trial) -> Tensor:
    while given.advance():
        pass
    return given.parameters


def run(tmp_path: Path, method: dict[str, Any], **changes: Any) -> tuple[Trial, Log]:
    log = Log()
    simulated = trial(experiment(tmp_path, methods={"it": method}, **changes), log)
    finish(simulated)
    return simulated, log


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


# The clock


def test_a_synchronous_step_takes_as_long_as_the_slowest_and_an_asynchronous_one_waits_for_nobody(
    tmp_path: Path,
) -> None:
    waiting, _ = run(tmp_path, METHODS["synchronous"])
    assert waiting.clock.now == pytest.approx(12 * 4.0)
    free, log = run(tmp_path, {"method": "hybrid_async", "updates_per_step": 1})
    speed = 1 / 1.0 + 1 / 1.5 + 1 / 4.0
    assert free.clock.now == pytest.approx(36 / speed, abs=1.5)
    assert all(time == pytest.approx(1.5 * (number + 1)) for number, time in enumerate(log.of(1)))


def test_exchanges_take_time_and_updates_stand_in_line(tmp_path: Path) -> None:
    parameters = 8 * 16 + 8 + 8 * 8 + 8
    exchange = {"seconds": 0.25, "seconds_per_byte": 0.5 / (4 * parameters), "server_seconds": 3.0}
    cluster = {"workers": 2, "seconds_per_step": 1.0, "exchange": exchange}
    _, log = run(tmp_path, {"method": "hybrid_async", "updates_per_step": 1}, cluster=cluster, steps=2)
    # pull 0.75, compute 1, push 0.75; the server takes 3 with each, worker 1 stands behind worker 0
    assert log.of(0) == pytest.approx([2.5, 8.5]) and log.of(1) == pytest.approx([5.5, 11.5])
    second = log.events[2]
    assert second[1].worker == 0 and second[1].staleness == 1
    assert second[2]["waiting_seconds"] == pytest.approx(0.75 + 3.0 + 0.75)


def test_a_worker_that_dies_loses_what_it_was_at_and_comes_back(tmp_path: Path) -> None:
    cluster = {"workers": 2, "absences": [{"worker": 1, "from": 2.5, "to": 7.0}]}
    simulated, log = run(tmp_path, DN | {"local_steps": 2}, cluster=cluster, steps=8)
    assert log.of(1)[:2] == pytest.approx([2.0, 9.0])
    assert [receipt.sequence for _, receipt, _ in log.events if receipt.worker == 1] == list(range(len(log.of(1))))
    assert simulated.steps == 16 and simulated.workers[1].steps > sum(
        report["local_steps"] for _, receipt, report in log.events if receipt.worker == 1
    )


def test_a_worker_may_come_late_and_another_may_pause(tmp_path: Path) -> None:
    absences = [{"worker": 1, "from": 0, "to": 5}, {"worker": 0, "from": 1.5, "to": 3.5, "pause": True}]
    _, log = run(tmp_path, METHODS["hybrid"], cluster={"workers": 2, "absences": absences}, steps=5)
    assert log.of(0)[:3] == pytest.approx([1.0, 4.0, 5.0]) and log.of(1)[0] == pytest.approx(6.0)


def test_diloco_goes_on_without_a_dead_worker_and_a_synchronous_run_waits_for_it(tmp_path: Path) -> None:
    cluster = {"workers": 3, "absences": [{"worker": 2, "from": 4.5}]}
    going, log = run(tmp_path, METHODS["DiLoCo"], cluster=cluster)
    assert going.finished and len(log.of(2)) == 1 and going.steps == 36
    stuck, _ = run(tmp_path, METHODS["synchronous"], cluster=cluster)
    assert not stuck.finished and stuck.server.version == 4


def test_slow_workers_take_fewer_local_steps(tmp_path: Path) -> None:
    cluster = {"workers": 3, "seconds_per_step": [1.0, 2.0, 5.0]}
    _, log = run(tmp_path, DN | {"local_steps": 10, "dynamic_local_steps": True}, cluster=cluster, steps=40)
    taken = {w: [report["local_steps"] for _, r, report in log.events if r.worker == w] for w in range(3)}
    assert [taken[w][1] for w in range(3)] == [10, 5, 2]


def test_seconds_follow_their_distribution_or_trace_and_do_not_depend_on_the_method(tmp_path: Path) -> None:
    for kind in ("lognormal", "uniform", "exponential"):
        spread = {} if kind == "exponential" else {"spread": 0.5}
        speed = Speed(Distribution.model_validate({"distribution": kind, "mean": 2.0} | spread), worker=1, seed=3)
        drawn = torch.tensor([speed.of_step(number) for number in range(4000)])
        assert drawn.mean() == pytest.approx(2.0, rel=0.1) and drawn.min() > 0
        assert drawn.std() == pytest.approx(2.0 if kind == "exponential" else 1.0, rel=0.15)
        assert speed.of_step(17) == pytest.approx(float(drawn[17]))
    lines = [{"worker": w, "computing_seconds": 2.0 + w, "local_steps": 4} for w in (0, 1, 0)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Speed(Trace(trace=tmp_path / "events.jsonl", worker=1), 0, 1).of_step(9) == 0.75
    (tmp_path / "seconds.txt").write_text("0.5\n2\n")
    recorded = Speed(Trace(trace=tmp_path / "seconds.txt"), 0, 1)
    assert [recorded.of_step(n) for n in range(3)] == [0.5, 2.0, 0.5]


def test_work_is_as_much_later_as_its_pauses_last() -> None:
    pauses = [Absence(worker=0, from_=begin, to=end, pause=True) for begin, end in ((2.0, 3.0), (3.5, 9.0))]
    presence = Presence(pauses, 0)
    assert [presence.done(0.0, seconds) for seconds in (1.0, 2.0, 2.25, 2.6)] == pytest.approx([1.0, 2.0, 3.25, 9.1])
    assert presence.done(2.5, 0.25) == pytest.approx(3.25)


# Rules of the simulation alone


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


def test_adascale_steps_by_the_gain_of_its_ranks_and_ends_at_its_scale_invariant_steps(tmp_path: Path) -> None:
    simulated, log = run(tmp_path, METHODS["adascale"] | {"smoothing": 0.0}, steps=20)
    gains = [report["gain"] for _, receipt, report in log.events if receipt.worker == 2]
    assert sum(gains) == pytest.approx(simulated.deal.rule.gain.scale_invariant_steps)  # type: ignore[attr-defined]
    assert sum(gains[:-1]) < 20 <= sum(gains) and all(1 <= gain <= 3 for gain in gains) and max(gains) > 1.05


# The experiment file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepps": 3}, 'unknown key "stepps"; known are'),
        ({"methods": None}, '"methods": Input should be a valid dictionary'),
        ({"steps": 0}, '"steps": Input should be greater than or equal to 1 (it is 0)'),
        ({"methods": {"DN": DN | {"outter": "sgd"}}}, 'method DN: unknown key "outter"; known are'),
        ({"methods": {"DN": {"method": "sgdd"}}}, 'method DN: "method": sgdd: there is no such method; there are'),
        ({"methods": {"DN": {}}}, 'method DN: "method" is missing; there are'),
        ({"methods": {"DN": DN | {"outer": "sgdd"}}}, 'method DN: "outer"'),
        ({"methods": {"DN": DN | {"overlap": True}}}, 'method DN: "overlap" cannot be set for one method'),
        ({"methods": {"DN": DN | {"c": 0.1, "outer": "sgd"}}}, "c is of no use with outer sgd"),
        ({"methods": {"A": {"method": "adascale"}}}, 'adascale is simulated with "optimizer": "type": sgd, not adamw'),
        ({"methods": {"DN": DN | {"optimizer": {"lrr": 1}}}}, 'method DN, optimizer: unknown key "lrr"'),
        ({"cluster": {"workers": 2, "seconds_per_step": [1, 2, 3]}}, "seconds_per_step has 3 entries for 2 workers"),
        ({"cluster": {"workers": 2, "seconds_per_step": -1}}, '"seconds_per_step'),
        ({"cluster": {"workers": 2, "exchange": {"sec": 1}}}, 'unknown key "exchange.sec"'),
        ({"cluster": {"workers": 1, "absences": [{"worker": 1, "from": 2}]}}, "absences name worker 1; there are 1"),
        ({"cluster": {"workers": 1, "absences": [{"worker": 0, "from": 2, "to": 1}]}}, "it must be after from"),
        ({"cluster": {"workers": 1, "seconds_per_step": {"trace": "nowhere"}}}, "trace nowhere cannot be read"),
        ({"cluster": None}, 'give "cluster", or several with names as "clusters"'),
        ({"schedule": {"type": "cosinus"}}, 'schedule: "type"'),
        ({"optimizer": {"lr": 0}}, 'optimizer: "lr"'),
        ({"problem": {"type": "gaussian"}}, '"problem": "type": gaussian; there are gaussians, c4_lm'),
        ({"problem": {"type": "nowhere:f"}}, '"problem": "type": nowhere:f cannot be imported'),
        ({"problem": {"type": "gaussians", "wigth": 3}}, '"problem" (gaussians)'),
        ({"target": {"of": "X"}}, '"of": X: there is no such method; there are DN'),
        ({"optimizer": {"type": "adam", "momentum": 0.9}}, "momentum is of no use with adam: leave it out"),
        ({"schedule": {"minimum": 0.1}}, "minimum is of no use with constant: leave it out"),
        (
            {"cluster": {"workers": 1, "absences": [{"worker": 0, "from": 2}, {"worker": 0, "from": 3, "to": 4}]}},
            "absences of worker 0 overlap at 3",
        ),
        ({"target": {}}, 'target: give "loss", or "of"'),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Simulator(experiment(tmp_path, **change), tmp_path / "out", resume=False).run()
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "1: 2\n", ""])
def test_a_file_that_is_no_experiment_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path / "x.yaml")
    assert "x.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_problem_may_be_a_function_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "my_problem.py").write_text(
        "import torch\n"
        "class Line:\n"
        "    def __init__(self, seed, device, slope):\n"
        "        self.model, self.samples, self.slope = torch.nn.Linear(1, 1), 32, slope\n"
        "    def batch(self, indices): return torch.tensor([[float(i)] for i in indices]) / 32\n"
        "    def loss(self, x): return (self.model(x) - self.slope * x).square().mean(), float(len(x))\n"
        "    def evaluate(self): return float(self.loss(self.batch(range(32)))[0])\n"
    )
    given = experiment(tmp_path, problem={"type": "my_problem:Line", "slope": 3.0}, steps=400, evaluate_every=100)
    (row,) = Simulator(given, tmp_path / "out", resume=False).run()
    assert row["loss"] < 0.1


# A whole experiment


@pytest.fixture
def both(tmp_path: Path) -> Experiment:
    clusters = {name: {"workers": 2, "seconds_per_step": [1.0, slow]} for name, slow in (("equal", 1.0), ("slow", 2.0))}
    path = tmp_path / "both.yaml"
    methods = {name: METHODS[name] for name in ("synchronous", "hybrid", "DiLoCo")}
    content = BASE | {"methods": methods, "clusters": clusters, "target": {"of": "synchronous", "within": 0.5}}
    content.pop("cluster")
    path.write_text(yaml.safe_dump(content | {"pretraining": {"steps": 3}}, sort_keys=False))
    return read(path)


def test_every_method_meets_every_cluster_from_one_state(both: Experiment, tmp_path: Path) -> None:
    rows = Simulator(both, tmp_path / "out", resume=False).run()
    assert [(row["cluster"], row["method"]) for row in rows] == [
        (cluster, method) for cluster in ("equal", "slow") for method in ("synchronous", "hybrid", "DiLoCo")
    ]
    assert len({run.curve[0]["loss"] for run in load([tmp_path / "out"])}) == 1
    by = {(row["cluster"], row["method"]): row for row in rows}
    assert by["slow", "synchronous"]["time"] == 24.0 and by["slow", "hybrid"]["time"] == pytest.approx(16.0, abs=1)
    assert by["slow", "hybrid"]["time_to_target"] <= by["slow", "synchronous"]["time_to_target"]
    assert by["equal", "synchronous"]["checksum"] == by["slow", "synchronous"]["checksum"]
    assert not list((tmp_path / "out").glob("**/state.pt"))


def test_ctrl_c_saves_and_resume_ends_with_the_same_bits(
    both: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Simulator(both, tmp_path / "whole", resume=False).run()
    broken, advance = Simulator(both, tmp_path / "broken", resume=False), Trial.advance
    left = iter(range(40))

    def stopping(self: Trial) -> bool:
        if next(left, None) is None:
            broken._interrupt(2, None)
        return advance(self)

    monkeypatch.setattr(Trial, "advance", stopping)
    with pytest.raises(Interrupted):
        broken.run()
    monkeypatch.setattr(Trial, "advance", advance)
    assert list((tmp_path / "broken").glob("**/state.pt"))
    with pytest.raises(ConfigurationError, match="holds a simulation: go on with it by --resume"):
        Simulator(both, tmp_path / "broken", resume=False)
    rest = Simulator(both, tmp_path / "broken", resume=True).run()
    for a, b in zip(whole, rest, strict=True):
        assert {**a, "real_seconds": 0} == {**b, "real_seconds": 0}
    for path in (tmp_path / "whole").glob("**/*.jsonl"):
        assert path.read_text() == (tmp_path / "broken" / path.relative_to(tmp_path / "whole")).read_text()


def test_a_report_is_one_page_that_needs_no_network(both: Experiment, tmp_path: Path) -> None:
    Simulator(both, tmp_path / "out", resume=False).run()
    runs = load([tmp_path / "out"])
    written = page.write(runs, "both & more", tmp_path / "report").read_text()
    assert "both &amp; more" in written and "DiLoCo" in written
    assert "http" not in written.replace("data:image", "") and "<script" not in written
    pictures = list((tmp_path / "report").glob("*.png"))
    assert {"slow-loss.png", "equal-timelines.png", "slow-staleness.png"} <= {path.name for path in pictures}
    assert written.count("<img") == len(pictures)
    slow = next(run for run in runs if run.group == "slow" and run.name == "synchronous")
    assert slow.shares(0)[COMPUTING] == pytest.approx(0.5) and slow.shares(0)[WAITING] == pytest.approx(0.5)
    assert slow.shares(1)[COMPUTING] == pytest.approx(1.0)


def test_a_worker_that_never_came_has_an_empty_row(tmp_path: Path) -> None:
    cluster = {"workers": 2, "absences": [{"worker": 0, "from": 0}]}
    given = experiment(tmp_path, methods={"hybrid": METHODS["hybrid"] | {"updates_per_step": 1}}, cluster=cluster)
    Simulator(given, tmp_path / "out", resume=False).run()
    runs = load([tmp_path / "out"])
    assert runs[0].shares(0)[COMPUTING] == 0.0 and runs[0].shares(1)[COMPUTING] == 1.0
    assert (tmp_path / "report" / "report.html") == page.write(runs, "late", tmp_path / "report")


def test_a_directory_without_a_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no run and no simulation there"):
        load([tmp_path])


def test_a_checksum_tells_one_bit() -> None:
    vector = torch.ones(5)
    before = checksum(vector)
    vector.view(torch.int32)[3] ^= 1
    assert before == checksum(torch.ones(5)) != checksum(vector) and len(before) == 8


def test_workers_share_one_model_and_keep_one_copy_and_their_inner_state(tmp_path: Path) -> None:
    simulated, _ = run(tmp_path, DN)
    size = simulated.model.layout.size
    for worker in simulated.workers:
        assert worker.optimizer is not None
        kept = sum(t.numel() for state in worker.optimizer.state.values() for t in state.values() if t.numel() > 1)
        ones = sum(t.numel() == 1 for p in simulated.model.parameters for t in [p])
        assert worker.delta.numel() == size and kept == 2 * (size - ones)


def test_a_translation_task_is_simulated_with_fairseqs_own_parts(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    arguments = MODEL[: MODEL.index("--lr")]
    problem = {"type": "fairseq_translation", "data": str(data), "flags": " ".join(arguments)}
    cluster = {"workers": 2, "seconds_per_step": [1.0, 2.0]}
    methods = {name: METHODS[name] for name in ("hybrid", "synchronous")}
    experiment(tmp_path, problem=problem, methods=methods, steps=30, batch_size=1, cluster=cluster, evaluate_every=30)
    simulate = [command("fairseq-async"), "simulate", tmp_path / "experiment.yaml", "--out", tmp_path / "out"]
    code, output = processes.run(simulate)
    assert code == 0 and "DEBUG" not in output, output  # one of fairseq's modules asks for it
    rows = json.loads((tmp_path / "out/results.json").read_text())["trials"]
    curve = load([tmp_path / "out"])[0].curve
    assert all(row["loss"] < 0.9 * curve[0]["loss"] for row in rows)
    assert rows[0]["time"] < rows[1]["time"] and rows[0]["tokens"] > 60 * 50
    assert all(row["checksum"] for row in rows)


@pytest.mark.parametrize("languages", ["", " --source-lang en --target-lang de"])
@pytest.mark.parametrize("made", [True, False])
def test_translation_data_that_is_missing_is_one_line_and_leaves_nothing(
    tmp_path: Path, languages: str, made: bool
) -> None:
    if made:
        (tmp_path / "data").mkdir()
    problem = {"type": "fairseq_translation", "data": "data", "flags": f"--arch transformer{languages}"}
    path = experiment(tmp_path, problem=problem)
    with pytest.raises(ConfigurationError, match=f'"data" {tmp_path / "data"} with these "flags"'):
        Simulator(path, tmp_path / "out", resume=False)
    assert not (tmp_path / "out").exists()


def test_flags_that_fairseq_does_not_take_are_one_line(data: Path, tmp_path: Path) -> None:
    problem = {"type": "fairseq_translation", "data": str(data), "flags": "--arch transfarmer"}
    with pytest.raises(ConfigurationError, match='"problem": "flags"'):
        Simulator(experiment(tmp_path, problem=problem), tmp_path / "out", resume=False)
