"""HALoS with real servers: regions whose servers are workers of a global one, all in threads of this process."""

import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fairseq_async.algorithms import Rule
from fairseq_async.errors import ConfigurationError, RefusedError
from fairseq_async.method.spec import MethodSpec
from fairseq_async.options.addresses import free_port
from fairseq_async.protocol import Layout, Push, Report
from fairseq_async.records import event_log
from fairseq_async.records.recording import merge_path
from fairseq_async.regions.regional_main import RegionalService
from fairseq_async.replay.regions import RecordedRegions
from fairseq_async.replay.replay import DifferenceError, Recording, Replay
from fairseq_async.reporting.audit import audit
from fairseq_async.server.plan import Plan
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.server.shards.build import close_shards
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from tests.helpers.mortal import InlineSnapshots
from tests.helpers.references import HALoS64
from tests.helpers.regions import (
    LAYOUT,
    START,
    TOKEN,
    RegionServer,
    RegionWorker,
    global_server,
    parameter_server,
    region_server,
    region_spec,
)
from tests.helpers.run_files import events
from tests.helpers.waiting import wait_until

RULE = "outer=delayed_nesterov,outer_lr=0.3,outer_momentum=0.5,delay=2"


def test_two_regions_of_two_workers_are_the_papers_algorithm_in_float64(tmp_path: Path) -> None:
    """Messages take no time here: nobody goes on before a merge is done. K = 3, α = 0.25, 18 updates in each region."""
    generator = torch.Generator().manual_seed(3)
    with ExitStack() as stack:
        above = stack.enter_context(global_server(tmp_path / "global"))
        servers = [stack.enter_context(region_server(tmp_path / f"region{r}", workers=2)) for r in (0, 1)]
        workers = []
        for region, server in enumerate(servers):
            spec = region_spec(f"{above.address},region={region},updates=3,{RULE}", workers=2)
            workers.append([RegionWorker(server, worker, spec) for worker in (0, 1)])
        paper = HALoS64(workers[0][0].pull(), 2, (0.8, 0.9, 4), (0.3, 0.5, 2), every=3, alpha=0.25)
        for turn in range(36):
            region, worker = turn % 2, turn // 2 % 2
            delta = torch.randn(5, generator=generator)
            workers[region][worker].push(delta)
            paper.arrive(region, delta)
            if paper.arrived[region] % 3 == 0:
                merges = paper.arrived[region] // 3
                wait_until(lambda r=region, m=merges, n=paper.arrived[region]: _version(servers[r]) == n + m)  # type: ignore[misc]
            found = workers[region][worker].pull()
            assert torch.allclose(found.double(), paper.regions[region].theta, rtol=1e-5, atol=1e-6)
        assert torch.allclose(parameter_server(above).parameters.double(), paper.above.theta, rtol=1e-5, atol=1e-6)
        assert parameter_server(above).version == 12 and not torch.equal(found, workers[0][0].pull())
    assert audit(tmp_path / "global").applied == 12
    assert audit(tmp_path / "region1").applied == 18


def _version(server: RegionServer) -> int:
    return parameter_server(server).version


def test_a_region_that_merges_nothing_is_a_run_without_a_server_above_to_the_bit(tmp_path: Path) -> None:
    deltas = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    ends = []
    with global_server(tmp_path / "global", regions=1) as above:
        for name, upstream in (("alone", None), ("region", f"{above.address},updates=1,merge=0,{RULE}")):
            with region_server(tmp_path / name) as server:
                worker = RegionWorker(server, 0, region_spec(upstream))
                for count, delta in enumerate(deltas, start=1):
                    worker.push(delta)
                    if upstream is not None:
                        wait_until(lambda n=count: _version(server) == 2 * n)  # type: ignore[misc]
                ends.append(worker.pull())
        assert torch.equal(*ends) and parameter_server(above).version == 9


def test_nobody_waits_for_a_message_and_a_region_that_dies_stops_no_other(tmp_path: Path) -> None:
    with global_server(tmp_path / "global") as above, region_server(tmp_path / "region0") as first:
        mortal = RegionServer(1, tmp_path / "region1", build=local_sgd_main.build, token=TOKEN)
        specs = [region_spec(f"{above.address},region={region},updates=2,{RULE}") for region in (0, 1)]
        workers = [RegionWorker(server, 0, spec) for server, spec in zip((first, mortal), specs, strict=True)]
        assert torch.equal(workers[1].pull(), START)
        mortal.stop()
        for _ in range(20):  # far more than K: it never waits for an answer
            workers[0].push(torch.ones(5))
        wait_until(lambda: parameter_server(above).version >= 1 and _version(first) > 20)


