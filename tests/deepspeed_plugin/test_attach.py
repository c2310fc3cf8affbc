"""What ``attach`` puts in the place of functions of DeepSpeed, transformers and accelerate, each by itself."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch import nn
from torch.optim import SGD

from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.worker.start.context import WorkerContext

SECTION = {"method": "hybrid_async", "total_steps": "auto"}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, in a process that has not begun anything."""
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # transformers would import it; it may not fit this torch
    found: Any = import_module("fairseq_async.deepspeed_plugin.huggingface")
    monkeypatch.setattr(found, "_engines", [])
    monkeypatch.setattr(found, "_automatic", {})
    monkeypatch.setattr(found, "_divisions", [SimpleNamespace(by_script="by the script")])
    for name in ("RANK", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return found


def enter(module: Any, monkeypatch: pytest.MonkeyPatch, context: WorkerContext | None) -> None:
    monkeypatch.setattr(module, "entered_world", lambda: context)


def test_a_configuration_is_read_however_a_trainer_is_given_it(module: Any, tmp_path: Path) -> None:
    given, file = {"train_batch_size": 4}, tmp_path / "ds.json"
    file.write_text(json.dumps(given))
    for each in (given, str(file), file, " " + json.dumps(given)):
        assert module._read(each) == given
    for nothing in (None, "{", str(tmp_path / "none.json"), "{1}", 3):
        assert module._read(nothing) == {}


@pytest.mark.parametrize(("uses", "name"), [("true", "ds.json"), ("TRUE", "ds.json"), ("false", None), (None, None)])
def test_a_file_of_accelerate_launch_counts_where_that_uses_deepspeed(
    module: Any, monkeypatch: pytest.MonkeyPatch, uses: str | None, name: str | None
) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json")
    if uses is not None:
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", uses)
    assert module._launched_with() == name


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize(("method", "asynchronous"), [("hybrid_async", True), ("local_sgd", True), ("adasum", False)])
def test_each_worker_enters_a_world_of_its_own_before_deepspeed_makes_one(
    module: Any, monkeypatch: pytest.MonkeyPatch, method: str, asynchronous: bool, entered: bool
) -> None:
    did = list[Any]()
    enter(module, monkeypatch, WorkerContext() if entered else None)
    monkeypatch.setattr(module, "check_not_started", lambda: did.append("checks"))
    monkeypatch.setattr(module, "enter_world", did.append)
    section = {"method": method, "total_steps": "auto"} | ({"island_size": 3} if asynchronous else {})
    config = {"async_training": section}
    module._enter_world(config)
    assert did == [*["checks"] * (not entered), 3] * asynchronous
    assert config["async_training"]["total_steps"] == "auto"
    module._enter_world({"train_batch_size": 4})
    assert len(did) == (2 - entered) * asynchronous


def test_a_plugin_hides_from_accelerate_what_is_automatic_in_the_section(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    did = list[Any]()
    monkeypatch.setattr(module, "_enter_world", lambda config: did.append(dict(config["async_training"])))
    section = SECTION | {"shares": "auto", "barrier": True}
    plugin = SimpleNamespace(hf_ds_config="ds.json", deepspeed_config={"async_training": dict(section)})
    module._make_plugin(lambda plugin: did.append("makes"), plugin)
    assert did == ["makes", section]
    assert plugin.deepspeed_config["async_training"] == SECTION | {"barrier": True}
    assert module._automatic == {"shares": "auto"}
    plugin.hf_ds_config = None
    with pytest.raises(SystemExit):
        module._make_plugin(lambda plugin: None, plugin)
    assert "accelerate has no DeepSpeed configuration file" in capsys.readouterr().err
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json")
    module._make_plugin(lambda plugin: did.append("makes"), plugin)
    assert did[-2:] == ["makes", SECTION | {"barrier": True}]


@pytest.mark.parametrize("world", [False, True])
@pytest.mark.parametrize(("keys", "kept"), [((), True), (("scheduler",), False), (("optimizer",), False)])
def test_a_schedule_that_the_trainer_would_keep_for_itself_is_one_line(
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keys: tuple[str, ...],
    kept: bool,
    world: bool,
) -> None:
    did = list[Any]()
    enter(module, monkeypatch, WorkerContext() if world else None)
    config = SimpleNamespace(config={"async_training": dict(SECTION), **dict.fromkeys(keys, {})})
    args = (lambda *given: did.append(given), config, SimpleNamespace(deepspeed="own.json"), "model", 40)
    if world and kept:
        with pytest.raises(SystemExit):
            module._complete_configuration(*args)
        assert "own.json: the Trainer keeps its learning-rate schedule" in capsys.readouterr().err
        return
    module._complete_configuration(*args)
    assert did == [args[1:]]
    assert config.config["async_training"]["total_steps"] == (40 if world else "auto")


@pytest.mark.parametrize("rank", [None, "0", "2"])
def test_a_training_without_the_section_is_deepspeeds_own_and_is_named_once(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str | None
) -> None:
    monkeypatch.setattr(module, "_deepspeed_initialize", lambda *given, **named: (given, named))
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert module._initialize("args", "model", config={"a": 1}) == (("args", "model"), {"config": {"a": 1}})
    assert ("this training is synchronous" in capsys.readouterr().err) == (rank != "2")


BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}


@pytest.mark.parametrize("where", ["config", "config_params", "args"])
@pytest.mark.parametrize("whole", [False, True])
def test_an_engine_of_the_run_is_made_of_the_configuration_and_what_was_hidden(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str, whole: bool
) -> None:
    """accelerate fills in the third size, of a world that is one worker."""
    made = list[Any]()
    engine = AsyncEngine.__new__(AsyncEngine)
    nn.Module.__init__(engine)
    engine.async_worker = SimpleNamespace(details=SimpleNamespace())  # type: ignore[assignment]

    def initialize(**given: Any) -> tuple[Any, ...]:
        made.append(given)
        return engine, "optimizer", "loader", "schedule"

    monkeypatch.setattr(module, "initialize", initialize)
    module._automatic["shares"] = "auto"
    sizes = {"train_batch_size": 10} | (BATCH if whole else {"gradient_accumulation_steps": 5})
    config = {"async_training": dict(SECTION)} | sizes
    args = SimpleNamespace(deepspeed_config=config if where == "args" else None)
    given: dict[str, Any] = {"model": "model"} | ({} if where == "args" else {where: config})
    assert module._initialize(args, **given) == (engine, "optimizer", "loader", "schedule")
    expected = (BATCH if whole else sizes) | {"async_training": SECTION | {"shares": "auto"}}
    assert made == [{"args": args, "model": "model", "config": expected, "config_params": None}]
    assert module._engines == [engine] and engine.async_worker.details.by_script == "by the script"
    with pytest.raises(SystemExit):
        module._initialize(args, **given)
    assert "one process trains in one asynchronous run" in capsys.readouterr().err


def test_an_engine_of_a_synchronous_method_is_none_of_a_run(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "initialize", lambda **given: ("engine", "optimizer", "loader", "schedule"))
    config = {"async_training": {"method": "adasum"}}
    for _ in range(2):
        assert module._initialize(None, config=config)[0] == "engine"
    assert module._engines == []


@pytest.mark.parametrize(
    ("section", "follows", "shares"),
    [
        (SECTION, True, "auto"),
        (SECTION | {"shares": "equal"}, True, None),
        (SECTION | {"barrier": True}, True, None),
        (SECTION, False, None),
        ({"method": "local_sgd", "total_steps": 60}, True, None),
    ],
)
def test_a_plan_is_of_the_runs_steps_and_shares_are_by_speed_where_a_trainer_can_follow_them(
    module: Any, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], follows: bool, shares: str | None
) -> None:
    checked, planned = list[Any](), MagicMock()
    enter(module, monkeypatch, WorkerContext(worker=1, workers=3, island_size=2))
    monkeypatch.setattr(module, "follows_shares", lambda trainer: follows)
    monkeypatch.setattr(module, "check_counting", checked.append)
    monkeypatch.setattr(module, "FollowEngine", planned)
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config={"async_training": section}))
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    trainer = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(gradient_accumulation_steps=5))
    plan = module._plan_training(lambda *given: given, trainer, "args", "loader", 4)
    assert plan is planned().plan.return_value
    steps = 60 if section.get("total_steps") == 60 else 0
    planned().plan.assert_called_once_with((trainer, "args", "loader", 4), "loader", steps, 3, False)
    assert module._automatic.get("shares") == shares and checked == [trainer] * (shares is not None)
    enter(module, monkeypatch, None)
    assert module._plan_training(lambda *given: given, trainer, "args") == (trainer, "args")


