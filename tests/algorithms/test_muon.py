"""Muon with AdamW in one optimizer, against torch's two and against the formulas in float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from torch.optim.optimizer import register_optimizer_step_post_hook

from fairseq_async.algorithms.muon import MuonAdamW, muon_groups
from fairseq_async.algorithms.threads import set_threads, step_in_threads
from tests.helpers.references import Muon64

RATE: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
SHAPES = {"embed.weight": (6, 4), "a.weight": (5, 7), "b.weight": (7, 3), "c.bias": (4,), "d.weight": (2, 3, 2)}


def model() -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(0)
    named = {name.replace(".", "_"): torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return nn.ParameterDict({name: nn.Parameter(each) for name, each in named.items()})


def give_gradients(parameters: nn.ParameterDict, step: int, without: str = "") -> None:
    generator = torch.Generator().manual_seed(step)
    for name, each in parameters.items():
        each.grad = torch.randn(each.shape, generator=generator)
        if name == without:
            each.grad = None


def torchs(parameters: nn.ParameterDict, **options: Any) -> list[torch.optim.Optimizer]:
    matrices = [parameters["a_weight"], parameters["b_weight"]]
    rest = [parameters[name] for name in ("embed_weight", "c_bias", "d_weight")]
    return [Muon(matrices, **RATE, **options), AdamW(rest, **RATE)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_steps_are_those_of_torchs_muon_and_adamw_to_the_bit(adjust: str | None, threads: int) -> None:
    """Also where a step has no gradient of a matrix, and after a state was saved and loaded."""
    ours, theirs = model(), model()
    optimizer = MuonAdamW(muon_groups(ours.items()), **RATE, adjust_lr_fn=adjust)
    optimizers = torchs(theirs, adjust_lr_fn=adjust)
    set_threads(threads)
    try:
        for step in range(5):
            give_gradients(ours, step, "a_weight" if step == 2 else "")
            give_gradients(theirs, step, "a_weight" if step == 2 else "")
            step_in_threads(optimizer)
            for each in optimizers:
                each.step()
            if step == 3:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = MuonAdamW(muon_groups(ours.items()))
                optimizer.load_state_dict(state)
    finally:
        set_threads(1)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_steps_are_those_of_the_formulas_in_float64() -> None:
    """torch iterates in bfloat16, with 8 bits: a step differs by at most some hundredths of its length."""
    ours = model()
    reference = Muon64(lr=0.02, weight_decay=0.1, adjust=lambda rows, columns: 0.2 * max(rows, columns) ** 0.5)
    expected = {name: ours[name].detach().double() for name in ("a_weight", "b_weight")}
    start = {name: each.clone() for name, each in expected.items()}
    optimizer = MuonAdamW(muon_groups(ours.items()), **RATE, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        give_gradients(ours, step)
        gradients = {name: ours[name].grad for name in expected}
        optimizer.step()
        for name, gradient in gradients.items():
            assert gradient is not None
            expected[name] = reference.stepped(name, expected[name], gradient.double())
    for name, each in expected.items():
        assert (ours[name] - each).norm() <= 0.02 * (each - start[name]).norm()


def test_embeddings_and_output_layers_are_adamws() -> None:
    names = ["wte.weight", "h.0.attn.c_attn.weight", "decoder.output_projection.weight", "lm_head.weight", "ln.weight"]
    named = [(name, nn.Parameter(torch.zeros((2,) if name.startswith("ln") else (2, 3)))) for name in names]
    frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    muons, rest = muon_groups([*named, ("frozen.weight", frozen)])
    assert muons["params"] == [named[1][1]] and len(rest["params"]) == 4
    (only,) = muon_groups(named, words=("wte", "output", "head", "attn"))
    assert not only["use_muon"] and len(only["params"]) == 5


@pytest.mark.parametrize("make", [lambda each: MuonAdamW([each]), lambda each: MuonAdamW([{"params": [each]}])])
def test_what_is_no_matrix_is_not_muons(make: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ValueError, match=r"a tensor of shape \(3,\) in a group with use_muon"):
        make(nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="momentum should be >= 0"):
        MuonAdamW([nn.Parameter(torch.zeros(2, 2))], momentum=-1.0)


def test_a_matrix_that_was_made_flat_later_ends_the_step_with_a_remedy() -> None:
    """As ZeRO does with an optimizer's groups."""
    optimizer = MuonAdamW([nn.Parameter(torch.zeros(2, 2))])
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(4))]
    with pytest.raises(ValueError, match="give no ZeRO"):
        optimizer.step()


def test_hooks_of_a_step_run_once_and_a_closure_gives_its_loss() -> None:
    parameters, calls = model(), []
    optimizer = MuonAdamW(muon_groups(parameters.items()))
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))

    def loss() -> Tensor:
        value: Tensor = torch.stack([each.square().sum() for each in parameters.values()]).sum()
        value.backward()
        return value

    handle = register_optimizer_step_post_hook(lambda *_: calls.append("global"))
    try:
        assert float(optimizer.step(loss) or 0) > 0
    finally:
        handle.remove()
    assert calls == ["own", "global"]
