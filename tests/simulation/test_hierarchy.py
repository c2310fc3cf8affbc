"""Servers of regions under a global one (HALoS): in simulated runs of a second."""

import io
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairseq_async.algorithms import Update
from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import Receipt, Report, Status
from fairseq_async.simulation.hierarchy import Hierarchy, OrderOfRegion, simulated_run
from fairseq_async.simulation.problems.gaussians import Gaussians
from fairseq_async.simulation.simulated_run import SimulatedRun
from fairseq_async.simulation.trial import Trial
from fairseq_async.simulation.workers import SharedModel
from fairseq_async.worker.shards import ShardOrder, shard_sizes
from scripts.faults.digest import digest
from tests.helpers.references import HALoS64
from tests.helpers.simulations import Log, tiny_experiment

LOCAL = {"method": "local_sgd", "outer": "delayed_nesterov", "outer_lr": 0.8, "delay": 4, "local_steps": 2}
GLOBAL = {"outer": "delayed_nesterov", "outer_lr": 0.3, "outer_momentum": 0.5, "delay": 2, "updates": 3}
HALOS = LOCAL | {"global": GLOBAL}
FAR = {"seconds": 5.0}
TWO_REGIONS = {"workers": 4, "seconds_per_step": [1.0, 1.3, 1.0, 2.0], "regions": 2, "between_regions": FAR}
# the first global parameters come at 2.4, between the two updates of a round
HELD = LOCAL | {"local_steps": 1, "grace_period": 0.5, "staleness_limit": 0, "global": GLOBAL | {"updates": 1}}
NEAR = TWO_REGIONS | {"between_regions": {"seconds": 0.55}}


def simulated(tmp_path: Path, method: dict[str, Any], cluster: dict[str, Any], log: Log) -> SimulatedRun:
    given = tiny_experiment(tmp_path, method, cluster=cluster)
    (machines,) = given.clusters.values()
    torch.manual_seed(given.seed)
    problem = Gaussians(given.seed, torch.device("cpu"), samples=64, hidden=2)
    order = ShardOrder(shard_sizes(problem.samples, machines.workers), given.seed)
    model = SharedModel(problem, given.head.batch_size, order, given.seed)
    return simulated_run(given, given.methods[0], machines, model, model.flat.clone(), log)


def finish(run: SimulatedRun) -> Tensor:
    while run.advance():
        pass
    assert run.finished
    return run.parameters


def test_each_step_of_each_worker_of_all_regions_has_random_numbers_of_its_own() -> None:
    problem: Any = SimpleNamespace(
        model=nn.Linear(1, 1), batch=lambda indices: None, loss=lambda batch: (torch.rand(()), 1.0)
    )
    model = SharedModel(problem, 1, ShardOrder([4], 3), 3)

    def drawn(number: int, sequence: int, step: int) -> float:
        model._seed(number, sequence, step)
        return float(model._loss(0, 0)[0])

    cases = list(product(range(3), repeat=3))
    values = [drawn(*case) for case in cases]
    assert len(set(values)) == len(cases) and values == [drawn(*case) for case in cases]


def test_one_region_is_the_single_server_to_the_bit(tmp_path: Path) -> None:
    """There is no line between regions, and so no server above that of the region."""
    cluster, logs = {"workers": 3, "seconds_per_step": [1.0, 1.3, 4.0]}, (Log(), Log())
    ends = [finish(simulated(tmp_path, method, cluster, log)) for method, log in zip((LOCAL, HALOS), logs, strict=True)]
    assert torch.equal(*ends) and logs[0].lines() == logs[1].lines() and len(logs[0].events) > 6


def test_regions_that_merge_nothing_are_single_servers_to_the_bit(tmp_path: Path) -> None:
    method = LOCAL | {"global": GLOBAL | {"merge": 0.0}}
    run = simulated(tmp_path, method, TWO_REGIONS, Log())
    assert isinstance(run, Hierarchy)
    finish(run)
    given = tiny_experiment(tmp_path, LOCAL, cluster=TWO_REGIONS)
    first = run.regions[0]
    model = simulated(tmp_path, LOCAL, TWO_REGIONS, Log()).model
    model.order = OrderOfRegion(model.order, 0, 2)
    (cluster,) = given.clusters.values()
    alone = Trial(given, given.methods[0], cluster.region(0), model, model.flat.clone(), Log())
    assert torch.equal(finish(alone), first.trial.parameters)
    assert not torch.equal(run.parameters, alone.parameters)