def test_the_run_ends_with_the_steps_of_all_regions_and_its_parameters_stay(tmp_path: Path) -> None:
    """Four local steps of one worker in each region: two updates. The first region to be through leaves; with the
    second the global run is finished."""
    with global_server(tmp_path / "global") as above, ExitStack() as stack:
        servers = [stack.enter_context(region_server(tmp_path / f"region{region}")) for region in (0, 1)]
        for region, server in enumerate(servers):
            spec = region_spec(f"{above.address},region={region},updates=9,{RULE}", total_steps=4)
            worker = RegionWorker(server, 0, spec)
            assert [worker.push(torch.ones(5)).finished for _ in range(2)] == [False, True]
            worker.client.leave(finished=False)
            server.thread.join(20)
            assert not server.thread.is_alive() and above.service.membership.has_left(region)
            assert above.service.finished == (region == 1)
        above.thread.join(20)
        assert parameter_server(above).version == 2 and not above.thread.is_alive()
    sent = [(event["worker"], event["weight"], event["local_steps"]) for event in events(tmp_path / "global")]
    assert sent == [(0, 4.0, 4), (1, 4.0, 4)]


def test_the_servers_of_regions_and_the_global_one_may_be_in_shards(tmp_path: Path) -> None:
    """A merge changes the parameters of all shards, between two commands to them."""
    found = []
    for shards in (1, 2):
        run_dir = tmp_path / str(shards)
        with global_server(run_dir / "global", 1) as above, region_server(run_dir / "region0") as server:
            spec = region_spec(f"{above.address},updates=2,merge=0.5,{RULE}")
            spec = replace(spec, server=replace(spec.server, server_shards=shards))
            worker = RegionWorker(server, 0, spec)
            for update, version in enumerate([1, 3, 4, 6, 7, 9]):
                worker.push(torch.arange(5.0) + update)
                wait_until(lambda server=server, version=version: _version(server) == version)  # type: ignore[misc]
            found.append(torch.stack([worker.pull(), parameter_server(above).parameters]))
            for each in (above, server):
                close_shards(parameter_server(each).rule)
    assert torch.equal(*found)


def test_a_region_on_another_machine_goes_on_when_its_connection_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        above = stack.enter_context(global_server(tmp_path / "global", regions=1, host="127.0.0.2"))
        server = stack.enter_context(region_server(tmp_path / "region0"))
        worker = RegionWorker(server, 0, region_spec(f"{above.address},updates=1,merge=1,{RULE}"))
        for version in (2, 4):
            worker.push(torch.ones(5))
            wait_until(lambda version=version: _version(server) == version)  # type: ignore[misc]
            assert torch.equal(worker.pull(), parameter_server(above).parameters)
            above.service.peers[0].channel.end()
        above.stop()
        worker.push(torch.ones(5))
        wait_until(lambda: "is gone; this region goes on without it; trying again" in caplog.text)


def test_what_cannot_be_kept_for_a_replay_costs_neither_server_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, for a while; then a mistake of this program's own in the region."""
    keep, full = event_log.record_vector, True

    def record(path: Path, vector: torch.Tensor) -> None:
        if full:
            raise OSError("the disk is full")
        keep(path, vector)

    monkeypatch.setattr(event_log, "record_vector", record)
    with global_server(tmp_path / "global", regions=1) as above, region_server(tmp_path / "region0") as server:
        worker = RegionWorker(server, 0, region_spec(f"{above.address},updates=1,merge=1,{RULE}", record=True))
        for version in (2, 4):
            worker.push(torch.ones(5))
            wait_until(lambda version=version: _version(server) == version)  # type: ignore[misc]
        full = False
        worker.push(torch.ones(5))
        wait_until(lambda: merge_path(tmp_path / "region0", 6).exists())
        assert server.told == ["vectors for a replay are not recorded: the disk is full; the run goes on"]  # type: ignore[attr-defined]
        monkeypatch.setattr(server.service.described, "log_merge", None)
        for mistakes in (1, 2):
            worker.push(torch.ones(5))
            wait_until(lambda mistakes=mistakes: server.service.refusals.counts["internal error"] == mistakes)  # type: ignore[misc]
        assert parameter_server(above).version == 5
        assert torch.equal(worker.pull(), parameter_server(above).parameters)


def test_the_end_of_the_global_run_is_that_of_a_region(tmp_path: Path) -> None:
    with global_server(tmp_path / "global", regions=1) as above, region_server(tmp_path / "region0") as server:
        worker = RegionWorker(server, 0, region_spec(f"{above.address},updates=1,{RULE}"))
        worker.push(torch.ones(5))
        wait_until(lambda: _version(server) == 2)
        coordinator = above.service.described.coordinator
        coordinator.finished = True
        worker.push(torch.ones(5))
        wait_until(lambda: server.service.finished)
        assert worker.push(torch.ones(5)).finished


