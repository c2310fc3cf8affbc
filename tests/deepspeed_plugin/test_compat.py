"""A DeepSpeed that lacks what the plugin builds on is named, with what it lacks."""

import ast
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import deepspeed
import pytest
import torch
from torch import nn

from fairseq_async.deepspeed_plugin import compat
from fairseq_async.errors import ConfigurationError
from tests.helpers.syntax import syntax_tree


class BF16_Optimizer:  # noqa: N801 - DeepSpeed's name
    """As in a DeepSpeed that keeps its gradients elsewhere."""

    bf16_groups: list[object] = []


@pytest.mark.parametrize("name", ["bit16_groups", "bf16_groups", "fp16_groups"])
def test_low_precision_parameters_are_found_wherever_an_optimizer_has_them(name: str) -> None:
    groups = [[torch.ones(1)], [torch.zeros(2), torch.ones(2)]]
    assert compat.low_precision_groups(SimpleNamespace(**{name: groups})) == groups
    assert compat.low_precision_groups(SimpleNamespace(param_groups=groups)) == []


def test_a_missing_attribute_is_named_with_deepspeeds_version() -> None:
    engine = SimpleNamespace(**dict.fromkeys(compat.ENGINE))
    compat.check_attributes(engine)
    engine.optimizer = BF16_Optimizer()
    with pytest.raises(ConfigurationError, match="has no BF16_Optimizer.fp32_groups_gradients") as caught:
        compat.check_attributes(engine)
    assert deepspeed.__version__ in str(caught.value) and f"deepspeed=={compat.MADE_FOR}" in str(caught.value)
    del engine._step_applied
    with pytest.raises(ConfigurationError, match="has no DeepSpeedEngine._step_applied"):
        compat.check_attributes(engine)


def test_a_model_that_is_divided_among_ranks_by_other_means_than_zero_is_refused() -> None:
    """An exchange would give one rank's part to all."""
    experts = nn.Sequential(nn.Linear(2, 2))
    engine: Any = SimpleNamespace(mp_world_size=1, module=experts)
    compat.check_whole_model(engine)
    experts[0].ep_size = 2
    with pytest.raises(ConfigurationError, match="0: ep_size is 2: every rank must have the whole model"):
        compat.check_whole_model(engine)
    engine.mp_world_size = 2
    with pytest.raises(ConfigurationError, match="model parallelism"):
        compat.check_whole_model(engine)


def test_an_error_of_an_optimizer_that_is_given_another_state_is_told_from_others() -> None:
    """Plain DeepSpeed saves another state in half precision, and none beside its engine with ZeRO."""
    for given, error in ((None, AttributeError), ({"fp32_groups_flat": []}, KeyError)):
        with pytest.raises(error) as caught:
            torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1).load_state_dict(given)  # type: ignore[arg-type]
        assert compat.is_raised_by_optimizer(caught.value)
    assert not compat.is_raised_by_optimizer(KeyError("param_groups"))
    others: list[Callable[[], object]] = [
        lambda: torch.optim.SGD([torch.zeros(1)]).add_param_group({}),
        lambda: nn.Linear(1, 1).load_state_dict({}),
    ]
    for other in others:
        with pytest.raises((KeyError, RuntimeError)) as caught:
            other()
        assert not compat.is_raised_by_optimizer(caught.value)


def test_no_other_file_names_a_private_attribute_of_deepspeeds() -> None:
    """But for the method that the engines override."""
    private = {name for names in compat.OPTIMIZERS.values() for name in names}
    private |= {name for name in compat.ENGINE if name.startswith("_")} - {"_take_model_step"}
    private |= {"_hp_mapping", "ds_shape", "torch_autocast_z0_gradscaler"}  # which not every parameter and engine has
    found = [
        f"{path.name}:{node.lineno} {node.attr if isinstance(node, ast.Attribute) else node.value}"
        for path in sorted(Path(compat.__file__).parent.glob("*.py"))
        if path.name != "compat.py"
        for node in ast.walk(syntax_tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in private)
        or (isinstance(node, ast.Constant) and node.value in private)
    ]
    assert not found


def test_the_version_that_is_installed_is_the_one_that_the_plugin_is_made_for() -> None:
    assert deepspeed.__version__.split("+")[0] == compat.MADE_FOR


def test_the_name_of_deepspeeds_buffer_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", str(os.getpid()))
    monkeypatch.setattr(compat.dist, "get_rank", lambda: 3)
    name, seen = Path("/dev/shm") / f"deepspeed_allreduce_buffer_{os.getuid()}_192.0.2.1_{os.getpid()}_3", list[bool]()
    monkeypatch.setattr(compat.dist, "barrier", lambda: seen.append(name.exists()))
    name.touch()
    compat.unlink_reduction_buffer()
    assert not name.exists() and seen == [True]
    compat.unlink_reduction_buffer()  # as on a GPU, where there is none


