"""What a DeepSpeed user may write wrongly: each mistake is one line that names the key; and what the keys mean."""

import importlib
import json
import math
import re
import shutil
import sys
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import deepspeed
import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR

from fairseq_async import deepspeed_plugin
from fairseq_async.deepspeed_plugin import checks, dry_run
from fairseq_async.deepspeed_plugin import config as configuration
from fairseq_async.deepspeed_plugin.engines import checkpoints
from fairseq_async.deepspeed_plugin.server_description import half_precision, without_masters
from fairseq_async.errors import ConfigurationError
from fairseq_async.options.config import HybridOptions
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.commands import ROOT

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
PAGE = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
JSONS = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]


def check(config: dict[str, Any], workers: int = 2) -> dict[str, Any]:
    """All checks of a configuration, as before a run; what a worker's DeepSpeed gets."""
    plain, section, options = configuration.split(config, "file.json")
    configuration.check(plain, options, section, "file.json")
    checks.check_values(plain, "file.json")
    checks.check_optimizer(plain, "file.json", given=False, in_the_server=isinstance(options, HybridOptions))
    checks.check_scheduler(plain, "file.json", given=False)
    return checks.worker_batch(plain, workers * section.island_size, section.island_size, "file.json")


def complete(method: str = "hybrid_async", **changes: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, "async_training": {"method": method}}
    return {key: value for key, value in (base | changes).items() if value is not None}


