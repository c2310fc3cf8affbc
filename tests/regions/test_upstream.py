"""A region's numbers with the global server, through deaths of either: nothing that was moved is sent twice."""

import io
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError, ExchangeError, RefusedError
from fairseq_async.method.global_server import parse_upstream
from fairseq_async.method.spec import MOST_LOCAL_STEPS
from fairseq_async.protocol import Hello, Initialise, Push, PushReply, Receipt, Report, Status, Welcome
from fairseq_async.protocol.receipt import SETTLED
from fairseq_async.records.event_log import Settled
from fairseq_async.regions import regional_main, upstream_link
from fairseq_async.regions.global_main import GlobalService
from fairseq_async.regions.regional_main import RegionalService
from fairseq_async.regions.upstream import GlobalParameters, RegionLost, Upstream
from fairseq_async.regions.upstream_link import UpstreamLink
from fairseq_async.server.build import build_coordinator
from fairseq_async.server.coordinator import Coordinator
from fairseq_async.server.membership import Membership
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.server.service import Service
from scripts.faults.direct import TOKEN as SECRET
from tests.helpers.in_process import Connection, end, server, slot
from tests.helpers.regions import LAYOUT, region_spec
from tests.helpers.stand_ins import Clock, Time

HALF = parse_upstream("host:1,updates=2,merge=0.5").above
ONES = torch.ones(LAYOUT.size)


def begun() -> tuple[Coordinator, Upstream]:
    """A region whose parameters are 0, and that K = 2 updates let send; α = 0.5."""
    spec, parameters = region_spec(None), torch.zeros(LAYOUT.size)
    rule, plan = local_sgd_main.build(spec, LAYOUT, parameters)
    coordinator = build_coordinator(spec, rule, plan, parameters, Membership(1, now=0.0))
    return coordinator, Upstream(HALF, coordinator)


def move(coordinator: Coordinator, upstream: Upstream, updates: int = 2) -> None:
    """So many updates, of one local step each, take the parameters up by 1 each."""
    for sequence in range(updates):
        coordinator.server.parameters.add_(1.0)
        receipt = Receipt(0, sequence, 0, 1.0, Status.APPLIED, 0, 1.0, 1)
        upstream.count([Settled(receipt, Report(local_steps=1))])


def from_snapshot(before: Coordinator, state: State) -> tuple[Coordinator, Upstream]:
    coordinator, upstream = begun()
    coordinator.server.parameters.copy_(before.server.parameters)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    upstream.load_state_dict(torch.load(file, weights_only=True))
    return coordinator, upstream


@pytest.mark.parametrize("given", ["region=0,region=1", "outer-lr=1,outer_lr=1", "updates", "outer_lr=1,merge"])
def test_a_key_of_the_option_has_one_value(given: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--upstream host:1,{given}: write .*, each key once$"):
        parse_upstream(f"host:1,{given}")


def test_a_message_takes_what_was_moved_since_the_merge_and_the_answer_is_blended_in() -> None:
    coordinator, upstream = begun()
    assert upstream.due(1.0) is None, "it has not joined"
    upstream.join(GlobalParameters(0, 7, False, 0 * ONES), 1.0, fresh=True)
    move(coordinator, upstream, updates=1)
    assert upstream.due(2.0) is None
    move(coordinator, upstream, updates=1)
    drift = upstream.due(4.0)
    assert drift is not None and torch.equal(drift.values, -2 * ONES)
    assert (drift.sequence, drift.base_version, drift.steps) == (0, 7, 2)
    assert drift.seconds == (4.0 - 1.0) / 2, "since it has joined"
    move(coordinator, upstream)  # meanwhile: in no message, as in the paper's code
    assert upstream.due(5.0) is None
    upstream.merge(GlobalParameters(1, 9, False, 10 * ONES))
    assert torch.equal(coordinator.server.parameters, 7 * ONES) and coordinator.server.version == 1
    move(coordinator, upstream)
    drift = upstream.due(6.0)
    assert drift is not None and torch.equal(drift.values, -2 * ONES)
    assert (drift.sequence, drift.base_version, drift.steps) == (1, 9, 4)  # but its steps count
    assert drift.seconds == (6.0 - 4.0) / 4, "since the message before"


def test_a_message_that_was_not_settled_goes_again_as_it_was() -> None:
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(3, 7, False, 0 * ONES), 0.0, fresh=True)
    move(coordinator, upstream)
    sent = upstream.due(1.0)
    again, restored = from_snapshot(coordinator, upstream.state_dict())
    move(again, restored)
    restored.join(GlobalParameters(3, 8, False, ONES), 0.0, fresh=False)
    assert sent is not None and restored.drift is not None and restored.due(2.0) is None
    assert torch.equal(restored.drift.values, sent.values)
    assert (restored.drift.sequence, restored.drift.base_version, restored.drift.steps) == (3, 7, 2)