@pytest.mark.parametrize(
    ("fp16", "engine", "scale", "may_fall"),
    [
        (True, {"optimizer": SimpleNamespace(cur_scale=8.0)}, 8.0, True),
        (True, {"optimizer": SimpleNamespace()}, 1.0, True),  # DeepSpeed ends the run where it can fall no further
        (False, {"optimizer": SimpleNamespace(cur_scale=8.0)}, 1.0, False),
        (False, {"torch_autocast_z0_gradscaler": torch.amp.GradScaler("cpu", init_scale=4.0)}, 4.0, True),
        (False, {"torch_autocast_z0_gradscaler": torch.amp.GradScaler("cpu", init_scale=1.0)}, 1.0, False),
    ],
)
def test_the_loss_scale_is_where_the_precision_has_it(
    fp16: bool, engine: dict[str, Any], scale: float, may_fall: bool
) -> None:
    given: Any = SimpleNamespace(fp16_enabled=lambda: fp16, **engine)
    scaler = engine.get("torch_autocast_z0_gradscaler")
    if scaler is not None:
        scaler.scale(torch.ones(1))  # as at the first backward pass
    assert (compat.loss_scale_of(given), compat.may_overflow(given)) == (scale, may_fall)
    compat.lower_loss_scale(given)
    assert compat.loss_scale_of(given) == (scale if scaler is None else scale / 2)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("has_masters", [False, True])
def test_masters_are_refreshed_where_deepspeed_does_not_do_so_itself(zero: bool, has_masters: bool) -> None:
    did = MagicMock(spec=["refresh_fp32_params"] if has_masters else [])
    engine: Any = SimpleNamespace(optimizer=did, zero_optimization=lambda: zero)
    compat.refresh_masters(engine)
    assert len(did.mock_calls) == (has_masters and not zero)


def test_an_optimizer_that_can_check_for_nan_does_so_always() -> None:
    can, cannot = SimpleNamespace(check_grad_overflow=False), SimpleNamespace()
    for optimizer in (can, cannot):
        compat.check_overflow_always(optimizer)
    assert vars(can) == {"check_grad_overflow": True} and vars(cannot) == {}


def test_gradients_are_those_that_the_optimizer_steps_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "BF16_Optimizer", BF16_Optimizer)
    own, parts = torch.nn.Parameter(torch.zeros(2)), [torch.ones(1), torch.zeros(1)]
    own.grad = torch.ones(2)
    in_bf16: Any = BF16_Optimizer()
    in_bf16.bf16_groups, in_bf16.fp32_groups_gradients = [[own]], [parts]
    in_zero: Any = SimpleNamespace(bit16_groups=[[own], [own]], averaged_gradients={1: parts, 0: None})
    in_fp16: Any = SimpleNamespace(fp16_groups=[[own, torch.nn.Parameter(torch.zeros(1))]])
    for optimizer, apart, found in (
        (in_bf16, True, [parts]),
        (in_zero, True, [[], parts]),
        (in_fp16, False, [[own.grad]]),
    ):
        assert compat.keeps_gradients_apart(optimizer) is apart
        assert compat.optimizer_gradients(optimizer) == found


def test_gradients_that_are_added_up_in_fp32_are_filled_in_fp32() -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False, dtype=torch.bfloat16) for _ in range(3)])
    model[2].weight.requires_grad_(False)
    model[1].weight.grad_dtype = torch.float32
    model[1].weight.grad = torch.ones(1, 1)
    engine: Any = SimpleNamespace(module=model)
    compat.fill_gradients(engine)
    assert [each.weight.grad for each in model] == [None, torch.ones(1, 1), None]
    compat.accumulate_in_fp32(engine)
    compat.fill_gradients(engine)
    filled = model[0].weight.grad
    assert filled.dtype is torch.float32 and not filled.any() and model[1].weight.grad.all()
    assert model[2].weight.grad is None


