"""Workers of local SGD that exchange fragments with a real server: in shared memory, and over TCP."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fairseq_async.algorithms import FragmentedRule
from fairseq_async.errors import ConfigurationError, RefusedError
from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options.config import DelayedNesterovOptions, NesterovOptions, ServerOptions
from fairseq_async.protocol import Assignment, Layout, Push, PushReply, Report, Status, encode
from fairseq_async.pytorch import AsyncLocalSGD
from fairseq_async.records.events import read_events
from fairseq_async.reporting.audit import audit
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.simulation.trial import Trial
from fairseq_async.simulation.workers import SharedModel
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.compressor import Compressor
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.divided import DividedReplica
from fairseq_async.worker.overlap import BackgroundExchange, local_sgd_worker
from fairseq_async.worker.replica import MasterReplica, TensorReplica
from scripts.faults.thread_server import ThreadServer
from tests.helpers.fragments import INNER_LR, LAYOUT, TARGETS, Descent, streaming
from tests.helpers.mortal import MortalServer
from tests.helpers.references import DelayedNesterov64
from tests.helpers.server_client import lose_next_answer
from tests.helpers.simulations import DN, experiment, finish, trial
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadServer]
PLACES = [slice(0, 1), slice(1, 4), slice(4, 6)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[ThreadServer] = []

    def begin(workers: int, name: str = "run", host: str = "127.0.0.1") -> ThreadServer:
        servers.append(ThreadServer(workers, tmp_path / name, host, local_sgd_main.build))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


def client(server: ThreadServer, worker: int | None = 0, patience: float = 0.0) -> Client:
    return Client(LastingConnection(server.address, server.token, worker, patience))


def parameters(server: ThreadServer) -> Tensor:
    return server.service.described.coordinator.server.parameters


def streaming64(turns: int, delay: int, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """The server's parameters and the worker's, after so many turns of two steps each, of one worker alone, which is
    given bf16 if ``rounded``."""
    target = TARGETS[0].double()
    servers = [DelayedNesterov64(torch.zeros(place.stop - place.start), 0.7, 0.9, 1) for place in PLACES]
    theta, taken = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    answer = sent = torch.zeros(0)
    for turn in range(turns):
        for step in (1, 2):
            theta = theta - INNER_LR * (theta - target)
            if turn and step == delay:
                before = PLACES[(turn - 1) % 3]
                taken[before] = answer
                theta[before] += answer - sent
        place = PLACES[turn % 3]
        sent = theta[place].clone()
        answer = servers[turn % 3].arrive(taken[place] - theta[place]).clone()
        answer = answer.bfloat16().double() if rounded else answer
        if not delay:
            taken[place] = theta[place] = answer
    return torch.cat([server.theta for server in servers]), theta


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("compress", [None, "pull=bf16"])
def test_a_worker_alone_takes_the_steps_of_a_reference_in_float64(
    start: Start, host: str, delay: int, compress: str | None
) -> None:
    """Ten fragments go: three rounds of three, and one more."""
    server = start(1, host=host)
    worker = Descent(client(server), streaming(delay, compress=compress), 1)
    for _ in range(20):
        worker.step()
    worker.local.settle()
    expected, theta = streaming64(10, delay, rounded=compress is not None)
    assert torch.allclose(parameters(server).double(), expected, rtol=0, atol=1e-5)
    assert torch.allclose(worker.theta.double(), theta, rtol=0, atol=1e-5)


def test_one_fragment_without_delay_is_the_whole_model_to_the_bit(start: Start) -> None:
    """Through the code of fragments, which such options do not take by themselves."""
    options = streaming(0, fragments=1, local_steps=2)
    plain, forced = Descent(client(start(1)), options, 1), Descent(client(start(1, "forced")), options, 1)
    assert not isinstance(plain.local.exchanges, BackgroundExchange)
    forced.local.exchanges = BackgroundExchange(forced.local, options.fragments, options.fragment_delay)
    for _ in range(12):
        assert plain.step() == forced.step()
        assert torch.equal(plain.theta, forced.theta)
    assert plain.local.version == forced.local.version == 6


# With the simulation


def real_steps(model: SharedModel, workers: list[Any], simulated: Trial) -> None:
    """The real workers compute what the simulated ones compute, in the same model, in turn."""
    while not all(local.finished for local, *_ in workers):
        for local, logical, own in workers:
            model.flat.copy_(own)
            at = Assignment(
                shard=local.shard,
                offset=local.offset,
                progress=local._progress,
                progress_per_step=local.assignment.progress_per_step,
            )
            model.take_steps(logical, at, range(local.done, local.done + 1), simulated.rate, clip_norm=0.0)
            own.copy_(model.flat)
            local.step(1.0)


@pytest.mark.parametrize(
    ("workers", "host", "method"),
    [
        (1, "127.0.0.1", {}),
        (2, "127.0.0.1", {"grace_period": 60.0}),
        (1, "127.0.0.1", {"compress": "e3m0"}),
        (1, "127.0.0.1", {"compress": "e3m0,pull=int8"}),
        (2, "127.0.0.2", {"grace_period": 60.0, "compress": "e3m0,pull=int8"}),
        (2, "127.0.0.2", {"grace_period": 60.0, "compress": "e3m0,pull=e3m0"}),
    ],
    ids=["alone", "two in rounds", "compressed", "both ways", "both ways by TCP in rounds", "changes by TCP in rounds"],
)
def test_a_real_run_is_the_simulated_one_to_the_bit(
    start: Start, tmp_path: Path, workers: int, host: str, method: dict[str, Any]
) -> None:
    options = DelayedNesterovOptions(local_steps=4, fragments=2, fragment_delay=1, total_steps=12, **method)
    given = DN | {"local_steps": 4, "fragments": 2, "fragment_delay": 1} | method
    cluster = {"workers": workers, "seconds_per_step": 1.0}
    described = experiment(tmp_path, methods={"it": given}, cluster=cluster)
    simulated, other = trial(described), trial(described)
    server, model = start(workers, host=host), other.model
    own = [model.flat.clone() for _ in range(workers)]
    entered = []
    for worker in range(workers):
        named = zip([s.name for s in model.layout.segments], model.layout.views(own[worker]), strict=True)
        local = local_sgd_worker(client(server, worker), TensorReplica(list(named)), options)
        welcome = local.join(local_sgd_spec(options, workers, model.order.sizes, None, {}))
        local.begin(welcome if welcome.initialised else local.bring_parameters(None))
        entered.append((local, other.workers[worker], own[worker]))
    real_steps(model, entered, simulated)
    assert torch.equal(parameters(server), finish(simulated))
    assert all(torch.equal(theta, simulated.parameters) for theta in own), "at the end they have the server's"
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert len(events) == 6 * workers and [event.local_steps for event in events] == [2] * len(events)


# Faults


def test_an_update_whose_answer_is_lost_counts_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed, disturbed = start(1), start(1, "disturbed")
    workers = [Descent(client(server, 0, 30.0), streaming(), 1) for server in (undisturbed, disturbed)]
    for step in range(14):
        if step in (3, 7):
            lose_next_answer(workers[1].local, monkeypatch)
        for worker in workers:
            worker.step()
    for worker in workers:
        worker.local.settle()
    assert torch.equal(parameters(undisturbed), parameters(disturbed))
    assert audit(disturbed.service.run_dir).applied == 7


def test_workers_die_come_back_and_join_in_the_middle_and_each_goes_on_with_its_next_fragment(start: Start) -> None:
    server, options = start(2), streaming(1, total_steps=40)
    first, second = (Descent(client(server, worker), options, 2) for worker in (0, 1))
    for _ in range(7):  # three fragments are sent, the third is on its way
        first.step()
        second.step()
    second.local.settle()
    second.local.client.close()
    joined = Descent(client(server, None), options, 2)
    again = Descent(client(server, 1), options, 2)
    assert (joined.local.sequence, again.local.sequence) == (0, 3)
    assert torch.equal(again.theta, parameters(server))
    everyone = [first, joined, again]
    while not all(worker.local.finished for worker in everyone):
        for worker in everyone:
            if not worker.local.finished:
                worker.step()
    assert all(torch.equal(worker.theta, parameters(server)) for worker in everyone)
    found = audit(server.service.run_dir)
    assert found.applied == found.version >= 40
    assert set(found.counts) == {0, 1, 2}


def test_a_server_that_dies_goes_on_from_its_snapshot_with_the_fragments_that_come_next(tmp_path: Path) -> None:
    """At two lines of its code, between updates of which each has its snapshot."""
    server = MortalServer(1, tmp_path / "run", "127.0.0.1", local_sgd_main.build, [700, 1900])
    try:
        options = streaming(1, total_steps=60)
        spec = local_sgd_spec(options, 1, [], ServerOptions(snapshot_seconds=1e-3), {})
        worker = Descent(Client(LastingConnection(server.address, server.token, 0, 30.0)), options, 1, spec)
        for _ in range(8):
            worker.step()
        server.begin_to_die()
        worker.run()
        coordinator = server.service.described.coordinator
        assert server.lives == 3, server.places
        assert torch.equal(worker.theta, coordinator.server.parameters)
        found = audit(tmp_path / "run")
        assert found.version == coordinator.server.version and len(found.rollbacks) == 2
    finally:
        server.stop()


def push(connected: Client, sequence: int) -> PushReply:
    """An update of the worker, whose values depend on its number."""
    report = Report(local_steps=2, step_seconds=0.0)
    return connected.push(lambda slot: slot.fill_(0.1 * (sequence + 1)), Push(sequence, 0, 1.0, report))


def test_a_state_has_the_momentum_of_each_fragment(start: Start, tmp_path: Path) -> None:
    """Half of the updates go to a server that goes on from the other's state."""
    straight, resumed = start(1), start(1, "resumed")
    own, other = (Descent(client(server), streaming(), 1).local.client for server in (straight, start(1, "first")))
    for sequence in range(8):
        if sequence == 4:
            other.save_state(str(tmp_path / "state.pt"))
            other = Descent(client(resumed), streaming(), 1, state=tmp_path / "state.pt").local.client
        push(own, sequence)
        push(other, sequence)
    assert torch.equal(parameters(straight), parameters(resumed))
    rule = straight.service.described.coordinator.server.rule
    assert isinstance(rule, FragmentedRule) and len(rule.state_dict()["fragments"]) == 3
    with pytest.raises(
        RefusedError, match="momentum is of 3 fragments, this run has 2: give --fragments 3, or begin anew"
    ):
        Descent(client(start(1, "two")), streaming(fragments=2), 1, state=tmp_path / "state.pt")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["this machine", "TCP"])
