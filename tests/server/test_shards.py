"""A server in shards takes the steps of one that is a single process; each shard is a real process here."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fairseq_async.algorithms import HybridAccumulation, NesterovMomentum, StalenessPolicy, Update
from fairseq_async.algorithms.threads import set_threads, thread_count
from fairseq_async.errors import ConfigurationError, HalfAppliedError, RefusedError
from fairseq_async.method.methods import OuterRule, outer_rule
from fairseq_async.method.rules import OUTER_RULES
from fairseq_async.method.spec import MethodSpec, hybrid_spec, local_sgd_spec
from fairseq_async.options.config import HybridOptions, LocalSGDOptions, ServerOptions
from fairseq_async.protocol import Hello, Initialise, Layout, Welcome
from fairseq_async.protocol.parsing import parse_one
from fairseq_async.protocol.receipt import Status
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, ParameterGroup
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.plan import Build, EpochPlan
from fairseq_async.server.programs import gradient_main, local_sgd_main
from fairseq_async.server.run import Run
from fairseq_async.server.shards import build as building
from fairseq_async.server.shards.build import close_shards
from fairseq_async.server.shards.calls import Answer, Call, encode
from fairseq_async.server.shards.process import ShardProcess
from fairseq_async.server.shards.rule import ShardedRule, _as_the_first
from tests.helpers.in_process import Connection, end, new_service
from tests.helpers.sharded import ADAM, LAYOUT, OUTER, SIZES, Served, options_of


def hybrid(shards: int, inner: OptimizerSpec = ADAM) -> MethodSpec:
    options = HybridOptions(updates_per_step=2)
    return hybrid_spec(options, 2, ServerOptions(server_shards=str(shards)), inner.to_json(), 0)


def local_sgd(shards: int, outer: str, **changes: Any) -> MethodSpec:
    options = outer_rule(outer).options(outer=outer, **OUTER[outer] | changes)
    return local_sgd_spec(options, 2, [], ServerOptions(server_shards=str(shards)), {})


def served(build: Build, spec: MethodSpec, directory: Path, staleness: StalenessPolicy | None = None) -> Served:
    return Served(build, spec, directory, lambda rule, own: ParameterServer(own, rule, staleness=staleness))


def results(
    build: Build, spec: Callable[[int], MethodSpec], directory: Path, staleness: StalenessPolicy | None = None
) -> list[tuple[Tensor, list[Any]]]:
    """The parameters with what work starts from, and the receipts, in 1, 2 and 3 shards."""
    found = []
    for shards in (1, 2, 3):
        with served(build, spec(shards), directory, staleness) as made:
            for worker in (0, 1):
                made.server.note_pull(worker, made.parameters)
            set_threads(6)  # of the first process; the shards divide them among themselves for each update
            receipts = made.push(0, 7)
            assert thread_count() == 6
            set_threads(1)
            found.append((torch.stack([made.parameters, made.server.dispatch()]), receipts))
    return found


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD"])
def test_an_optimizer_that_takes_each_element_by_itself_steps_equally_in_any_number_of_shards(
    optimizer: str, tmp_path: Path
) -> None:
    groups = [replace(each, options=each.options | {"weight_decay": 0.01}) for each in ADAM.parameter_groups]
    inner = OptimizerSpec(optimizer, groups)
    (alone, receipts), *others = results(gradient_main.build, lambda shards: hybrid(shards, inner), tmp_path)
    for parameters, said in others:
        assert torch.equal(parameters, alone)
        assert list(map(repr, said)) == list(map(repr, receipts))


@pytest.mark.parametrize("kind", ["Muon", "MuonAdamW"])
def test_matrices_are_whole_in_any_number_of_shards(kind: str, tmp_path: Path) -> None:
    """Muon orthogonalises a matrix; of two halves it would make two other ones. Two shards divide the second matrix
    from the third, not at half of the elements."""
    shapes = [(40, 30), (90, 70), (30, 90), (20, 20), (7, 300), (5, 5)]
    layout = Layout.of([(f"t{number}", torch.zeros(shape)) for number, shape in enumerate(shapes)])
    groups = [ParameterGroup([0, 1, 3, 4], {"lr": 0.1}), ParameterGroup([2, 5], {"lr": 0.02})]
    if kind == "MuonAdamW":
        groups[1] = replace(groups[1], options={"lr": 0.02, "use_muon": False})
    found = []
    for shards in (1, 2, 3):
        spec = hybrid(shards, OptimizerSpec(kind, groups))
        with Served(
            gradient_main.build, spec, tmp_path, lambda rule, own: ParameterServer(own, rule), layout=layout
        ) as made:
            made.push(0, 7)
            found.append(made.parameters.clone())
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("outer", OUTER)
def test_an_outer_rule_steps_equally_in_any_number_of_shards(outer: str, tmp_path: Path) -> None:
    (alone, receipts), *others = results(local_sgd_main.build, lambda shards: local_sgd(shards, outer), tmp_path)
    assert getattr(options_of(outer), "start_ahead", False) != torch.equal(*alone)
    for parameters, said in others:
        assert torch.equal(parameters, alone)
        for ours, theirs in zip(said, receipts, strict=True):
            assert ours.cosine == pytest.approx(theirs.cosine, rel=1e-4, abs=1e-6, nan_ok=True)
            assert repr(replace(ours, cosine=0.0)) == repr(replace(theirs, cosine=0.0))


@pytest.mark.parametrize("outer", sorted({*OUTER} - {"diloco"}))
def test_each_fragment_has_the_outer_rule_of_a_model_of_its_tensors_alone(outer: str) -> None:
    random, parameters = torch.Generator().manual_seed(1), torch.zeros(LAYOUT.size)
    whole, _ = local_sgd_main.build(local_sgd(1, outer, fragments=3, local_steps=3), LAYOUT, parameters)
    for turn, fragment in enumerate(LAYOUT.fragments(3)):
        own, layout = torch.zeros(fragment.size), Layout(LAYOUT.segments[fragment.tensors])
        rule, _ = local_sgd_main.build(local_sgd(1, outer), layout, own)
        for number in range(4):
            delta = torch.randn(fragment.size, generator=random)
            whole.apply(parameters, Update(0, 3 * number + turn, 0, 1.0, delta.clone()))
            rule.apply(own, Update(0, number, 0, 1.0, delta))
        assert torch.equal(fragment.of(parameters), own)


@pytest.mark.parametrize("staleness", [StalenessPolicy(power=-0.5), StalenessPolicy(compensation=0.3)], ids=repr)
def test_what_a_stale_update_is_worth_is_the_same_in_all_shards(staleness: StalenessPolicy, tmp_path: Path) -> None:
    (plain, _), *_ = results(local_sgd_main.build, lambda shards: local_sgd(shards, "mla"), tmp_path)
    (alone, _), *others = results(local_sgd_main.build, lambda shards: local_sgd(shards, "mla"), tmp_path, staleness)
    assert not torch.equal(plain, alone)
    assert all(torch.equal(parameters, alone) for parameters, _ in others)


def test_a_gradient_is_clipped_by_the_norm_of_all_shards(tmp_path: Path) -> None:
    inner = OptimizerSpec("SGD", [ParameterGroup(list(range(len(SIZES))), {"lr": 1.0})], clip_norm=0.5)
    for shards in (2, 3):
        with served(gradient_main.build, hybrid(shards, inner), tmp_path) as made:
            before = made.parameters.double()
            made.push(0, 2)
            step = before - made.parameters.double()
        noise = [torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(100 + n)).double() for n in (0, 1)]
        mean = (noise[0] + 2 * noise[1]) / 3
        torch.testing.assert_close(step, 0.5 * mean / mean.norm(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_the_norm_of_a_gradient_that_overflows_reaches_the_other_shards(norm: float) -> None:
    assert repr(parse_one(encode(Answer(norm)), Answer).value) == repr(norm)
    assert repr(parse_one(encode(Call("compare", [norm])), Call).arguments) == repr([norm])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Call("system", ["true"]), "a shard has no method 'system'"),
        (Call("__class__", []), "a shard has no method '__class__'"),
        (Call("load_state_dict", [{}]), "a shard has no method 'load_state_dict'"),
        (Call("limit_round", ["2"]), "limit_round: 1 mistakes in its arguments"),
        (Call("limit_round", [True]), "limit_round: 1 mistakes in its arguments"),
        (Call("limit_round", [1, 2]), "limit_round: 1 mistakes in its arguments"),
        (Call("end_epoch", [1.0, None]), "end_epoch: 1 mistakes in its arguments"),
    ],
)
def test_a_message_calls_nothing_but_the_methods_of_the_table_with_arguments_of_their_types(
    call: Call, said: str, tmp_path: Path
) -> None:
    with served(gradient_main.build, hybrid(2), tmp_path) as made:
        assert isinstance(made.rule, ShardedRule)
        shard = made.rule.others[0]
        shard.send(call)
        with pytest.raises(HalfAppliedError, match=f"shard 1 of the server has failed: ProtocolError: {said}"):
            shard.value()


def test_a_shard_that_answers_with_another_type_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(gradient_main.build, hybrid(2), tmp_path) as made:
        assert isinstance(made.rule, ShardedRule)
        shard = made.rule.others[0]
        monkeypatch.setattr(shard, "answer", lambda: Answer("1"))
        with pytest.raises(HalfAppliedError, match="shard 1 of the server answers moves_parameters with '1'"):
            shard.result(HybridAccumulation.moves_parameters)


def test_a_step_of_few_micro_batches_is_as_small_a_part_of_one_in_every_shard(tmp_path: Path) -> None:
    """Of the eight of two workers there are five."""
    options, found = HybridOptions(shares="auto", micro_batches=4), []
    for shards in (1, 2):
        spec = hybrid_spec(options, 2, ServerOptions(server_shards=str(shards)), ADAM.to_json(), 0)
        with served(gradient_main.build, spec, tmp_path) as made:
            for worker in (0, 1):
                slot = made.memory.slot(worker).fill_(1.0 + worker)
                made.server.push(Update(worker, 0, 0, 1.0, slot, micro_batches=2 + worker))
            assert isinstance(made.plan, EpochPlan) and made.plan.schedule.steps == 5 / 8
            found.append(made.parameters.clone())
    assert torch.equal(*found)


@pytest.mark.parametrize(("saved", "now"), [(3, 2), (1, 2), (2, 1)])
def test_the_state_of_a_server_in_another_number_of_shards_is_refused(saved: int, now: int) -> None:
    run: Any = SimpleNamespace(spec=hybrid(now))
    said = f"server in {saved} shards, this run's is in {now}: give --server-shards {saved}, or begin anew"
    with pytest.raises(RefusedError, match=said):
        Run._check_state(run, {"method": "hybrid_async", "server_shards": saved})
    Run._check_state(run, {"method": "hybrid_async", "server_shards": now})


def test_a_nan_in_one_shard_keeps_the_update_out_of_all(tmp_path: Path) -> None:
    with served(gradient_main.build, hybrid(3), tmp_path) as made:
        before = made.parameters.clone()
        (receipt,) = made.push(0, 1, lambda delta: delta[-1].fill_(float("nan")))
        assert receipt.status is Status.REFUSED
        assert torch.equal(made.parameters, before)
        made.push(1, 2)
        assert not torch.equal(made.parameters, before) and torch.isfinite(made.parameters).all()


@pytest.mark.parametrize("method", ["hybrid", "delayed_nesterov"])
def test_a_server_goes_on_from_the_state_of_another_in_as_many_shards(method: str, tmp_path: Path) -> None:
    build: Build = gradient_main.build if method == "hybrid" else local_sgd_main.build
    spec = hybrid(3) if method == "hybrid" else local_sgd(3, method)
    path = tmp_path / "state.pt"
    with served(build, spec, tmp_path) as first:
        first.push(0, 3)  # one waits for its step
        torch.save(first.server.state_dict(), path)
        first.push(3, 3)
        with served(build, spec, tmp_path) as second:
            second.server.load_state_dict(torch.load(path, weights_only=True))
            second.push(3, 3)
            assert torch.equal(second.parameters, first.parameters)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["state.pt"]


def test_every_shard_has_the_options_of_the_first_which_a_user_may_have_changed() -> None:
    groups = [{"params": [0], "lr": 0.5, "betas": (0.8, 0.9)}, {"params": [1, 2], "lr": 0.25, "betas": (0.7, 0.9)}]
    first = {"schedule": {"warmup": 3}, "optimizer": {"state": {0: "its own"}, "param_groups": groups}, "steps": 2.0}
    saved = [{"params": [0, 1], "lr": 1.0, "betas": (0.1, 0.2)}, {"params": [2], "lr": 2.0, "betas": (0.1, 0.2)}]
    state = {"schedule": {"warmup": 9}, "optimizer": {"state": {0: "kept"}, "param_groups": saved}, "weight": 4.0}
    found = _as_the_first(state, first)
    assert found["schedule"] == {"warmup": 3} and found["weight"] == 4.0 and found["optimizer"]["state"] == {0: "kept"}
    assert found["optimizer"]["param_groups"] == [groups[0] | {"params": [0, 1]}, groups[1] | {"params": [2]}]


def test_a_shard_that_was_killed_ends_the_server(tmp_path: Path) -> None:
    with served(gradient_main.build, hybrid(3), tmp_path) as made:
        assert isinstance(made.rule, ShardedRule)
        made.push(0, 2)
        os.kill(made.rule.others[1].pid, signal.SIGKILL)
        with pytest.raises(HalfAppliedError):
            made.push(2, 1)


def test_a_shard_ends_although_a_process_that_was_forked_later_has_its_socket() -> None:
    """As the data loaders of a replay have."""
    shard = ShardProcess(1, dict)
    later = os.dup(shard.channel.connection.fileno())
    killer = threading.Timer(20, os.kill, (shard.pid, signal.SIGKILL))
    killer.start()
    shard.close()
    assert not killer.finished.is_set()
    killer.cancel()
    os.close(later)


def test_epochs_and_limits_of_rounds_reach_every_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [[0.5, 0.5], [0.25, 0.25]]  # of both groups, for the first step and all later ones
    parameters, called, call = [], list[tuple[Any, ...]](), ShardProcess.call

    def noted(of: ShardProcess, method: Callable[..., Any], *given: Any, **rest: Any) -> None:
        called.append((method.__name__, *given))
        call(of, method, *given, **rest)

    monkeypatch.setattr(ShardProcess, "call", noted)
    for shards in (1, 2):
        with served(gradient_main.build, hybrid(shards, replace(ADAM, learning_rates=rates)), tmp_path) as made:
            assert isinstance(made.plan, EpochPlan)
            made.rule.limit_round(1)  # every gradient is a step now
            made.plan.schedule.begin_epoch(1)
            made.push(0, 2)
            made.plan.schedule.end_epoch(1, 2.0)
            assert (made.plan.schedule.learning_rate, made.plan.schedule.steps) == (0.25, 2.0)
            parameters.append(made.parameters.clone())
    assert torch.equal(*parameters)
    assert {("limit_round", 1), ("begin_epoch", 1), ("end_epoch", 1, 2.0)} <= set(called)


def test_more_shards_than_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="--server-shards makes 7 shards: the model has 6 tensors"):
        served(gradient_main.build, hybrid(7), tmp_path)


@pytest.mark.parametrize("outer", ["sgd", "nesterov", "delayed_nesterov", "mla", "heloco"])
@pytest.mark.parametrize("fragments", [2, 3])
def test_every_fragment_is_divided_among_all_shards(outer: str, fragments: int, tmp_path: Path) -> None:
    """As if each was a model of its own. Of three fragments two have one tensor, which only the first shard has."""
    found = []
    for shards in (1, 2):
        spec = local_sgd(shards, outer, fragments=fragments, local_steps=12)
        with served(local_sgd_main.build, spec, tmp_path) as made:
            receipts = made.push(0, 7)
            state = tmp_path / f"{shards}.pt"
            torch.save(made.server.state_dict(), state)
            starts = torch.cat([made.server.dispatch_fragment(n).clone() for n in range(fragments)])
            with served(local_sgd_main.build, spec, tmp_path) as second:
                second.server.load_state_dict(torch.load(state, weights_only=True))
                second.push(7, 5)
                made.push(7, 5)
                assert torch.equal(second.parameters, made.parameters)
            found.append((torch.stack([made.parameters, starts]), receipts, made.plan))
    (alone, said, plan), (divided, told, its) = found
    assert torch.equal(divided, alone)
    for ours, theirs in zip(told, said, strict=True):
        assert ours.cosine == pytest.approx(theirs.cosine, rel=1e-4, abs=1e-6, nan_ok=True)
        assert repr(replace(ours, cosine=0.0)) == repr(replace(theirs, cosine=0.0))
    assert isinstance(plan, LocalStepPlan) and isinstance(its, LocalStepPlan)
    assert its.local_steps == plan.local_steps == 12 // fragments


@pytest.fixture
def own_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[OuterRule[LocalSGDOptions]]:
    """A rule as of a user, which is registered with nothing about shards."""
    rule = OuterRule("mine", LocalSGDOptions, lambda options, context: NesterovMomentum(0.7, 0.9, context.workers))
    monkeypatch.setitem(OUTER_RULES, "mine", rule)
    yield rule


def test_a_rule_of_ones_own_is_refused_where_it_may_look_at_the_whole_model(
    own_rule: OuterRule[LocalSGDOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as the rule of a global server, which has as many shards as its regions. A divisible one has shards."""
    for options in (
        LocalSGDOptions(outer="mine"),
        options_of("sgd").model_copy(update={"upstream": "10.0.0.1:1,outer=mine"}),
    ):
        with pytest.raises(ConfigurationError, match="--server-shards 2 does not go with --outer mine"):
            local_sgd_spec(options, 2, [], ServerOptions(server_shards="2"), {})
    monkeypatch.setitem(OUTER_RULES, "mine", replace(own_rule, divisible=True))

    def spec(shards: int) -> MethodSpec:
        return local_sgd_spec(LocalSGDOptions(outer="mine"), 2, [], ServerOptions(server_shards=str(shards)), {})

    (alone, _), *others = results(local_sgd_main.build, spec, tmp_path)
    assert all(torch.equal(parameters, alone) for parameters, _ in others)


