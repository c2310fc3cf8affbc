"""What ``initialize`` makes of a configuration for one rank of one worker, without processes."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from fairseq_async.deepspeed_plugin import config as configuration
from fairseq_async.deepspeed_plugin.arguments import Arguments
from fairseq_async.deepspeed_plugin.data import DataShare
from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.bare_engines import noting
from tests.helpers.stand_ins import Numbers, Position

CONTEXT = WorkerContext(worker=2, workers=3, rank=1, island_size=4)
SIZES = {"train_batch_size": 120, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}
CONFIG = SIZES | {"csv_monitor": {"job_name": "job"}}
OWN = CONFIG | {"train_batch_size": 40, "csv_monitor": {"job_name": "job-worker2"}}


@pytest.fixture
def initialize(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, without what it starts."""
    module = import_module("fairseq_async.deepspeed_plugin.initialize")
    names = [
        "start_world",
        "note_untrained",
        "fix_batch_size",
        "server_description",
        "_init_distributed",
        "HybridWorker",
        "Copies",
        "MovingReplica",
    ]
    for name in [*names, "replica_of", "with_buffers", "local_sgd_worker", "leave_at_exit"]:
        monkeypatch.setattr(module, name, MagicMock(name=name))
    monkeypatch.setattr(module, "atexit", MagicMock())
    monkeypatch.setattr(module, "_made", [])
    monkeypatch.setattr(module, "trainable", lambda engine: [("weight", engine.weight)])
    monkeypatch.setattr(module, "entered_world", lambda: None)

    def change_class(engine: MagicMock, kind: type) -> MagicMock:
        engine.kind = kind
        return engine

    monkeypatch.setattr(module, "_change_class", change_class)
    return module


def given(method: str, **section: Any) -> tuple[Any, Any]:
    """The section of a method and its options."""
    return configuration.split({"async_training": {"method": method, "run_dir": "runs/x"} | section}, "file.json")[1:]


def arguments_of(engine: MagicMock, data: object = None) -> MagicMock:
    arguments = MagicMock(training_data=data, others={"model_parameters": None, "mpu": None})
    arguments.name = "file.json"
    arguments.make_engine.return_value = engine, "optimizer", "schedule"
    return arguments


@pytest.mark.parametrize("world", [None, "entered"])
def test_a_rank_of_local_sgd_has_its_workers_share_and_monitor_and_its_place_in_the_island(
    initialize: Any, monkeypatch: pytest.MonkeyPatch, world: object
) -> None:
    monkeypatch.setattr(initialize, "entered_world", lambda: world)
    engine, client = MagicMock(), MagicMock()
    arguments = arguments_of(engine, Numbers(45))
    section, options = given("local_sgd", shards=7, total_steps=40)
    made = initialize._make_worker_engine(arguments, options, section, CONFIG, CONTEXT, client, "server")
    assert made == (engine, engine.optimizer, arguments.make_loader(), engine.lr_scheduler)
    assert engine.kind is initialize.LocalEngine and initialize._made == [engine]
    arguments.make_engine.assert_called_once_with(OWN)
    assert initialize.start_world.mock_calls == [call(CONTEXT)] * (world is None)
    worker = initialize.local_sgd_worker()
    initialize.replica_of.assert_called_once_with(engine, 1)
    assert initialize.with_buffers.call_args.args == (initialize.replica_of(), engine.module, options, False)
    initialize.Copies.assert_called_once_with([engine.basic_optimizer], CONTEXT.island_size, engine.device)
    moving = initialize.MovingReplica
    moving.assert_called_once_with(initialize.with_buffers(), initialize.Copies())
    assert initialize.local_sgd_worker.call_args_list[0].args == (client, moving(), options)
    engine.basic_optimizer.register_step_post_hook.call_args.args[0](engine.basic_optimizer, (), {})
    initialize.Copies().note.assert_called_once_with()
    initialize.note_untrained.assert_called_once_with(worker, engine.module, {id(engine.weight)})
    ((given_worker, spec, context, run_dir), _) = engine.set_up.call_args
    assert (given_worker, context, run_dir) == (worker, CONTEXT, Path("runs/x"))
    assert (spec.workers, spec.total_steps, spec.micro_batches) == (3, 40, 0)
    sizes = [7, 7, 7, 6, 6, 6, 6]
    assert spec.shards == sizes
    first = arguments.make_loader.call_args_list[0].args
    assert first == (engine, sizes, options, (1, 4), engine.join_run, OWN)
    initialize.atexit.register.assert_called_once_with(initialize.leave_at_exit, client, engine, "server")
    initialize.fix_batch_size.assert_not_called()
    initialize._init_distributed.assert_called_once_with()