@pytest.mark.parametrize("worker", [0, 2])
def test_worker_0_ends_the_run_for_all_and_before_the_best_model_is_loaded(module: Any, worker: int) -> None:
    did = list[Any]()
    engine = SimpleNamespace(worker=worker, end=lambda for_all: did.append(for_all))
    module._engines.append(engine)
    module._load_best_model(did.append, "trainer")
    assert did == [worker == 0, "trainer"]


def test_a_trainer_is_of_its_rank_among_those_of_all_workers(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(module, monkeypatch, None)
    assert module._process_index(1) == 1
    enter(module, monkeypatch, WorkerContext(worker=2, workers=3, rank=1, island_size=4))
    assert module._process_index(0) == 9


def test_the_rates_that_are_asked_for_are_those_of_the_last_step(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD([{"params": [nn.Parameter(nn.Linear(1, 1).weight)]}], lr=0.5)
    module._engines.append(SimpleNamespace(optimizer=optimizer))
    shown = module.UsedRates(SimpleNamespace(scheduler="schedule", optimizers=[optimizer]))
    optimizer.param_groups[0]["lr"] = 0.25
    assert shown.get_last_lr() == [0.5] and shown.scheduler == "schedule"
    shown.step()
    assert shown.get_last_lr() == [0.25]


@pytest.mark.parametrize("engines", [0, 1])
def test_schedules_of_a_run_show_used_rates_and_others_are_as_accelerate_makes_them(
    module: Any, monkeypatch: pytest.MonkeyPatch, engines: int
) -> None:
    optimizer = SGD([nn.Parameter(nn.Linear(1, 1).weight)], lr=0.5)
    module._engines += [SimpleNamespace(optimizer=optimizer)] * engines
    schedule = module.DeepSpeedSchedulerWrapper("schedule", [optimizer])
    accelerator = SimpleNamespace(distributed_type=module.DistributedType.DEEPSPEED)
    model, prepared = module._prepare(lambda *given, **named: ("model", schedule), accelerator, "model", optimizer)
    assert model == "model" and type(prepared) is (module.UsedRates if engines else module.DeepSpeedSchedulerWrapper)
    assert module._prepare(lambda *given: given[-1], accelerator, "model") == "model"


def test_an_optimizer_without_deepspeed_is_one_line(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = SimpleNamespace(distributed_type=module.DistributedType.NO)
    assert module._prepare(lambda *given: given[1:], accelerator, "model") == ("model",)
    with pytest.raises(SystemExit):
        module._prepare(lambda *given: given, accelerator, "model", SGD([nn.Parameter(nn.Linear(1, 1).weight)]))
    assert "this training is without DeepSpeed" in capsys.readouterr().err


def test_a_trainer_joins_at_its_beginning_and_ends_its_part_at_its_end(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    did = list[Any]()
    module._engines.append(SimpleNamespace(join_run=lambda: did.append("joins")))
    monkeypatch.setattr(module, "_end", lambda: did.append("ends"))
    monkeypatch.setattr(module.FollowRun, "begin", lambda flow, steps: did.append(("begins", steps)))
    for name in ("on_train_begin", "on_train_end"):
        monkeypatch.setattr(module.FollowRun, name, lambda flow, *given, name=name, **named: did.append(name))
    flow = object.__new__(module.FollowEngine)
    flow.on_train_begin("args", "state", "control", lr_scheduler=SimpleNamespace(step=lambda: did.append("rates")))
    flow.on_train_end("args", "state", "control")
    assert did == ["joins", ("begins", 0), "on_train_begin", "rates", "on_train_end", "ends"]


def test_a_mistake_in_the_section_is_one_line_that_names_the_file_and_its_key(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any world is entered; a number of steps is checked where the script gives one."""
    monkeypatch.setattr(module, "enter_world", lambda ranks: pytest.fail("a world was entered"))
    (tmp_path / "ds.json").write_text(json.dumps({"async_training": {"total_steps": -1}}))
    for given, name in ((str(tmp_path / "ds.json"), str(tmp_path / "ds.json")), ({"async_training": 3}, "config")):
        with pytest.raises(SystemExit):
            module._enter_world(given)
        said = capsys.readouterr().err
        assert said.startswith(f"fairseq-async: error: {name}") and ('"total_steps"' in said or "no section" in said)


@pytest.mark.parametrize("own", [None, "own.json"])
def test_a_trainers_world_is_entered_before_it_makes_its_arguments(
    module: Any, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    did = list[Any]()
    monkeypatch.setattr(module, "_enter_world", did.append)
    monkeypatch.setattr(module, "_launched_with", lambda: "launched.json")
    arguments = SimpleNamespace(deepspeed=own)
    module._make_arguments(did.append, arguments)
    assert did == [own or "launched.json", arguments]


def test_deepspeeds_own_engine_of_our_section_is_one_line(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    did, made = list[Any](), SimpleNamespace(_param_dict={"train_batch_size": 4})
    module._check_configuration(lambda *given, **named: did.append((given, named)), made, "ds.json", mpu="own")
    assert did == [((made, "ds.json"), {"mpu": "own"})]
    made._param_dict["async_training"] = {}
    with pytest.raises(SystemExit):
        module._check_configuration(lambda *given: None, made)
    assert "deepspeed.initialize was imported before attach was called" in capsys.readouterr().err


def test_attach_replaces_each_function_once(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, divided, own = (
        list[Any](),
        list[Any](),
        type("TrainingArguments", (), {"process_index": property(lambda _: 1)}),
    )
    monkeypatch.setattr(module, "TrainingArguments", own)
    monkeypatch.setattr(module, "wrap", lambda owner, name, around: wrapped.append((owner.__name__, name, around)))
    monkeypatch.setattr(module, "Division", lambda place: divided.append(place))
    monkeypatch.setattr(module.deepspeed, "initialize", module._deepspeed_initialize)
    enter(module, monkeypatch, WorkerContext(worker=2, workers=3, rank=1, island_size=4))
    for _ in range(2):
        module.attach()
        assert module.deepspeed.initialize is module._initialize
    assert wrapped == [
        ("TrainingArguments", "__post_init__", module._make_arguments),
        ("DeepSpeedPlugin", "__post_init__", module._make_plugin),
        ("DeepSpeedConfig", "__init__", module._check_configuration),
        ("Accelerator", "prepare", module._prepare),
        ("HfTrainerDeepSpeedConfig", "trainer_config_finalize", module._complete_configuration),
        ("Trainer", "set_initial_training_values", module._plan_training),
        ("Trainer", "_load_best_model", module._load_best_model),
    ]
    assert divided == [module._place] and own().process_index == 9
    enter(module, monkeypatch, None)
    assert own().process_index == 1
