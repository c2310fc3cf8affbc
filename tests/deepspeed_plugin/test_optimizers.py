"""DeepSpeed's optimizers have an equal of torch's, which steps in the server."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam, cpu_adam, fused_adam
from torch import nn
from torch.optim import Adam, Optimizer

from fairseq_async.algorithms.muon import MuonAdamW
from fairseq_async.deepspeed_plugin.engines.tensors import check_matrices
from fairseq_async.deepspeed_plugin.server_description import count_steps_as_torch, equal_of_torch
from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import Layout
from fairseq_async.server.optimizers.torch_optimizer import build_optimizer, describe

Make = Callable[..., Optimizer]


class Compiled:
    """Stands for DeepSpeed's compiled steps, which need a minute to compile and are not called here."""

    multi_tensor_adam = None

    def load(self) -> "Compiled":
        return self

    def create_adam(self, *options: object) -> None: ...

    def destroy_adam(self, number: int) -> None: ...


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_adam, "FusedAdamBuilder", Compiled)
    monkeypatch.setattr(cpu_adam, "CPUAdamBuilder", Compiled)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (FusedAdam, "AdamW"),
        (partial(FusedAdam, adam_w_mode=False), "Adam"),
        (DeepSpeedCPUAdam, "AdamW"),
        (partial(DeepSpeedCPUAdam, adamw_mode=False), "Adam"),
    ],
)
def test_deepspeeds_adam_is_torchs_with_its_own_defaults(make: Make, kind: str) -> None:
    named = [("a", nn.Parameter(torch.ones(3))), ("b", nn.Parameter(torch.ones(2)))]
    optimizer = make([parameter for _, parameter in named], betas=(0.8, 0.9))
    assert equal_of_torch(optimizer) == kind
    spec = describe(optimizer, named, equal_of_torch(optimizer))
    built = build_optimizer(spec, Layout.of(named), torch.ones(5))
    (group,) = built.param_groups
    assert type(built).__name__ == kind
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.8, 0.9), 1e-8, 0)


def test_an_optimizer_without_an_equal_is_refused_and_torchs_are_themselves() -> None:
    with pytest.raises(ConfigurationError, match="FusedAdam with bias_correction False has no equal"):
        equal_of_torch(FusedAdam([nn.Parameter(torch.ones(1))], bias_correction=False))
    assert equal_of_torch(Adam([nn.Parameter(torch.ones(1))])) == ""


@pytest.mark.parametrize("wrapped", [False, True])
def test_each_parameter_has_the_count_of_its_group_which_fused_adam_keeps_with_one(wrapped: bool) -> None:
    first, second, unused = (nn.Parameter(torch.ones(1)) for _ in range(3))
    fused, plain = FusedAdam([first, second, unused]), Adam([first, second])
    for optimizer in (fused, plain):
        optimizer.state[first], optimizer.state[second] = {"step": 1}, {"step": 4}
        given = SimpleNamespace(aux_optimizer=optimizer, **vars(optimizer)) if wrapped else optimizer
        count_steps_as_torch(given)  # type: ignore[arg-type]
    assert [fused.state[each]["step"] for each in (first, second)] == [4, 4] and not fused.state[unused]
    assert [plain.state[each]["step"] for each in (first, second)] == [1, 4]


class MuonWithAuxAdam(Adam):
    """Stands for DeepSpeed's, whose module compiles when it is imported."""

    adam_w_mode = True


MuonWithAuxAdam.__module__ = "deepspeed.runtime.zero.muon.muon_optimizer"


def muon(parameter: nn.Parameter, adam_w_mode: bool = True, **group: bool) -> Optimizer:
    optimizer = MuonWithAuxAdam([{"params": [parameter], "use_muon": True, **group}])
    optimizer.adam_w_mode = adam_w_mode
    return optimizer


def test_deepspeeds_muon_is_the_packages_unless_its_steps_are_others() -> None:
    matrix, by_heads = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    vars(by_heads)["muon_num_heads"] = 2
    assert equal_of_torch(muon(matrix)) == "MuonAdamW"
    for other, said in (
        (muon(by_heads), '"per_head_muon"'),
        (muon(matrix, adam_w_mode=False), '"adam_w_mode"'),
        (muon(matrix, bias_correction=False), '"bias_correction" false'),
        (muon(nn.Parameter(torch.ones(2, 2, 3))), r"a tensor of shape \(2, 2, 3\)"),
    ):
        with pytest.raises(ConfigurationError, match=f'"type" is "Muon" with .*{said}.*, which has no equal'):
            equal_of_torch(other)


def test_matrices_that_are_flat_are_refused_before_the_first_step() -> None:
    own = MuonAdamW([nn.Parameter(torch.ones(2, 2))])
    for basic, wrapper in ((own, own), (Adam([torch.ones(1)]), object())):
        check_matrices(SimpleNamespace(basic_optimizer=basic, optimizer=wrapper))
    with pytest.raises(ConfigurationError, match="DeepSpeed's object gives it flat vectors: leave out"):
        check_matrices(SimpleNamespace(basic_optimizer=own, optimizer=object()))