def test_a_message_that_was_settled_is_sent_no_second_time() -> None:
    """Neither where the snapshot has it on its way, nor where it is older."""
    for sends_before in (True, False):
        coordinator, upstream = begun()
        upstream.join(GlobalParameters(3, 7, False, 0 * ONES), 0.0, fresh=True)
        move(coordinator, upstream)
        if sends_before:
            assert upstream.due(1.0) is not None
        again, restored = from_snapshot(coordinator, upstream.state_dict())
        restored.join(GlobalParameters(4, 8, False, 10 * ONES), 0.0, fresh=False)
        assert restored.drift is None and restored.due(2.0) is None
        assert torch.equal(again.server.parameters, 6 * ONES), "merged: half of 2 and of 10"
        move(again, restored)
        drift = restored.due(3.0)
        assert drift is not None and drift.sequence == 4 and torch.equal(drift.values, -2 * ONES)


def test_a_global_server_that_has_taken_updates_back_is_sent_the_next_with_its_own_numbers() -> None:
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(3, 7, False, 0 * ONES), 0.0, fresh=True)
    move(coordinator, upstream)
    assert upstream.due(1.0) is not None
    _, restored = from_snapshot(coordinator, upstream.state_dict())
    restored.join(GlobalParameters(1, 5, False, ONES), 0.0, fresh=False)
    assert restored.drift is not None
    assert (restored.drift.sequence, restored.drift.base_version) == (1, 5)


def test_a_region_that_has_lost_the_global_server_goes_on_and_sends_nothing() -> None:
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(0, 0, False, 0 * ONES), 0.0, fresh=True)
    move(coordinator, upstream)
    assert upstream.due(1.0) is not None
    upstream.lose()
    move(coordinator, upstream)
    assert upstream.due(2.0) is None and upstream.idle and upstream.state_dict()["drift"] is None


def test_local_steps_that_were_reported_are_reported_no_second_time() -> None:
    """The snapshot is older than a message that had its steps; one that was on its way had those before it."""
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(3, 7, False, 0 * ONES), 0.0, fresh=True)
    move(coordinator, upstream, updates=1)
    _, restored = from_snapshot(coordinator, upstream.state_dict())
    restored.join(GlobalParameters(4, 8, False, 0 * ONES), 0.0, fresh=False)
    move(coordinator, restored)
    drift = restored.due(2.0)
    assert drift is not None and drift.steps == 2

    coordinator, upstream = begun()
    upstream.join(GlobalParameters(3, 7, False, 0 * ONES), 0.0, fresh=True)
    move(coordinator, upstream)
    assert upstream.due(1.0) is not None
    move(coordinator, upstream, updates=1)  # behind the message
    _, restored = from_snapshot(coordinator, upstream.state_dict())
    restored.join(GlobalParameters(4, 8, False, 0 * ONES), 0.0, fresh=False)
    move(coordinator, restored)
    drift = restored.due(2.0)
    assert drift is not None and drift.steps == 3


def test_more_local_steps_than_a_message_may_have_are_reported_by_the_next_one() -> None:
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(3, 7, False, 0 * ONES), 0.0, fresh=True)
    upstream._unreported = MOST_LOCAL_STEPS + 3
    move(coordinator, upstream)
    first = upstream.due(1.0)
    upstream.merge(GlobalParameters(4, 8, False, 0 * ONES))
    move(coordinator, upstream)
    second = upstream.due(2.0)
    assert first is not None and second is not None
    assert (first.steps, second.steps) == (MOST_LOCAL_STEPS, 3 + 2 + 2)


def test_a_region_that_came_back_sends_what_was_on_its_way() -> None:
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(3, 7, False, 0 * ONES), 0.0, fresh=True)
    move(coordinator, upstream)
    assert upstream.due(1.0) is not None
    again, restored = from_snapshot(coordinator, upstream.state_dict())
    sent: list[Any] = []
    link, run = SimpleNamespace(send=sent.append), SimpleNamespace(coordinator=again)
    service: Any = SimpleNamespace(clock=lambda: 2.0, _link=link, _send_if_due=lambda upstream: None)
    RegionalService._handle_parameters(service, run, restored, GlobalParameters(3, 8, False, ONES))  # type: ignore[arg-type]
    assert sent == [restored.drift]