@pytest.mark.parametrize("codec", ["e3m0", "topk:chunk=2,keep=1", "adacomp:bin_size=2"])
def test_what_was_sent_of_a_fragment_and_its_residual_are_the_sum_of_its_updates(
    start: Start, monkeypatch: pytest.MonkeyPatch, codec: str, host: str
) -> None:
    """The server subtracts what it is sent. One answer is lost, and the update of one number has NaN."""
    options = NesterovOptions(local_steps=6, fragments=3, compress=codec, outer_lr=1.0, outer_momentum=0.0)
    server = start(1, host=host)
    worker = Descent(client(server, 0, 30.0), options, 1).local  # type: ignore[arg-type]
    updates, generator = torch.zeros(6, dtype=torch.float64), torch.Generator().manual_seed(1)
    for sequence in range(12):
        update, place = torch.randn(6, generator=generator), PLACES[sequence % 3]
        if sequence == 4:
            lose_next_answer(worker, monkeypatch)
        if sequence == 7:
            update[place] = torch.nan
        else:
            updates[place] += update[place]
        report = Report(local_steps=2, step_seconds=0.0)
        worker.client.push(lambda slot, sent=update: slot.copy_(sent), Push(sequence, 0, 1.0, report))
    compressor = worker.client.compressor
    assert compressor is not None
    left = torch.cat([part["feedback"]["residual"] for part in compressor.state_dict()["parts"]])
    assert left.any() and torch.allclose(left - parameters(server), updates, rtol=0, atol=1e-5)
    events = read_events(server.service.run_dir / "events.jsonl")
    statuses = [event.status for event in events if event.status is not Status.DUPLICATE]
    assert statuses == [Status.REFUSED if sequence == 7 else Status.APPLIED for sequence in range(12)]
    assert all(event.bytes_sent < 100 for event in events if event.bytes_sent), "one fragment's payload"