@pytest.mark.parametrize(
    ("kind", "section", "scale"),
    [
        (None, {}, 1.0),
        (torch.bfloat16, {"fp16": {"loss_scale": 8}}, 1.0),
        (torch.float16, {"fp16": {"loss_scale": 8}}, 8.0),
    ],
)
@pytest.mark.parametrize(("shares", "micro_batches"), [("equal", 0), ("auto", 5)])
def test_a_rank_of_hybrid_async_leaves_its_optimizer_to_the_server(
    initialize: Any, kind: torch.dtype | None, section: dict[str, Any], scale: float, shares: str, micro_batches: int
) -> None:
    engine, client, described = MagicMock(), MagicMock(), initialize.server_description
    described.half_precision.return_value, described.leave_to_server.return_value = kind, {"optimizer": "AdamW"}
    arguments = arguments_of(engine)
    ours, options = given("hybrid_async", shares=shares, total_steps=40)
    initialize._make_worker_engine(arguments, options, ours, CONFIG | section, CONTEXT, client, None)
    own = OWN | section
    described.without_schedule.assert_called_once_with(own)
    arguments.make_engine.assert_called_once_with(described.without_masters())
    described.served_optimizer.assert_called_once_with(engine, own, [])
    described.leave_to_server.assert_called_once_with(engine, described.served_optimizer(), own, 40)
    engine.serve.assert_called_once_with(described.served_optimizer(), 1)
    assert engine.kind is initialize.HybridEngine
    assert (engine.half_precision, engine.loss_scaler.value) == (kind, scale)
    named = [("weight", engine.weight)]
    initialize.HybridWorker.assert_called_once_with(client, named, True, False, engine.divided)
    ((_, spec, *_), _) = engine.set_up.call_args
    assert (spec.total_steps, spec.micro_batches) == (40, micro_batches)
    assert spec.framework == {"optimizer": "AdamW"}
    assert initialize.fix_batch_size.called == (micro_batches > 0)


def test_parameters_that_are_whole_have_no_zeros_in_the_place_of_a_gradient(initialize: Any) -> None:
    engine, client = MagicMock(divided=None), MagicMock()
    initialize._make_worker(client, engine, given("hybrid_async")[1], WorkerContext())
    initialize.HybridWorker.assert_called_once_with(client, [("weight", engine.weight)], False, True, None)


@pytest.mark.parametrize(("joins", "island_size", "begins"), [(True, 1, 0), (True, 4, 1), (False, 4, 0)])
def test_a_worker_that_was_not_announced_learns_its_number_first(
    initialize: Any, monkeypatch: pytest.MonkeyPatch, joins: bool, island_size: int, begins: int
) -> None:
    """By torch.distributed, where its other ranks have to learn it, too; one that was announced is checked before."""
    context = WorkerContext(worker=0, workers=3, island_size=island_size, joins=joins)
    monkeypatch.setattr(initialize.WorkerContext, "find", lambda size: context)
    monkeypatch.setattr(initialize, "check_not_started", MagicMock())
    monkeypatch.setattr(initialize, "connect_rank", MagicMock(return_value=("context", "client", "server")))
    monkeypatch.setattr(initialize, "_make_worker_engine", lambda *given: given)
    monkeypatch.setattr(initialize, "_describe", MagicMock())
    section, options = given("hybrid_async", shares="auto")
    config = SIZES | {"train_batch_size": 10 * context.ranks}
    arguments = arguments_of(MagicMock())
    made = initialize._initialize_asynchronous(arguments, options, section, config)
    assert made == (arguments, options, section, config, "context", "client", "server")
    assert initialize._init_distributed.call_count == begins
    described = initialize._describe.call_args_list
    assert [each.args[0].micro_batches for each in described] == [5] * (not joins)
    assert initialize.connect_rank.call_args.args[:4] == (context, initialize._HYBRID_SERVER, section, Path("runs/x"))
    assert initialize.check_not_started.called


def test_a_process_trains_one_engine_in_an_asynchronous_run(initialize: Any) -> None:
    initialize._made.append(MagicMock())
    with pytest.raises(ConfigurationError, match="initialize was called before in this process"):
        initialize._initialize_asynchronous(arguments_of(MagicMock()), *reversed(given("hybrid_async")), {})


def test_steps_whose_workers_have_equal_shares_are_accumulated_by_deepspeed(initialize: Any) -> None:
    for method, shares, expected in (("hybrid_async", {"shares": "equal"}, 0), ("local_sgd", {}, None)):
        options = given(method, **shares)[1]
        made = initialize._accumulating(options, CONFIG, CONTEXT)
        assert made is options and getattr(made, "micro_batches", None) in (expected, 1)