def test_that_no_region_is_there_is_told_each_time_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, alone = list[str](), iter([True, True, False, True])
    service = GlobalService("token", 2, tmp_path, local_sgd_main.build, tell=told.append)
    monkeypatch.setattr(Service, "is_deserted", lambda service, now: next(alone))
    assert not any(service.is_deserted(0.0) for _ in range(4))
    assert [text[:26] for text in told] == ["no region is connected any"] * 2


def test_a_region_that_could_not_begin_reads_no_further_news(tmp_path: Path) -> None:
    """The next worker 0 makes another connection; what the one before says is of no run."""
    service = RegionalService("token", 1, tmp_path, local_sgd_main.build, print, lambda *given: pytest.fail("none"))
    service._link = SimpleNamespace(news=lambda: RegionLost("again"))  # type: ignore[assignment]
    service._fail("it is not there")
    assert service._next_news() is None


def test_only_applied_updates_let_a_region_send_and_only_settled_ones_have_taken_steps() -> None:
    counted = {}
    for status in Status:
        _, upstream = begun()
        receipt = Receipt(1, 0, 0, 1.0, status, 0, 1.0, 1)
        upstream.count([Settled(receipt, Report(local_steps=steps)) for steps in (3, 5)])
        counted[status] = upstream.region.count, upstream.state_dict()["unreported"]
    assert counted == {status: (2 * (status is Status.APPLIED), 8 * (status in SETTLED)) for status in Status}


def test_a_region_goes_on_from_all_that_its_snapshot_has() -> None:
    """With a message on its way, steps behind it, and every number another one."""
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(3, 7, False, 0 * ONES), 0.0, fresh=True)
    move(coordinator, upstream)
    assert upstream.due(5.0) is not None
    move(coordinator, upstream, updates=1)
    state = upstream.state_dict()
    _, restored = from_snapshot(coordinator, state)
    assert_close(restored.state_dict(), state, rtol=0, atol=0)
    sent = restored.drift
    assert sent is not None and (sent.sequence, sent.base_version, sent.steps, sent.seconds) == (3, 7, 2, 2.5)


@pytest.mark.parametrize("finished", [False, True])
def test_a_region_is_idle_when_all_is_sent_and_answered_or_the_global_run_is_over(finished: bool) -> None:
    coordinator, upstream = begun()
    assert not upstream.idle, "it has not joined"
    upstream.join(GlobalParameters(0, 7, False, 0 * ONES), 0.0, fresh=True)
    assert upstream.idle
    move(coordinator, upstream, updates=1)
    assert not upstream.idle, "there is an update to send"
    assert upstream.due(1.0) is None
    coordinator.finished = True
    assert upstream.due(1.0) is not None and not upstream.idle
    upstream.merge(GlobalParameters(1, 8, finished, 0 * ONES))
    assert upstream.idle and upstream.finished == finished
    move(coordinator, upstream, updates=1)
    assert upstream.idle == finished and (upstream.due(2.0) is None) == finished


def test_a_region_that_comes_back_to_a_run_that_is_over_sends_nothing_more() -> None:
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(3, 7, False, 0 * ONES), 0.0, fresh=True)
    move(coordinator, upstream)
    _, restored = from_snapshot(coordinator, upstream.state_dict())
    restored.join(GlobalParameters(3, 9, True, ONES), 0.0, fresh=False)
    assert restored.finished and restored.idle and restored.due(1.0) is None


def test_a_region_that_is_done_waits_for_the_global_server_as_long_as_for_a_worker() -> None:
    """Until all it has sent is answered and it has left; without an answer, for a worker's timeout from its end."""
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(0, 7, False, 0 * ONES), 0.0, fresh=True)
    clock, left, told = Clock(10.0), list[float](), list[str]()
    service: Any = SimpleNamespace(
        begun=SimpleNamespace(coordinator=coordinator),
        clock=clock,
        membership=SimpleNamespace(timeout=5.0),
        tell=told.append,
        _link=SimpleNamespace(leave=lambda: left.append(clock.now)),
        _upstream=lambda run: upstream,
        _ending_at=None,
        _leaving=False,
        _has_left=False,
    )

    def busy(now: float) -> bool:
        clock.now = now
        return RegionalService._is_busy(service)

    assert not busy(10.0), "its workers go on"
    move(coordinator, upstream)
    assert upstream.due(11.0) is not None
    coordinator.finished = True
    assert busy(20.0) and busy(24.0) and not left
    upstream.merge(GlobalParameters(1, 8, False, 0 * ONES))
    assert busy(24.5) and busy(25.0) and left == [24.5] and not told
    assert not busy(25.5) and left == [24.5] and [line[:35] for line in told] == ["the global server did not answer: i"]
    service._ending_at, service._has_left = None, False
    assert busy(30.0)
    service._has_left = True
    assert not busy(31.0) and len(told) == 1, "it has answered"