def copies_in_own_memory() -> set[int]:
    """Where vectors of the model's size begin that this process does not share with others."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if isinstance(each, Tensor) and not is_lazy(each))
    found = {each.data_ptr() for each in tensors if each.numel() == LAYOUT.size}
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    private = [[int(end, 16) for end in span.split("-")] for span, access, *_ in lines if access.endswith("p")]
    return {begin for begin in found if any(low <= begin < high for low, high in private)}


def test_a_shard_inherits_no_copy_of_the_parameters_which_it_would_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process has in memory when another is forked from it stays in the other's."""
    inherited: list[set[int]] = []

    class Noted(ShardProcess):
        def __init__(self, *given: Any) -> None:
            inherited.append(copies_in_own_memory() - before)
            super().__init__(*given)

    monkeypatch.setattr(building, "ShardProcess", Noted)
    service = new_service(2, tmp_path, gradient_main.build, lambda: 1000.0)
    before = copies_in_own_memory()
    worker = Connection(service)
    worker.introduce(0)
    worker.ask(Hello(hybrid(3), LAYOUT, remote=False), Welcome)
    worker.ask(Initialise(False), Welcome)
    try:
        assert inherited == [set(), set()]
    finally:
        close_shards(service.described.coordinator.server.rule)
        end(service)