@pytest.mark.parametrize(
    ("managed", "samples"),
    [(None, 24), (True, 24), (False, 3 * 24 // 4)],
    ids=["an older DeepSpeed", "by the engine", "by the script"],
)
@pytest.mark.parametrize(("every", "rank", "told"), [(None, 0, []), (7, 0, [7]), (7, 1, []), (5, 0, [])])
def test_a_step_is_counted_as_deepspeed_does(
    managed: bool | None, samples: int, every: int | None, rank: int, told: list[int]
) -> None:
    """Samples are those of the passes that the script has made, where the script ends a step."""
    said = list[int]()
    engine: Any = SimpleNamespace(
        losses=1.0,
        global_steps=6,
        global_samples=100,
        global_rank=rank,
        train_batch_size=lambda: 24,
        gradient_accumulation_steps=lambda: 4,
        _unmanaged_backward_count=3,
        steps_per_print=lambda: every,
        _report_progress=said.append,
    )
    if managed is not None:
        engine.managed_gradient_accumulation = lambda: managed
    compat.count_step(engine, applied=False)
    assert (engine._step_applied, engine.losses, engine.global_steps) == (False, None, 7)
    assert engine.global_samples == 100 + samples and said == told
    assert engine._unmanaged_backward_count == (0 if managed is False else 3)


def test_what_the_script_gives_for_the_optimizer_is_neither_changed_nor_used_up() -> None:
    own = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    group: dict[str, Any] = {"params": iter(own), "lr": 0.1}
    (copied,) = compat.copied_groups([group])
    copied["lr"] = 1.0
    assert copied["params"] == own and group["lr"] == 0.1
    assert compat.copied_groups(iter(own)) == own and compat.copied_groups(None) == []
    assert compat.listed(iter(own)) == own and compat.listed(own) is own


def test_the_optimizer_of_whole_parameters_has_the_options_of_the_configuration_and_no_moment_of_a_partition() -> None:
    params, partition = {"lr": 0.5}, torch.zeros(1)
    engine: Any = MagicMock()
    engine.basic_optimizer.state = {partition: {"exp_avg": partition}}
    engine._configure_basic_optimizer = lambda parameters: (parameters, dict(engine._config.optimizer_params))
    for section, expected in (({"type": "Adam", "params": params}, params), ({"type": "Adam"}, {})):
        assert compat.optimizer_of_whole(engine, section, ["whole"]) == (["whole"], expected)  # type: ignore[comparison-overlap]
    assert engine.basic_optimizer.state == {} and engine._config.optimizer_params is not params


class Engine:
    """Has a model, whose parameters its optimizer steps within others."""

    def __init__(self) -> None:
        self.module = nn.Linear(1, 1)
        self.module.bias.requires_grad_(False)
        self.basic_optimizer = torch.optim.SGD([torch.zeros(1)])  # of masters


def test_steps_that_the_run_does_not_see_are_refused_and_those_of_other_models_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine, expected = Engine(), [False]
    compat.refuse_other_steps(engine, 2, lambda of: expected[0])
    frozen = torch.optim.SGD([engine.module.bias])
    for _ in range(10):  # an optimizer of other parameters may be tried
        frozen.step()
    assert "SGD steps parameters that are in no exchange" in capsys.readouterr().err
    for optimizer, said in (
        (engine.basic_optimizer, "the step() of"),
        (torch.optim.SGD([engine.module.weight]), "weight in"),
    ):
        with pytest.raises(SystemExit):
            optimizer.step()
        assert f"the script trains {said}" in capsys.readouterr().err
        expected[0] = True
        optimizer.step()
        expected[0] = False
    given = engine.module.weight
    del engine
    torch.optim.SGD([given]).step()


def test_masters_that_are_dealt_are_linked_as_they_were_dealt_and_the_groups_stay_in_the_models_order() -> None:
    linked = list[str]()
    optimizer: Any = SimpleNamespace(bit16_groups="in order", round_robin_bit16_groups="dealt")
    optimizer._link_all_hp_params = lambda: linked.append(optimizer.bit16_groups)
    for optimizer.round_robin_gradients in (False, True):
        compat.link_masters(optimizer)
    assert linked == ["dealt"] and optimizer.bit16_groups == "in order"


def test_in_fp16_each_parameter_has_the_master_of_its_own_group() -> None:
    first, second, third = (nn.Parameter(torch.zeros(size)) for size in (2, 1, 3))
    flats, groups = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])], [[first, second], [third]]
    fused: Any = SimpleNamespace(fp16_groups=groups, fp32_groups_flat=flats)
    unfused: Any = SimpleNamespace(
        fp16_groups=groups, fp32_groups=[[flats[0][:2], flats[0][2:]], [flats[1].view(3, 1)]]
    )
    for optimizer in (fused, unfused):
        masters = compat.fp16_masters(optimizer)
        assert [masters[id(each)].tolist() for each in (first, second, third)] == [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]]
    assert compat.fp16_masters(SimpleNamespace()) == {}


def test_a_model_is_rounded_with_what_deepspeed_keeps_in_fp32_and_its_type_of_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine: Any = MagicMock()
    engine._mixed_precision_dtypes.return_value = "own", "of buffers"
    monkeypatch.setattr(
        compat.deepspeed, "get_accelerator", lambda: MagicMock(supported_dtypes=lambda: [torch.bfloat16])
    )
    monkeypatch.setattr("deepspeed.runtime.keep_in_fp32.keep_in_fp32_pattern", lambda *given: given[1:])
    compat.round_model(engine, torch.bfloat16)
    kept = engine._config.keep_in_fp32_modules, torch.bfloat16
    engine._cast_module_mixed_precision.assert_called_once_with(torch.bfloat16, "of buffers", False, kept)
    with pytest.raises(ConfigurationError, match="float16 is not supported on this device"):
        compat.round_model(engine, torch.float16)


@pytest.mark.parametrize("divided", [False, True])
def test_of_a_step_that_zero_3_has_divided_gradients_and_whole_parameters_are_dropped(divided: bool) -> None:
    engine: Any = MagicMock()
    engine.zero_optimization_partition_weights.return_value = divided
    compat.drop_partitions(engine)
    did = [call._pre_step(), call._partition_all_parameters(), call._overflow_clean_up(1.0)]
    assert engine.optimizer.mock_calls == did * divided