class Deltas(Log):
    """Also keeps what was applied, by region, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: list[tuple[int, Tensor]] = []

    def __call__(self, time: float, receipt: Receipt, report: Report, extra: Any) -> None:
        super().__call__(time, receipt, report, extra)
        region = self.run.regions[receipt.worker // 2]
        self.applied.append((receipt.worker // 2, region.trial.workers[receipt.worker % 2].delta.clone()))

    run: Hierarchy


def test_a_simulated_run_is_the_papers_algorithm_in_float64(tmp_path: Path) -> None:
    """Where messages take no time: K-th updates, merges, and what is left at the end."""
    log = Deltas()
    run = simulated(tmp_path, HALOS, TWO_REGIONS | {"between_regions": {}}, log)
    assert isinstance(run, Hierarchy)
    log.run = run
    paper = HALoS64(run.parameters.clone(), 2, (0.8, 0.9, 4), (0.3, 0.5, 2), every=3, alpha=0.25)
    finish(run)
    for region, delta in log.applied:
        paper.arrive(region, delta)
    assert [count % 3 for count in paper.arrived] == [0, 0], "else a region has sent what was left"
    assert torch.allclose(run.parameters.double(), paper.above.theta, rtol=1e-4, atol=1e-5)
    assert (run.version, run.steps) == (4, 24)


def test_messages_take_their_time_and_nobody_waits_for_them(tmp_path: Path) -> None:
    """One worker in each region, two local steps of 1 s: the second update, at 4 s, is sent on. The global server is in
    the first region, whose message is there at once, as is what is left at 6 s. That of the other region arrives at
    9 s; its third update, at 6 s, comes meanwhile, and is in no drift."""
    cluster = {"workers": 2, "seconds_per_step": 1.0, "regions": 2, "between_regions": FAR}
    log = Log()
    run = simulated(tmp_path, LOCAL | {"global": GLOBAL | {"updates": 2}}, cluster, log)
    versions, before = [], 0
    while run.advance():
        if run.version > before:
            versions.append(run.now)
            before = run.version
    assert versions == [4.0, 6.0, 9.0] and run.finished
    assert sorted(time for time, _, _ in log.events) == [2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    assert {(receipt.worker, report.shard) for _, receipt, report in log.events} == {(0, 0), (1, 1)}
    assert run.sequences == {0: 2, 1: 2}


def test_a_message_comes_before_what_its_region_does_at_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other region's first drift, at 1 s, is there at 3 s and answered at 5 s. So its worker's update of 5 s, which
    comes after the merge, is sent on at once, and not with that of 6 s."""
    cluster = {"workers": 2, "seconds_per_step": 1.0, "regions": 2, "between_regions": {"seconds": 2.0}}
    method = LOCAL | {"local_steps": 1, "global": GLOBAL | {"updates": 1}}
    run = simulated(tmp_path, method, cluster, Log())
    assert isinstance(run, Hierarchy)
    arrived, push = {0: list[float](), 1: list[float]()}, run.server.push

    def noted(drift: Update) -> Receipt:
        arrived[drift.worker].append(run.now)
        return push(drift)

    monkeypatch.setattr(run.server, "push", noted)
    finish(run)
    assert arrived == {0: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1: [3.0, 7.0]}