def message(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check(config)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("file.json")
    return str(caught.value)


@pytest.mark.parametrize("config", JSONS, ids=lambda config: str(config["async_training"]["method"]))
def test_the_examples_of_the_page_are_accepted(config: dict[str, Any]) -> None:
    assert check(config)["train_micro_batch_size_per_gpu"] == 8


def test_the_page_has_an_example_of_each_method_with_a_server() -> None:
    assert [config["async_training"]["method"] for config in JSONS] == ["hybrid_async", "local_sgd"]


def test_the_page_names_the_largest_table_of_rates() -> None:
    from fairseq_async.server.optimizers.learning_rates import LARGEST_TABLE

    assert f"at most {LARGEST_TABLE:,} numbers" in " ".join(PAGE.split())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer": None}, '"optimizer" is missing: add "optimizer": {"type": "AdamW"'),
        ({"optimizer": "AdamW"}, "\"optimizer\" is 'AdamW': add"),
        ({"optimizer": {"params": {"lr": 0.1}}}, '"optimizer" is {'),
        ({"optimizer": {"type": "Adamm"}}, '"optimizer": "type" is \'Adamm\': the server has Adam, AdamW, SGD, Ada'),
        ({"optimizer": {"type": "Lamb"}}, "the server has Adam, AdamW, SGD, Ada"),
        ({"optimizer": {"type": "sgd", "params": {"lr": 0.1}}}, "\"type\" is 'sgd'"),
        ({"optimizer": {"type": "AdamW", "params": [0.1]}}, '"params" is [0.1]: give an object'),
        ({"optimizer": {"type": "AdamW", "params": {"lrr": 0.1}}}, "\"params\": there is no 'lrr'"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": [0.9, 0.9]}}}, "there is no 'betas'"),
        ({"optimizer": {"type": "SGD", "params": {"lr": -1.0}}}, "Invalid learning rate: -1.0"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "0.1"}}}, '"optimizer": "params": '),
        ({"optimizer": {"type": "AdamW", "params": {"lr": math.inf}}}, '"optimizer": "params": "lr" is inf'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, '"optimizer": "params": "lr" is "auto"'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "0.1"}}}, "\"lr\" is '0.1': give a number"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9]}}}, '"betas" is [0.9]: give two numbers'),
        ({"scheduler": {"type": "WarmUp"}}, '"scheduler": "type" is \'WarmUp\': there are LRRangeTest, OneCycle'),
        ({"scheduler": "WarmupLR"}, "\"scheduler\" is 'WarmupLR': give an object"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, "unexpected keyword argument 'warmup'"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "missing a required argument: 'total_num_steps'"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "0.1"}}},
            '"params": "warmup_max_lr" is \'0.1\': give a number',
        ),
        ({"scheduler": {"type": "ReduceLROnPlateau"}}, "it follows a loss"),
        ({"optimizer": {"type": "Adagrad", "params": {"lrr": 0.1}}}, "\"params\": there is no 'lrr'"),
        ({"scheduler": {"params": {}}}, '"scheduler" is {'),
        ({"steps_per_print": "often"}, "\"steps_per_print\" is 'often': give a number of steps"),
        ({"steps_per_print": True}, '"steps_per_print" is True'),
        ({"steps_per_print": 0}, '"steps_per_print" is 0'),
        ({"gradient_clipping": "auto"}, '"gradient_clipping" is "auto"'),
        ({"gradient_clipping": -1}, '"gradient_clipping" is -1: give a number'),
        ({"gradient_clipping": "1"}, "\"gradient_clipping\" is '1': give a number"),
        ({"gradient_clipping": True}, '"gradient_clipping" is True: give a number'),
        ({"gradient_clipping": math.inf}, '"gradient_clipping" is inf'),
        ({"train_micro_batch_size_per_gpu": None}, 'give "train_micro_batch_size_per_gpu"'),
        ({"train_micro_batch_size_per_gpu": "auto"}, '"train_micro_batch_size_per_gpu" is "auto"'),
        ({"train_micro_batch_size_per_gpu": 0}, '"train_micro_batch_size_per_gpu" is 0: give a whole number above 0'),
        ({"gradient_accumulation_steps": 1.5}, '"gradient_accumulation_steps" is 1.5'),
        ({"gradient_accumulation_steps": True}, '"gradient_accumulation_steps" is True'),
        ({"gradient_accumulation_steps": 1, "train_batch_size": 16}, '"train_batch_size" is 16, the samples of all'),
        ({"train_batch_size": 6}, '"train_batch_size" is 6, the samples of all ranks in a step, and not 4'),
        (
            {"fp16": {"enabled": True, "auto_cast": True}},
            '"fp16": "auto_cast" is not supported with method hybrid_async',
        ),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            '"bf16": "bf16_master_weights_and_grads" is not supported with method hybrid_async',
        ),
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            '"fp16": "fp16_master_weights_and_grads" is not supported with method hybrid_async',
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
            "\"grad_accum_dtype\" 'fp16' is not supported with method hybrid_async of a model in bfloat16: leave it "
            'out, or give "zero_optimization": {"stage": 3}',
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02}}},
            '"cycle_momentum", which is true by default, is not supported with method hybrid_async',
        ),
        ({"bf16": {"enabled": "true"}}, '"bf16": "enabled" is \'true\': give true or false'),
        ({"fp16": True}, '"fp16" is True: it must be an object'),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, '"torch_autocast" in float16'),
        ({"zero_optimization": {"stage": 4}}, '"stage" 4 is not supported with method hybrid_async; 0, 1, 2 and 3 are'),
        (
            {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}},
            '"fp16" with "zero_optimization": "stage": 3 is not supported with method hybrid_async',
        ),
        ({"zero_optimization": {"stage": "0"}}, "\"stage\" '0' is not supported"),
        ({"async_training": {"method": ["hybrid_async"]}}, "\"method\": ['hybrid_async'] is none of adascale"),
        ({"async_training": {"method": "hybrid"}}, "\"method\": 'hybrid' is none of adascale"),
        (
            {"async_training": {"method": "hybrid_async", "micro_batches": 2}},
            '"micro_batches" is what DeepSpeed has as "gradient_accumulation_steps"',
        ),
        ({"zero_optimization": {"stage": 0, "zenflow": {"topk_ratio": 0.1}}}, '"zenflow" is not supported'),
        ({"tensor_parallel": {"autotp_size": 2}}, '"tensor_parallel" is not supported'),
        ({"gradient_allreduce_op": "SUM"}, '"gradient_allreduce_op": "sum" is not supported with "async_training"'),
        ({"zero_optimization": 3}, '"zero_optimization" is 3: it must be an object'),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "bias_correction": True}}},
            "there is no 'bias_correction'",
        ),
        ({"optimizer": {"type": "Muon", "params": {"muon_lr": -1.0}}}, '"muon_lr" is -1.0'),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, '"offload_param" to cpu is not supported with'),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, '"super_offload" is not supported'),
        ({"torch_autocast": {"enabled": 1}}, '"torch_autocast": "enabled" is 1: give true or false'),
        (
            {"zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            '"torch_autocast" with "zero_optimization": "stage": 3 is not supported',
        ),
        ({"bfloat16": {"bf16_master_weights_and_grads": True}}, '"bfloat16": "bf16_master_weights_and_grads" is not'),
        ({"pipeline": {}}, '"pipeline" is not supported'),
        ({"compression_training": {"enabled": True}}, '"compression_training" is not supported'),
        ({"hybrid_engine": {"enabled": True}}, '"hybrid_engine" is not supported'),
    ],
)
def test_a_mistake_is_one_line_that_names_its_key(changes: dict[str, Any], expected: str) -> None:
    assert expected in message(complete(**changes))