def test_a_snapshot_stays_as_it_is_while_the_server_takes_further_updates(tmp_path: Path) -> None:
    """Another process writes it, which shares the memory of the shards."""
    service = new_service(1, tmp_path, gradient_main.build, lambda: 1000.0)
    worker = Connection(service)
    worker.introduce(0)
    worker.ask(Hello(hybrid(2), LAYOUT, remote=False), Welcome)
    worker.ask(Initialise(False), Welcome)
    server = service.described.coordinator.server
    try:
        state = service.described.snapshot()
        before = server.parameters.clone()
        for sequence in range(2):
            server.push(Update(0, sequence, 0, 1.0, service.described.slots.memory.slot(0).fill_(1.0)))
        assert not torch.equal(server.parameters, before)
        assert torch.equal(state["server"]["parameters"], before)
    finally:
        close_shards(server.rule)
        end(service)


def own_bytes(pid: int) -> int:
    """Memory that this process has for itself: what it has written, and what those have freed who had it, too."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


def bytes_of_a_shard(tmp_path: Path, layout: Layout, restored: bool) -> int:
    """After a step of its server, which begins anew and leaves a state, or goes on from that."""
    service = new_service(1, tmp_path, gradient_main.build, lambda: 1000.0)
    worker = Connection(service)
    worker.introduce(0)
    adam = OptimizerSpec("Adam", [ParameterGroup([0, 1], {"lr": 0.1})])
    welcome = worker.ask(Hello(hybrid(2, adam), layout, remote=False), Welcome)
    if restored:
        Path(tmp_path / "state.pt").rename(welcome.state_path)
    worker.ask(Initialise(restored), Welcome)
    server = service.described.coordinator.server
    for _ in range(2):
        slot = service.described.slots.memory.slot(0).fill_(1.0)
        server.push(Update(0, server.sequences.get(0, -1) + 1, server.version, 1.0, slot))
    assert isinstance(server.rule, ShardedRule)
    found = own_bytes(server.rule.others[0].pid)
    if not restored:
        Path(service.described.save_state(0).path).rename(tmp_path / "state.pt")
    close_shards(server.rule)
    end(service)
    return found


def test_a_shard_keeps_nothing_of_the_state_with_which_its_server_goes_on(tmp_path: Path) -> None:
    """It was read before the process was forked."""
    layout = Layout.of([(name, torch.zeros(4_000_000)) for name in "ab"])
    before = bytes_of_a_shard(tmp_path, layout, restored=False)
    gc.collect()
    after = bytes_of_a_shard(tmp_path, layout, restored=True)
    assert after < before + layout.size, "a quarter of a copy; a state has several"