@pytest.mark.parametrize(
    ("upstream", "token", "message"),
    [
        ("127.0.0.1:9,region=0", TOKEN, "--upstream 127.0.0.1:9: there is no global server: .*Connection refused"),
        ("{above},region=0", "8f" * 16, "--upstream .*: this server belongs to another run .wrong token."),
        ("{above},region=2", TOKEN, "--upstream .*: this run has 2 workers; there is no worker 2"),
        ("{above},region=1,outer_lr=0.1", TOKEN, "--upstream .*: worker 1 was started with another --outer-lr"),
        ("{above},region=1,updates=5", TOKEN, "--upstream .*: worker 1 was started with another updates"),
        ("{own},region=0", TOKEN, "--upstream .* is this run's own server; give the global server's address"),
    ],
)
def test_a_mistake_is_one_line_to_the_worker(tmp_path: Path, upstream: str, token: str, message: str) -> None:
    with global_server(tmp_path / "global") as above, region_server(tmp_path / "region0") as first:
        RegionWorker(first, 0, region_spec(f"{above.address},region=0"))
        with RegionServer(1, tmp_path / "region1", build=local_sgd_main.build, token=token) as server:
            where = upstream.format(above=above.address, own=server.address)
            with pytest.raises(RefusedError, match=message):
                RegionWorker(server, 0, region_spec(where))


def test_a_region_without_certificates_is_told_that_the_global_server_may_need_them(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, region_server(tmp_path / "region0") as server:

        def close_each() -> None:  # as TLS does without a handshake
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=close_each, daemon=True).start()
        spec = region_spec(f"127.0.0.1:{listener.getsockname()[1]},region=0")
        with pytest.raises(RefusedError, match=r"--upstream 127\.0\.0\.1:\d+: the server at .* does it need --tls\?"):
            RegionWorker(server, 0, spec)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_region_that_starts_while_the_global_server_is_started_again_waits_for_it(tmp_path: Path) -> None:
    port = free_port()
    with region_server(tmp_path / "region0") as server, ExitStack() as opened:
        later = threading.Timer(
            0.5, lambda: opened.enter_context(global_server(tmp_path / "global", regions=1, port=port))
        )
        later.start()
        worker = RegionWorker(server, 0, region_spec(f"127.0.0.1:{port},region=0"))
        assert not worker.push(torch.ones(5)).finished
        later.join(10)


def test_a_region_with_another_model_is_refused(tmp_path: Path) -> None:
    other = Layout.of([("w", torch.zeros(3)), ("b", torch.zeros(1))])
    with global_server(tmp_path / "global") as above, region_server(tmp_path / "region0") as first:
        RegionWorker(first, 0, region_spec(f"{above.address},region=0"))
        with region_server(tmp_path / "region1") as server:
            client = Client(LastingConnection(server.address, server.token, 0))
            assert not client.join(other, region_spec(f"{above.address},region=1")).initialised
            with pytest.raises(RefusedError, match=r"--upstream .*: worker 1 has another model than the others"):
                client.initialise(None)
    assert LAYOUT.difference(other)


class Computing:
    """A worker of a region, whose updates count on what it has started from."""

    layout = LAYOUT

    def __init__(self) -> None:
        self.sequence = -1

    def start_from(self, parameters: torch.Tensor, version: int) -> None:
        self.start, self.version = parameters.clone(), version

    def compute(self) -> tuple[Push, torch.Tensor]:
        self.sequence += 1
        report = Report({"seen": self.sequence}, local_steps=2, step_seconds=0.1)
        return Push(self.sequence, self.version, 2.0, report), 0.3 * self.start - 0.1 * self.sequence


class ComputingRun:
    threads = 1

    def __init__(self, spec: MethodSpec) -> None:
        self.spec, self.workers = spec, {worker: Computing() for worker in (0, 1)}

    def build(self, spec: MethodSpec, layout: Layout, parameters: torch.Tensor) -> tuple[Rule, Plan]:
        return local_sgd_main.build(spec, layout, parameters)