@pytest.mark.parametrize("method", ["adasum", "adascale"])
def test_all_ranks_of_a_synchronous_method_draw_from_one_shard(
    initialize: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    did = list[Any]()
    for name in ("set_environment_without_launcher", "_init_distributed"):
        monkeypatch.setattr(initialize, name, noting(did, name))
    monkeypatch.setattr(initialize, "SingleRankGroups", noting(did, "groups", "groups"))
    monkeypatch.setattr(initialize.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(initialize.dist, "get_rank", lambda: 2)
    monkeypatch.setattr(initialize, "GroupPosition", lambda engine: ("position", engine))
    _, options = given(method)
    for data, sizes in ((Numbers(45), [45]), (None, [])):
        engine = MagicMock()
        arguments = arguments_of(engine, data)
        found = initialize._initialize_synchronous(arguments, options, SIZES | {"train_batch_size": 30})
        assert found == (engine, "optimizer", arguments.make_loader.return_value, "schedule")
        assert engine.kind is {"adasum": initialize.AdasumEngine, "adascale": initialize.AdaScaleEngine}[method]
        engine.set_up.assert_called_once_with(options)
        config = SIZES | {"train_batch_size": 10 if method == "adasum" else 30}
        arguments.make_engine.assert_called_once_with(config, **({"mpu": "groups"} if method == "adasum" else {}))
        ((*passed, join, own), _) = arguments.make_loader.call_args
        assert (passed, join(), own) == ([engine, sizes, options, (2, 3)], ("position", engine), config)
    begun = ["set_environment_without_launcher", "_init_distributed", *["groups"] * (method == "adasum")]
    assert did == begun * 2


@pytest.mark.parametrize(("ranks", "mpu", "said"), [(1, None, "this run has one"), (3, "own", "mpu= is not supported")])
def test_adasum_is_for_several_ranks_with_the_whole_model(
    initialize: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, mpu: object, said: str
) -> None:
    monkeypatch.setattr(initialize, "set_environment_without_launcher", lambda: None)
    monkeypatch.setattr(initialize.dist, "get_world_size", lambda: ranks)
    arguments = arguments_of(MagicMock())
    arguments.others["mpu"] = mpu
    with pytest.raises(ConfigurationError, match=said):
        initialize._initialize_synchronous(arguments, given("adasum")[1], SIZES)


@pytest.mark.parametrize("method", ["adasum", "hybrid_async", "local_sgd"])
def test_a_configuration_is_checked_before_anything_is_made(
    initialize: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    did = list[Any]()
    for name in ("_initialize_synchronous", "_initialize_asynchronous"):
        monkeypatch.setattr(initialize, name, noting(did, name, "made"))
    monkeypatch.setattr(initialize, "check_guard", noting(did, "guards"))
    for name in ("check", "check_group"):
        monkeypatch.setattr(initialize.configuration, name, noting(did, name))
    arguments = arguments_of(MagicMock())
    arguments.check.side_effect = lambda *given, **named: did.append((given, named))
    ours = {"method": method, "run_dir": "runs/x"}
    assert initialize._initialize(arguments, {"train_batch_size": 4, "async_training": ours}) == "made"
    section, options = given(method)
    plain, served = {"train_batch_size": 4}, {"in_the_server": method == "hybrid_async"}
    checked = ["guards", ("check", plain, options, section, "file.json"), ((plain,), served)]
    if method == "adasum":
        grouped = ("check_group", section, method, "file.json")
        assert did == [*checked, grouped, ("_initialize_synchronous", arguments, options, plain)]
    else:
        assert did == [*checked, ("_initialize_asynchronous", arguments, options, section, plain)]


def test_a_loader_has_the_batches_of_this_rank_and_the_counts_of_the_engine() -> None:
    """Without a division by the server, an engine's micro-batches are those of its steps."""
    engine: Any = SimpleNamespace(
        workers=3, train_micro_batch_size_per_gpu=lambda: 2, gradient_accumulation_steps=lambda: 5, global_steps=7
    )
    options: Any = SimpleNamespace(seed=11, total_steps=0)
    position = Position()
    arguments = Arguments(None, None, Numbers(45), None, {}, "file.json")
    made = arguments.make_loader(engine, [45], options, (1, 4), lambda: position, {"dataloader_drop_last": True})
    assert made is not None and made.share == DataShare([45], 3, 2, 5, 1, 4)
    assert (made.endless, made._trained(), made.join(), len(made)) == (False, 35, position, 45 // (2 * 4 * 3))
    without = Arguments(None, None, None, None, {}, "file.json")
    assert without.make_loader(engine, [], options, (1, 4), lambda: position, {}) is None


def test_an_engine_that_lacks_what_a_method_needs_keeps_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("fairseq_async.deepspeed_plugin.initialize")
    checked = list[object]()
    engine: Any = type("Engine", (), {})()
    monkeypatch.setattr(module, "check_attributes", checked.append)
    kind = type("Other", (), {})
    assert module._change_class(engine, kind) is engine and type(engine) is kind and checked == [engine]
    monkeypatch.setattr(module, "check_attributes", MagicMock(side_effect=ConfigurationError("lacks")))
    with pytest.raises(ConfigurationError, match="lacks"):
        module._change_class(engine, type("Third", (), {}))
    assert type(engine) is kind