def test_an_argument_that_is_not_there_is_named_in_each_version_of_python() -> None:
    def optimizer(*_: object, **given: object) -> Any:
        raise TypeError("AdamW.__init__() got an unexpected keyword argument 'lrr'. Did you mean 'lr'?")

    assert dry_run.fault_of_optimizer(optimizer, {"lrr": 0.1}) == "there is no 'lrr'"


def test_deepspeed_may_say_something_again_after_a_schedule_was_tried() -> None:
    assert dry_run.fault_of_schedule(WarmupLR, {"warmup_num_steps": 5}) == ""
    assert dry_run.fault_of_schedule(WarmupLR, {"warmup_num_steps": "5"})
    assert dry_run._nothing not in dry_run.logger.filters


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"outer_lr": math.inf}, '"async_training": "outer_lr": Input should be a finite number (it is inf)'),
        ({"outer_lr": math.nan}, '"outer_lr"'),
        ({"outer_lr": "auto"}, '"outer_lr": Input should be a valid number, unable to parse string as a number'),
        ({"staleness_power": -math.inf}, '"staleness_power": Input should be a finite number'),
        ({"worker_timeout": math.inf}, '"worker_timeout": Input should be a finite number'),
        ({"local_steps": "auto"}, '"local_steps": Input should be a valid integer'),
        ({"overlap": True, "island_size": 2}, "overlap is not supported in a worker of several ranks"),
    ],
)
def test_a_mistake_in_the_section_is_one_line(options: dict[str, Any], expected: str) -> None:
    assert expected in message(complete(async_training={"method": "local_sgd", **options}))


def test_what_is_wrong_for_the_server_may_be_right_for_a_worker() -> None:
    for optimizer in ("Lamb", "RMSprop", "Muon"):
        check(complete("local_sgd", optimizer={"type": optimizer, "params": {"lr": 0.1}}))
    with pytest.raises(ConfigurationError, match="'Addam': neither DeepSpeed nor torch has it"):
        check(complete("local_sgd", optimizer={"type": "Addam"}))
    with pytest.raises(ConfigurationError, match="'LBFGS': its steps need more than dense gradients"):
        check(complete("local_sgd", optimizer={"type": "LBFGS"}))


MUON = {"lr": 0.02, "momentum": 0.95, "muon_lr": 0.02, "adam_lr": 1e-3, "ns_method": "standard", "torch_adam": True}


