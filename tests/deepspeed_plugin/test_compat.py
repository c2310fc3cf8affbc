"""A DeepSpeed that lacks what the plugin builds on is named, with what it lacks."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    monkeypatch.setattr(compat.dist, "barrier", lambda: None)
    name = Path("/dev/shm") / f"deepspeed_allreduce_buffer_{os.getuid()}_192.0.2.1_{os.getpid()}_3"
    name.touch()
    compat.unlink_reduction_buffer()
    assert not name.exists()
    compat.unlink_reduction_buffer()  # as on a GPU, where there is none