def test_residuals_of_fragments_come_back_with_the_worker_and_not_to_other_fragments() -> None:
    def made(fragments: int) -> Compressor:
        options = NesterovOptions(local_steps=6, fragments=fragments, compress="e3m0")
        assert options.compress.push is not None
        return Compressor(options.compress.push, local_sgd_spec(options, 1, [], None, {}), LAYOUT, 0)

    one, back = made(3), made(3)
    for sequence, size in enumerate((1, 3, 2, 1)):
        one.encode(Push(sequence, 0, 1.0, Report()), torch.arange(1.0, 1.0 + size) / 3)
        one.settle(taken=sequence != 1)
    assert back.load_state_dict(one.state_dict(), 4) and not made(2).load_state_dict(one.state_dict(), 4)
    residuals = [part["feedback"]["residual"].tolist() for part in back.state_dict()["parts"]]
    assert residuals[1] == pytest.approx([1 / 3, 2 / 3, 1.0]) and residuals[2][1] == 0.0
    push, update = Push(4, 0, 1.0, Report()), torch.zeros(3)
    (_, first), (_, second) = one.encode(push, update), back.encode(push, update)
    assert first is not None and second is not None and torch.equal(first, second)
    assert one.decode(first, 3, push).tolist() == [0.25, 0.5, 1.0], "what was refused goes with the next"
    late = made(3)  # of a worker that is started again without its checkpoint, and goes on behind its last update
    assert late.encode(push, torch.tensor([0.3, 0.4, 0.9]))[1] is not None
    late.settle(taken=True)
    parts = late.state_dict()["parts"]
    assert late.state_dict()["sequence"] == 5
    assert [bool(torch.any(part["feedback"]["residual"])) for part in parts] == [False, True, False]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_worker_whose_update_has_nan_takes_the_whole_model(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    server = start(1)
    worker = Descent(client(server, 0, 30.0), streaming(), 1)
    for _ in range(4):
        worker.step()
    worker.theta.fill_(float("nan"))
    if is_lost:
        worker.local.settle()
        lose_next_answer(worker.local, monkeypatch)
    for _ in range(3):
        worker.step()
    assert torch.equal(worker.theta, parameters(server))
    worker.step()
    assert worker.local.refusals.in_a_row == 1 and torch.isfinite(worker.theta).all()


def test_a_fragment_of_another_size_is_refused_and_the_worker_may_go_on(start: Start) -> None:
    server = start(1, host="127.0.0.2")
    connected = Descent(client(server), streaming(), 1).local.client
    channel, wrong = connected.connection.channel, Push(0, 0, 1.0, Report(local_steps=2, step_seconds=0.0))
    channel.send(encode(wrong), torch.zeros(3))
    with pytest.raises(RefusedError, match="the fragment has 4 bytes: 12 were sent"):
        channel.answer(PushReply)
    assert push(connected, 0).version == 1


# In PyTorch, and at other replicas


def test_a_loop_of_pytorchs_own_trains_in_fragments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = ThreadWorkers(monkeypatch, tmp_path, 2, local_sgd_main.build)
    options: dict[str, Any] = {"local_steps": 4, "fragments": 2, "fragment_delay": 1, "total_steps": 16}

    def train(worker: int) -> Tensor:
        model = nn.Linear(3, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        with AsyncLocalSGD(model, optimizer, **options) as training:
            while not training.finished:
                optimizer.zero_grad()
                model(torch.eye(3)).square().sum().backward()
                optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    try:
        first, second = workers.run(train)
        assert torch.equal(first, second) and torch.equal(first, parameters(workers.server))
        assert audit(tmp_path).applied == 16
    finally:
        workers.server.stop()


def test_masters_in_parts_are_read_and_written_by_fragment() -> None:
    """This rank has the second half of ``a``, nothing of ``b``, and all of ``c``."""
    named = [("a", torch.zeros(2).half()), ("b", torch.zeros(1).half()), ("c", torch.zeros(2).half())]
    masters = [(1, torch.tensor([1.0])), None, (0, torch.tensor([2.0, 3.0]))]
    part = MasterReplica(named, masters).part(slice(1, 3))
    flat = torch.zeros(3)
    part.read(flat)
    assert flat.tolist() == [0.0, 2.0, 3.0]
    part.write(torch.tensor([5.0, 6.0, 7.0]))
    assert masters[2][1].tolist() == [6.0, 7.0] and masters[0][1].tolist() == [1.0]  # type: ignore[index]
    assert [tensor.tolist() for _, tensor in named] == [[0.0, 0.0], [5.0], [6.0, 7.0]]


def test_a_model_of_which_each_rank_has_parts_is_read_and_written_by_fragment() -> None:
    """This rank has the second half of ``a``, nothing of ``b``, and the third element of ``c``."""
    layout = Layout.of([("a", torch.zeros(2)), ("b", torch.zeros(1)), ("c", torch.zeros(4))])
    held, gradients = ([torch.tensor(each) for each in ([n], [], [2 * n])] for n in (1.0, 5.0))
    part = DividedReplica(layout, [1, 1, 2], lambda: held, lambda: gradients).part(slice(1, 3))
    assert [(name, tensor.tolist()) for name, tensor in part.named] == [("c", [2.0])]
    flat = torch.zeros(5)
    part.read(flat)
    assert flat.tolist() == [0.0, 0.0, 0.0, 2.0, 0.0]
    part.write_gradients(flat, 0.5)
    assert flat.tolist() == [0.0, 0.0, 0.0, 5.0, 0.0]
    part.subtract(flat)
    assert flat.tolist() == [0.0, 0.0, 0.0, 3.0, 0.0]
    part.write(torch.tensor([5.0, 6.0, 7.0, 8.0, 9.0]))
    assert [tensor.tolist() for tensor in held] == [[1.0], [], [8.0]]


# What does not go together


@pytest.mark.parametrize(
    ("changes", "server", "said"),
    [
        ({"upstream": "10.0.0.1:29500"}, {}, "--upstream does not go with --fragments: a region merges the whole"),
        ({}, {"max_update_norm_ratio": 5.0}, "--max-update-norm-ratio does not go with --fragments: the norms"),
        ({"local_steps": 7}, {}, "--local-steps is 7: with --fragments 2 give a multiple of it"),
    ],
)
def test_what_does_not_go_with_fragments_is_refused_in_one_line(
    changes: dict[str, Any], server: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigurationError, ValueError)) as caught:
        options = NesterovOptions(**{"local_steps": 6, "fragments": 2} | changes)
        local_sgd_spec(options, 2, [], ServerOptions(**server), {})
    assert said in str(caught.value)


def test_more_fragments_than_tensors_are_refused_before_the_server_hears_of_it(start: Start) -> None:
    with pytest.raises(ConfigurationError, match="--fragments is 4: the model has 3 tensors; give at most as many"):
        Descent(client(start(1)), streaming(fragments=4, local_steps=4), 1)


@pytest.mark.parametrize(
    "options",
    [*map(streaming, (0, 1, 2)), *(DelayedNesterovOptions(local_steps=2, overlap=over) for over in (False, True))],
    ids=["fragments", "a step later", "two steps later", "whole", "overlapped"],
)
def test_a_worker_whose_run_is_over_has_nothing_left_to_send(start: Start, options: DelayedNesterovOptions) -> None:
    """Not even the steps that it took while its last update was on its way."""
    server = start(1)
    worker = Descent(client(server), options.model_copy(update={"total_steps": 24}), 1)
    worker.run()
    assert (worker.local.done, worker.local.has_work()) == (0, False)
    assert torch.equal(worker.theta, parameters(server))