def test_deepspeeds_own_muon_is_checked_although_deepspeed_passes_over_what_it_does_not_know() -> None:
    for method in ("local_sgd", "hybrid_async"):
        check(complete(method, optimizer={"type": "muon", "params": MUON}))
        for params, said in (
            ({"nesterov": False}, "there is no 'nesterov'"),
            ({"adam_lr": -1.0}, '"adam_lr" is -1.0: Invalid learning rate'),
            ({"ns_method": "svd"}, '"ns_method" is \'svd\': give "gram" or "standard"'),
        ):
            with pytest.raises(ConfigurationError, match=f'"optimizer": "params": {said}'):
                check(complete(method, optimizer={"type": "Muon", "params": MUON | params}))


def test_the_way_out_of_other_sums_in_fp16_is_none_that_fp16_does_not_have() -> None:
    said = message(complete(fp16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"}))
    assert said.endswith("not supported with method hybrid_async of a model in float16: leave it out")


def test_what_has_an_effect_in_deepspeed_alone_or_none_at_all_is_accepted() -> None:
    own = {"torch_adam": True, "adam_w_mode": False, "fp32_optimizer_states": True, "bias_correction": True}
    check(complete(optimizer={"type": "AdamW", "params": {"lr": 0.1} | own}))
    check(complete(zero_optimization={"offload_optimizer": {"device": "cpu"}}, tensor_parallel={"autotp_size": 1}))
    check(complete(hybrid_engine={"enabled": False}, pipeline=None, bf16={"enabled": True}))
    check(complete(data_types={"grad_accum_dtype": "bf16"}, zero_optimization={"stage": 3}, bf16={"enabled": True}))


@pytest.mark.parametrize("worker", [0, 2])
def test_every_other_worker_logs_under_a_name_of_its_own_or_not_at_all(worker: int) -> None:
    names = ("tensorboard", "csv_monitor", "wandb", "comet")
    config: dict[str, Any] = {name: {"enabled": True, "job_name": "job"} for name in names} | {"a": 1}
    before = json.dumps(config)
    own = configuration.own_monitor(config, worker)
    named = {"enabled": True, "job_name": "job-worker2" if worker else "job"}
    without = {"enabled": not worker, "job_name": "job"}
    assert own == {"tensorboard": named, "csv_monitor": named, "wandb": without, "comet": without, "a": 1}
    assert json.dumps(config) == before, "the configuration is the script's"


def test_the_synchronous_methods_have_no_key_of_a_server_but_the_directory() -> None:
    for keys, said in (({"run_dir": "x"}, ""), ({"run_dir": "x", "record": True}, '"record" is of no use')):
        section = configuration.split({"async_training": {"method": "adasum"} | keys}, "file.json")[1]
        with pytest.raises(ConfigurationError, match=said) if said else nullcontext():
            configuration.check_group(section, "adasum", "file.json")


def test_a_script_keeps_its_other_arguments_and_its_own_configuration() -> None:
    args, config = SimpleNamespace(deepspeed_config="ds.json", local_rank=3), {"train_batch_size": 4}
    assert vars(configuration.without_file(args)) == {"deepspeed_config": None, "local_rank": 3}
    found, name = configuration.read(args, config)
    assert (found, name) == (config, "ds.json") and found is not config


def test_schedules_of_torch_and_rates_of_each_group_are_accepted() -> None:
    check(complete(scheduler={"type": "CosineAnnealingLR", "params": {"T_max": 10}}))
    two_groups = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 3}}
    check(complete(scheduler=two_groups, steps_per_print=2.5, gradient_clipping=0))
    off = {"enabled": False, "dtype": "float16"}
    check(complete("local_sgd", torch_autocast=off, zero_optimization={"stage": 1}))


def test_zero_3_in_hybrid_has_an_optimizer_that_can_be_made_of_whole_parameters() -> None:
    zero = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {}}}
    none: dict[str, object] = dict.fromkeys(("optimizer", "lr_scheduler"))
    checks.check_divided(zero | {"scheduler": {"type": "WarmupLR"}}, "ds.json", none)
    for stage in ({}, {"zero_optimization": {"stage": 2}}):
        checks.check_divided(zero | {"zero_optimization": None} | stage, "ds.json", none | {"optimizer": object()})
    for config, arguments, named in (
        (zero, none | {"optimizer": object()}, "optimizer="),
        (zero | {"scheduler": {"type": "StepLR"}}, none, "\"scheduler\" 'StepLR'"),
        (zero | {"optimizer": {"type": "Muon"}}, none, '"optimizer" Muon'),
    ):
        with pytest.raises(ConfigurationError, match=f"does not go with {named}: give an"):
            checks.check_divided(config, "ds.json", arguments)