def test_a_region_and_the_global_run_are_replayed_to_the_bit(tmp_path: Path) -> None:
    """Merges come when they come: two workers of the recorded region go on meanwhile."""
    with ExitStack() as stack:
        above = stack.enter_context(global_server(tmp_path / "global"))
        servers = [stack.enter_context(region_server(tmp_path / f"region{r}", workers=2)) for r in (0, 1)]
        specs = [region_spec(f"{above.address},region={r},updates=3,{RULE}", 2, record=True) for r in (0, 1)]
        other = RegionWorker(servers[0], 0, specs[0])
        run = ComputingRun(specs[1])
        workers = [RegionWorker(servers[1], worker, specs[1]) for worker in (0, 1)]
        for turn in range(24):
            live, computing = workers[turn % 2], run.workers[turn % 2]
            computing.start_from(live.pull(), live.base)
            push, delta = computing.compute()
            live.push(delta)
            other.push(torch.full((5,), 0.01 * turn))
        wait_until(lambda: parameter_server(above).version >= 6)
        end = parameter_server(above).parameters  # which may move until the server has stopped
        merges = len(list((tmp_path / "region1" / "merges").iterdir()))
    local = Replay(Recording.read(tmp_path / "region1"), ComputingRun(specs[1]))
    assert list(local.steps()) and merges > 1
    recording = Recording.read(tmp_path / "global")
    repeated = Replay(recording, RecordedRegions(recording))
    assert len(list(repeated.steps())) == repeated.compared >= 6
    assert torch.equal(repeated.parameters, end)
    for change, why in (
        ({"worker": 7}, "this run has no such worker"),
        ({"base_version": 99, "staleness": -98}, "it started from version 99, which the replay has not come to"),
    ):
        wrong = Recording.read(tmp_path / "global")
        wrong.events[1] = replace(wrong.events[1], **change)  # type: ignore[arg-type]
        with pytest.raises(DifferenceError, match=f"is the first that differs: {why}"):
            list(Replay(wrong, RecordedRegions(wrong)).steps())
    first = sorted((tmp_path / "region1" / "merges").iterdir())[0]
    torch.save(torch.zeros(5), first)
    with pytest.raises(DifferenceError, match="is the first that differs"):
        list(Replay(Recording.read(tmp_path / "region1"), ComputingRun(specs[1])).steps())
    first.unlink()
    with pytest.raises(ConfigurationError, match="which a replay needs, cannot be read"):
        list(Replay(Recording.read(tmp_path / "region1"), ComputingRun(specs[1])).steps())


def test_a_region_that_goes_on_brings_a_new_global_server_its_own_parameters(tmp_path: Path) -> None:
    """And not those of worker 0, which a script has just initialised; nor does it wait for that server."""
    upstream = "{},updates=4,merge=0.5,outer=delayed_nesterov,outer_lr=0.3,outer_momentum=0.5,delay=2"
    with global_server(tmp_path / "global", regions=1) as above, region_server(tmp_path / "region") as server:
        worker = RegionWorker(server, 0, region_spec(upstream.format(above.address)))
        worker.push(torch.ones(5))
        state, version = server.service.described.snapshot(), parameter_server(server).version
        InlineSnapshots(tmp_path / "region").take(state, version)
        trained = worker.pull().clone()
    port = free_port()
    with region_server(tmp_path / "region") as server:
        server.service.resumes = True
        worker = RegionWorker(
            server, 0, region_spec(upstream.format(f"127.0.0.1:{port}")), start=torch.full((5,), 99.0)
        )
        worker.push(torch.ones(5))
        assert isinstance(server.service, RegionalService)
        own = server.service._upstream(server.service.described).state_dict()
        assert own["unreported"] == 4, "with the two local steps of before, which were not sent"
        wait_until(lambda: any(line.endswith("; this region goes on, and tries again") for line in server.told))
        with global_server(tmp_path / "anew", regions=1, port=port) as above:
            wait_until(lambda: above.service.begun is not None)
            assert torch.equal(parameter_server(above).parameters, trained)


def test_regions_go_on_under_a_global_server_that_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    """Also without region 0, whose server has ended meanwhile."""
    with ExitStack() as stack:
        above = stack.enter_context(global_server(tmp_path / "global"))
        servers = [stack.enter_context(region_server(tmp_path / f"region{r}")) for r in (0, 1)]
        specs = [region_spec(f"{above.address},region={region},updates=1,{RULE}") for region in (0, 1)]
        workers = [RegionWorker(server, 0, spec) for server, spec in zip(servers, specs, strict=True)]
        for version, worker in enumerate(workers, start=1):
            worker.push(torch.ones(5))
            wait_until(lambda n=version: parameter_server(above).version == n)  # type: ignore[misc]
        end = parameter_server(above).parameters.clone()
        InlineSnapshots(tmp_path / "global").take(above.service.described.snapshot(), 2)
        above.stop()
        servers[0].stop()
        port = int(above.address.rpartition(":")[2])
        again = stack.enter_context(global_server(tmp_path / "global", port=port, resumes=True))
        wait_until(lambda: again.service.begun is not None)
        assert torch.equal(parameter_server(again).parameters, end)
        workers[1].push(torch.ones(5))
        wait_until(lambda: parameter_server(again).version == 3)
        assert servers[1].told == []
    assert audit(tmp_path / "global").applied == 3