def test_a_drift_is_computed_from_the_version_that_its_region_has_merged_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of stale updates, and their limit, are of the global server too."""
    run = simulated(tmp_path, LOCAL | {"global": GLOBAL | {"updates": 1}}, NEAR, Log())
    assert isinstance(run, Hierarchy)
    answered, found, push = {0: 0, 1: 0}, list[tuple[int, int]](), run.server.push

    def noted(drift: Update) -> Receipt:
        found.append((drift.base_version, answered[drift.worker]))
        receipt = push(drift)
        answered[drift.worker] = run.version
        return receipt

    monkeypatch.setattr(run.server, "push", noted)
    finish(run)
    assert len({base for base, _ in found}) > 3 and all(base == version for base, version in found)


def test_workers_of_regions_are_as_fast_as_without_a_global_server(tmp_path: Path) -> None:
    seconds = {"distribution": "lognormal", "mean": 1.0, "spread": 0.5}
    cluster = {"workers": 4, "seconds_per_step": seconds, "regions": 2}
    whole, parts = (simulated(tmp_path, method, cluster, Log()) for method in (LOCAL, HALOS))
    assert isinstance(whole, Trial) and isinstance(parts, Hierarchy)
    speeds = [speed for region in parts.regions for speed in region.trial.seconds]
    assert [speed.of_step(3) for speed in speeds] == [speed.of_step(3) for speed in whole.seconds]
    numbers = [worker.number for region in parts.regions for worker in region.trial.workers]
    assert numbers == [0, 1, 2, 3], "seeds of dropout: no two workers draw the same"


def test_workers_in_another_region_than_a_single_server_are_far_from_it(tmp_path: Path) -> None:
    """They take parameters at 5 s, take two steps, and what they send is there at 12 s."""
    cluster = {"workers": 2, "seconds_per_step": 1.0, "regions": 2, "between_regions": FAR}
    log = Log()
    finish(simulated(tmp_path, LOCAL, cluster, log))
    firsts = {receipt.worker: time for time, receipt, _ in reversed(log.events)}
    assert firsts == {0: 2.0, 1: 12.0}


def test_after_a_merge_workers_start_from_what_was_merged_also_where_that_is_compressed(tmp_path: Path) -> None:
    """A server encodes its parameters once for each version."""
    cluster = TWO_REGIONS | {"between_regions": {"seconds": 0.4}}
    run = simulated(tmp_path, HALOS | {"compress": "pull=bf16"}, cluster, Log())
    assert isinstance(run, Hierarchy)
    while run.advance():
        for trial in (region.trial for region in run.regions):
            starts = trial.starts.of(0, None) if trial.starts else None
            payload = starts.payload(trial.server) if starts else None
            assert starts is not None and payload is not None
            assert torch.equal(starts.decode(payload), trial.parameters.bfloat16().float())
    assert run.version == 4


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    ("method", "cluster"), [(HALOS, TWO_REGIONS), (HELD, NEAR)], ids=["HALoS", "merged while updates are held"]
)
def test_a_run_that_is_stopped_again_and_again_is_the_undisturbed_one(
    tmp_path: Path, method: dict[str, Any], cluster: dict[str, Any], every: int
) -> None:
    logs = Log(), Log()
    straight, stopped = (simulated(tmp_path, method, cluster, log) for log in logs)
    happened = 0
    while straight.advance():
        assert stopped.advance()
        happened += 1
        if happened % every == 0:
            file = io.BytesIO()
            torch.save(stopped.state_dict(), file)
            file.seek(0)
            stopped = simulated(tmp_path, method, cluster, logs[1])
            stopped.load_state_dict(torch.load(file, weights_only=True))
    assert not stopped.advance() and logs[0].lines() == logs[1].lines() and len(logs[0].events) >= 12
    assert digest(stopped.state_dict()) == digest(straight.state_dict())


@pytest.mark.parametrize(
    ("method", "cluster", "message"),
    [
        (HALOS, {"workers": 4, "regions": 3}, "regions is 3: it does not divide the 4 workers"),
        (HALOS, {"workers": 4, "between_regions": FAR}, "between_regions needs regions: give their number"),
        (LOCAL | {"global": {"grace_period": 1.0}}, {"workers": 4}, '"grace_period" is for workers, not for regions'),
        (LOCAL | {"global": {"outer": "diloco"}}, {"workers": 4}, '"outer": diloco waits, and regions do not'),
        (LOCAL | {"global": {"merge": 2}}, {"workers": 4}, "less than or equal to 1"),
        ({"method": "hybrid_async", "global": GLOBAL}, {"workers": 4}, "is a mapping, with an outer rule"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    tmp_path: Path, method: dict[str, Any], cluster: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        tiny_experiment(tmp_path, method, cluster=cluster)


def test_a_message_takes_the_time_of_all_bytes_of_the_parameters_on_its_line(tmp_path: Path) -> None:
    """In the region of the global server it takes none."""
    line = {"seconds": 5.0, "seconds_per_byte": 0.5}
    run = simulated(tmp_path, HALOS, TWO_REGIONS | {"between_regions": line}, Log())
    assert isinstance(run, Hierarchy) and run.seconds == [0.0, 5.0 + 0.5 * 4 * run.parameters.numel()]


@pytest.mark.parametrize(("status", "count"), [(Status.APPLIED, 1), (Status.STALE, 0), (Status.REFUSED, 0)])
def test_only_what_was_applied_counts_to_the_next_drift(tmp_path: Path, status: Status, count: int) -> None:
    log = Log()
    run = simulated(tmp_path, HALOS, TWO_REGIONS, log)
    assert isinstance(run, Hierarchy)
    run._writer(1)(1.0, Receipt(0, 0, 0, 1.0, status, 0, 1.0, 1), Report(shard=1), {})
    assert [region.merging.count for region in run.regions] == [0, count]
    assert [(receipt.worker, report.shard) for _, receipt, report in log.events] == [(2, 3)]


def test_a_global_server_may_weigh_and_drop_stale_drifts(tmp_path: Path) -> None:
    stale = {"staleness_power": -0.5, "staleness_limit": 3}
    above = tiny_experiment(tmp_path, LOCAL | {"global": GLOBAL | stale}, cluster=TWO_REGIONS).methods[0].above
    assert above is not None and stale.items() <= above.options.model_dump().items()