@pytest.mark.parametrize("method", ["adasum", "adascale"])
def test_the_synchronous_methods_have_neither_zero_3_nor_offloading(method: str) -> None:
    assert '"stage" 3 is not supported with method' in message(complete(method, zero_optimization={"stage": 3}))
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert '"offload_optimizer" to cpu is not supported' in message(complete(method, zero_optimization=offload))


@pytest.mark.parametrize("method", ["local_sgd", "adasum", "adascale"])
def test_autocast_in_float16_is_for_training_without_zero(method: str) -> None:
    for dtype, stage in (("float16", 0), ("bfloat16", 1)):
        check(complete(method, torch_autocast={"enabled": True, "dtype": dtype}, zero_optimization={"stage": stage}))
    zero = {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "zero_optimization": {"stage": 1}}
    assert '"torch_autocast" in float16 is not supported with "zero_optimization"' in message(complete(method, **zero))


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
def test_local_sgd_has_masters_on_the_cpu_but_not_on_disks(key: str) -> None:
    check(complete("local_sgd", zero_optimization={"stage": 3, key: {"device": "cpu"}}))
    config = complete("local_sgd", zero_optimization={"stage": 3, key: {"device": "nvme"}})
    assert f'"{key}" to nvme is not supported' in message(config)


@pytest.mark.parametrize(
    ("given", "ranks", "island", "share"),
    [
        ((8, 4, None), 2, 1, 4),  # which DeepSpeed alone would make an accumulation of 2 on each worker
        ((64, 8, None), 4, 2, 32),  # two islands of two ranks: DeepSpeed finds an accumulation of 2 in each
        ((64, None, 4), 2, 1, 32),
        ((64, None, None), 8, 2, 16),
        ((32, 4, 2), 4, 2, 16),
        ((24, 4, 2), 3, 2, 16),  # beside one of a rank, which has 8,
        ((None, 4, 2), 3, 1, None),
    ],
)
def test_train_batch_size_is_of_all_workers_together(
    given: tuple[int | None, ...], ranks: int, island: int, share: int | None
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    found = checks.worker_batch(config, ranks, island, "file.json")
    assert found.get("train_batch_size") == share
    assert {key: found.get(key) for key in keys[1:]} == {key: config.get(key) for key in keys[1:]}
    whole, micro_batch, accumulation = share or 0, given[1], given[2]
    expected = accumulation or (whole // (micro_batch * island) if micro_batch else 1)
    assert checks.micro_batches(found, island) == expected


def test_an_error_of_deepspeeds_is_one_line_and_one_of_the_scripts_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("fairseq_async.deepspeed_plugin.arguments")
    arguments = module.Arguments(None, None, None, None, {}, "file.json")
    with pytest.raises(ConfigurationError, match="^file.json: DeepSpeed refuses this: .*requires a model"):
        arguments.make_engine({})

    def make_optimizer(parameters: object) -> object:
        raise KeyError("a mistake of the script's")

    monkeypatch.setattr(module, "_initialize_deepspeed", lambda **given: make_optimizer(given["model"]))
    with pytest.raises(KeyError, match="a mistake of the script's"):
        arguments.make_engine({})


def test_initialize_takes_what_deepspeeds_does_in_the_same_order_with_the_same_defaults() -> None:
    ours, theirs = (signature(each.initialize).parameters.values() for each in (deepspeed_plugin, deepspeed))
    assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in theirs]


def test_a_model_for_pipelines_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match="the model is a PipelineModule, and pipelines are not supported"):
        checks.check_model(deepspeed.PipelineModule.__new__(deepspeed.PipelineModule))


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        ({}, {}, ""),
        ({"optimizer": None}, {"optimizer": 1}, ""),
        ({"optimizer": None}, {"lr_scheduler": 1}, '"optimizer" is missing'),
        ({"scheduler": "mine"}, {"lr_scheduler": 1}, ""),
        ({"scheduler": "mine"}, {"optimizer": 1}, "\"scheduler\" is 'mine'"),
        ({"zero_optimization": {"stage": 3}}, {"optimizer": 1}, "does not go with optimizer="),
        ({"zero_optimization": {"stage": 3}}, {"optimizer": 1, "in_the_server": False}, ""),
        ({"managed_gradient_accumulation": False}, {}, ""),
        ({"managed_gradient_accumulation": False}, {"data": [1]}, '"managed_gradient_accumulation" is False'),
        ({"gradient_clipping": -1}, {"optimizer": 1, "lr_scheduler": 1}, '"gradient_clipping" is -1'),
    ],
)
def test_an_argument_of_the_script_stands_for_its_own_section_alone(
    config: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    module = importlib.import_module("fairseq_async.deepspeed_plugin.arguments")
    others = {key: given.get(key) for key in ("optimizer", "lr_scheduler")}
    arguments = module.Arguments(None, torch.nn.Linear(1, 1), given.get("data"), None, others, "file.json")
    whole = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW} | config
    with pytest.raises(ConfigurationError, match=re.escape(said)) if said else nullcontext():
        arguments.check(whole, given.get("in_the_server", True))


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", "bf16"])
def test_hybrid_async_takes_autocast_in_bfloat16_by_each_of_deepspeeds_names(dtype: str) -> None:
    check(complete("hybrid_async", torch_autocast={"enabled": True, "dtype": dtype}))