def test_the_time_in_which_a_region_was_stopped_is_no_silence_of_the_global_server(tmp_path: Path) -> None:
    """As of a machine that is suspended while it sends its last update."""
    service = RegionalService("token", 1, tmp_path, local_sgd_main.build, print, lambda *given: pytest.fail("none"))
    began = service.membership._began
    service.excuse(100.0)
    assert service._ending_at is None and service.membership._began == began + 100.0
    service._ending_at = 20.0
    service.excuse(50.0)
    assert service._ending_at == 70.0 and service.membership._began == began + 150.0


@pytest.mark.parametrize("patient", [True, False])
def test_a_region_says_once_that_it_tries_again(monkeypatch: pytest.MonkeyPatch, patient: bool) -> None:
    """It may do so for days."""
    spec, told, pauses = region_spec("127.0.0.1:1,region=0"), list[str](), list[float]()
    answers: Any = iter([ExchangeError("nobody"), ExchangeError("nobody")] * 4 + [("client", "welcome")])

    def join(link: UpstreamLink, parameters: Tensor) -> Any:
        if isinstance(answer := next(answers), ExchangeError):
            raise answer
        return answer

    monkeypatch.setattr(UpstreamLink, "_join", join)
    monkeypatch.setattr(upstream_link, "time", SimpleNamespace(sleep=pauses.append, monotonic=lambda: 0.0))
    given = parse_upstream("127.0.0.1:1,region=0")
    link = UpstreamLink(given, spec, LAYOUT, "", None, 0, told.append, lambda: None)
    assert link._joined(torch.zeros(5), patient) == ("client", "welcome")
    assert told == [f"nobody; this region {'goes on, and ' if patient else ''}tries again"]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(ExchangeError("nobody"), 5.0), (RefusedError("of another run"), 0.0)],
    ids=["gone", "refused"],
)
def test_a_region_whose_workers_wait_for_the_global_server_gives_it_up_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch, error: Exception, seconds: float
) -> None:
    spec, time = region_spec("127.0.0.1:1,region=0"), Time()
    assert spec.server.worker_timeout == 5.0
    monkeypatch.setattr(UpstreamLink, "_join", MagicMock(side_effect=error))
    monkeypatch.setattr(upstream_link, "time", time)
    link = UpstreamLink(parse_upstream("127.0.0.1:1,region=0"), spec, LAYOUT, "", None, 0, print, lambda: None)
    with pytest.raises(type(error), match=str(error)):
        link._joined(torch.zeros(5), patient=False)
    assert seconds <= time.now - 1000.0 <= seconds + 5.0


def test_a_region_that_the_global_server_takes_no_longer_says_so_once_and_goes_on_alone() -> None:
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(0, 7, False, 0 * ONES), 0.0, fresh=True)
    move(coordinator, upstream)
    assert upstream.due(1.0) is not None
    told = list[str]()
    service: Any = SimpleNamespace(_beginning=None, tell=told.append, _upstream=lambda run: upstream)
    for _ in range(2):
        RegionalService._handle_news(service, None, RegionLost("another --outer-lr"))  # type: ignore[arg-type]
    assert told == ["another --outer-lr; this region goes on alone"]
    assert upstream.finished and upstream.drift is None and not coordinator.finished