def test_each_rank_of_each_island_draws_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Islands of two ranks; each rank's own DeepSpeed knows of its island alone."""
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # transformers would import it; it may not fit this torch
    huggingface = pytest.importorskip("fairseq_async.deepspeed_plugin.huggingface", exc_type=ImportError)
    parts = []
    for worker in range(3):
        for rank in range(2):
            context = WorkerContext(worker, 3, rank=rank, island_size=2)
            monkeypatch.setattr(huggingface, "entered_world", lambda context=context: context)
            parts.append(huggingface._place(None))
    assert parts == [(6, part) for part in range(6)]


@pytest.mark.parametrize(
    ("stage", "with_optimizer", "parts", "remedy"),
    [
        (1, True, 2, "or give load_optimizer_states=False"),
        (1, False, 2, ""),
        (1, True, 3, ""),
        (3, False, 2, "or give a universal checkpoint"),
        (3, True, 3, ""),
        (3, False, 0, ""),  # DeepSpeed says that it has none
        (0, True, 2, ""),
    ],
)
def test_a_checkpoint_of_zero_is_for_as_many_ranks_as_have_saved_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: int,
    with_optimizer: bool,
    parts: int,
    remedy: str,
) -> None:
    (tmp_path / "latest").write_text("step\n")
    (tmp_path / "step").mkdir()
    for rank in range(parts):
        (tmp_path / f"step/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    monkeypatch.setattr(checkpoints.dist, "get_world_size", lambda: 3)
    answers = {"load_universal_checkpoint": False, "zero_elastic_checkpoint": False, "zero_optimization_stage": stage}
    engine: Any = SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in answers.items()})
    if not remedy:
        return checkpoints.check_files(engine, str(tmp_path), None, with_optimizer)
    with pytest.raises(SystemExit):
        checkpoints.check_files(engine, str(tmp_path), None, with_optimizer)
    said = capsys.readouterr().err
    assert "step has ZeRO's parts of 2 ranks, and this worker has 3: give it as many" in said and remedy in said


def test_a_checkpoint_is_that_of_its_tag_or_of_the_one_that_latest_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints.check_tag(str(tmp_path), None)  # of which DeepSpeed says that there is none
    for name in ("step", "7"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest").write_text("step\n")
    for tag in (None, "step", cast(str, 7)):
        checkpoints.check_tag(str(tmp_path), tag)
    (tmp_path / "latest").write_text("gone\n")
    checkpoints.check_tag(str(tmp_path), "step")
    for tag, said in (
        (None, "gone, which its file latest names; its directories are: 7, step"),
        ("9", "no checkpoint 9"),
    ):
        with pytest.raises(SystemExit):
            checkpoints.check_tag(str(tmp_path), tag)
        assert said in capsys.readouterr().err


def test_a_worker_without_a_checkpoint_takes_that_of_worker_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, own = str(tmp_path), tmp_path / "worker-2"
    assert checkpoints.own_checkpoint(directory, None, 0) == directory and not caplog.messages
    for made, tag, found in (("latest", None, own), ("step", "step", own), ("latest", "other", tmp_path)):
        shutil.rmtree(own, ignore_errors=True)
        assert checkpoints.own_checkpoint(directory, tag, 2) == directory
        (own / made).mkdir(parents=True)
        assert checkpoints.own_checkpoint(directory, tag, 2) == str(found)
    assert caplog.messages == [f"worker 2: no checkpoint in {own}, it takes worker 0's"] * 4


def test_the_servers_state_is_beside_worker_0s_checkpoint_or_on_its_disk(tmp_path: Path) -> None:
    """Where the directory of the tag is there without it, the run had no server: plain DeepSpeed has saved it."""
    loaded, state = str(tmp_path / "worker-1" / "step" / "mp_rank_00.pt"), tmp_path / "step" / "async_server.pt"
    assert checkpoints.server_state_beside(loaded, str(tmp_path), None) is None
    assert checkpoints.server_state_beside(loaded, str(tmp_path), {"begins_at": 0}) == state
    state.parent.mkdir()
    assert checkpoints.server_state_beside(loaded, str(tmp_path), {"begins_at": 0}) is None
    state.touch()
    assert checkpoints.server_state_beside(loaded, str(tmp_path), None) == state


@pytest.mark.parametrize(
    ("half", "kind"),
    [
        ({}, None),
        ({"fp16": {"enabled": False}, "bf16": {"immediate_grad_update": True}, "bfloat16": None}, None),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, torch.bfloat16),
        ({"bfloat16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, torch.bfloat16),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, torch.float16),
    ],
)
def test_deepspeed_is_told_nothing_of_masters_and_sums_that_the_server_or_this_package_has(
    half: dict[str, Any], kind: torch.dtype | None
) -> None:
    """In ZeRO 3 it has masters itself, which do not step here."""
    assert half_precision(half) is kind
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 2}} | half
    assert without_masters(config) == {"train_batch_size": 4, "zero_optimization": {"stage": 0}}
    assert without_masters({"train_batch_size": 4} | half) == {"train_batch_size": 4}
    divided = config | {"zero_optimization": {"stage": 3}}
    assert without_masters(divided) == divided | {"zero_allow_untested_optimizer": True}


def test_a_mistake_that_shows_with_the_engine_leaves_neither_worker_nor_server(monkeypatch: pytest.MonkeyPatch) -> None:
    initialize: Any = importlib.import_module("fairseq_async.deepspeed_plugin.initialize")
    context, client, server = SimpleNamespace(joins=True, island_size=1), MagicMock(), MagicMock()
    monkeypatch.setattr(initialize, "_made", [])
    monkeypatch.setattr(initialize, "entered_world", lambda: context)
    monkeypatch.setattr(initialize, "connect_rank", lambda *given: (context, client, server))
    monkeypatch.setattr(initialize, "_make_worker_engine", MagicMock(side_effect=InterruptedError))
    _, section, options = configuration.split({"async_training": {"method": "hybrid_async"}}, "file.json")
    with pytest.raises(InterruptedError):
        initialize._initialize_asynchronous(MagicMock(), options, section, {})
    client.leave.assert_called_once_with(finished=False)
    server.discard.assert_called_once_with()