@pytest.mark.parametrize("over", [False, True])
def test_an_answer_lets_a_region_send_what_is_left_or_end_with_the_global_run(
    monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    coordinator, upstream = begun()
    upstream.join(GlobalParameters(0, 7, False, 0 * ONES), 0.0, fresh=True)
    calls, run = MagicMock(), SimpleNamespace(coordinator=coordinator, slots=MagicMock())
    monkeypatch.setattr(regional_main, "_regional", lambda run: calls)
    service: Any = MagicMock(clock=lambda: 2.0)
    above = GlobalParameters(1, 8, over, ONES)
    RegionalService._handle_parameters(service, run, upstream, above)  # type: ignore[arg-type]
    run.slots.publish.assert_called_once_with(coordinator.server)
    calls.log_merge.assert_called_once_with(above.values)
    assert service._send_if_due.call_count == (not over) and service._deliver.call_count == coordinator.finished == over


def waiting(run_dir: Path, **options: Any) -> tuple[RegionalService, Connection, list[Any]]:
    """A region whose worker waits for the global server's parameters, and with what it has been asked for these."""
    joined = list[Any]()
    link = MagicMock(join=lambda parameters, patient: joined.append((parameters.tolist(), patient)))
    service = RegionalService(SECRET, 1, run_dir, local_sgd_main.build, print, lambda *given: link)  # type: ignore[arg-type]
    service.snapshots.take = lambda state, version: None  # type: ignore[method-assign]  # no fork in pytest
    worker = Connection(service)
    worker.introduce(0)
    worker.ask(Hello(region_spec("127.0.0.1:1,region=0", **options), LAYOUT, remote=False), Welcome)
    slot(service, 0).fill_(3.0)
    assert not worker.send(Initialise(False))
    return service, worker, joined


def test_a_region_begins_with_the_global_servers_parameters_and_brings_it_its_own(tmp_path: Path) -> None:
    service, worker, joined = waiting(tmp_path)
    assert not worker.send(Initialise(False)), "it has connected again"
    service._handle_news(service.described, GlobalParameters(4, 7, False, 2 * ONES))
    assert joined == [([3.0] * 5, False)] and worker.answer(Welcome).initialised
    assert server(service).parameters.tolist() == [2.0] * 5
    own = service._upstream(service.described).state_dict()
    assert (own["sequence"], own["version"], own["drift"]) == (4, 7, None)
    end(service)


def test_the_last_state_of_a_region_has_its_last_update_to_send(tmp_path: Path) -> None:
    """Its server may die before the global server has it, and nobody else has it then."""
    service, worker, _ = waiting(tmp_path, total_steps=2)
    service._handle_news(service.described, GlobalParameters(4, 7, False, 2 * ONES))
    slot(service, 0).fill_(1.0)
    report = Report(local_steps=2, step_seconds=0.1)
    assert worker.ask(Push(0, 0, 2.0, report), PushReply).finished
    found = service.snapshots.latest(lambda state: None)
    assert found is not None and found[1]["upstream"]["level"]["count"] == 1
    assert found[1]["upstream"]["unreported"] == 2
    end(service)


def test_a_region_that_cannot_begin_tells_its_workers_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the global server refuses it, or on a full disk: they would wait for ever."""
    service, worker, joined = waiting(tmp_path)
    service._handle_news(service.described, RegionLost("wrong token"))
    assert worker.last["error"] == "wrong token"
    assert not worker.send(Initialise(False)) and len(joined) == 2, "it may be asked again"
    monkeypatch.setattr(Service, "_begin", MagicMock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        service._handle_news(service.described, GlobalParameters(4, 7, False, 2 * ONES))
    assert worker.last["error"] == "the disk is full"


def test_a_region_whose_server_was_started_again_goes_on_until_the_global_server_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, parameters = MagicMock(), ONES.clone()
    service = RegionalService(SECRET, 1, tmp_path, local_sgd_main.build, print, lambda *given: link)
    run: Any = SimpleNamespace(spec=region_spec("127.0.0.1:1,region=0"), layout=LAYOUT)
    run.coordinator = SimpleNamespace(server=SimpleNamespace(parameters=parameters))
    monkeypatch.setattr(Service, "recover", lambda service: "version-7.pt")
    service.run = run
    assert service.recover() == "version-7.pt"
    (brought, patient), _ = link.join.call_args
    assert patient and torch.equal(brought, parameters)


@pytest.mark.parametrize(
    ("host", "own", "here"), [("127.0.0.1", 7, True), ("127.0.0.1", 8, False), ("192.0.2.1", 7, False)]
)
def test_a_global_server_on_another_machine_may_have_the_port_of_the_regions_own(
    host: str, own: int, here: bool
) -> None:
    given = parse_upstream(f"{host}:7,region=0")
    link = UpstreamLink(given, region_spec(f"{host}:7,region=0"), LAYOUT, "", None, own, print, lambda: None)
    with pytest.raises(RefusedError, match="is this run's own server") if here else nullcontext():
        link._check_other()


def test_a_region_hears_in_its_welcome_where_it_is_and_whether_the_global_run_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And does not end that run when it leaves."""
    client, welcome = MagicMock(), SimpleNamespace(sequence=3, finished=True)
    client.pull.return_value = 7
    monkeypatch.setattr(UpstreamLink, "_joined", lambda *given: (client, welcome))
    given = parse_upstream("192.0.2.1:7,region=0")
    link = UpstreamLink(given, region_spec("192.0.2.1:7,region=0"), LAYOUT, "", None, 8, print, lambda: None)
    link.leave()
    link._run(ONES, patient=True)
    news = link.news()
    assert isinstance(news, GlobalParameters) and (news.sequence, news.version, news.finished) == (3, 7, True)
    client.leave.assert_called_once_with(finished=False)
