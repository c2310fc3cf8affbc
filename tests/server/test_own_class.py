"""Classes of optimizers that a user's plugin brings: the server's steps as the worker's would, or is refused."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from fairseq_async.algorithms import Update
from fairseq_async.algorithms.threads import set_threads
from fairseq_async.environment import PLUGINS
from fairseq_async.errors import ConfigurationError
from fairseq_async.method.spec import hybrid_spec
from fairseq_async.options.config import HybridOptions
from fairseq_async.protocol import Layout
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, build_optimizer, describe
from fairseq_async.server.programs import gradient_main

PLUGIN = """
import torch
from types import SimpleNamespace

class Counting(torch.optim.Optimizer):
    '''Counts its steps in itself, divides by the norm of all gradients, and reads a rank from a group.'''

    def __init__(self, params, lr=0.1, decoupled=False, least=1, most=float("inf"), betas=(0.9, 0.99), **unknown):
        assert lr > 0, "no rate"
        super().__init__(params, {"lr": lr, "most": most, "betas": betas})
        self.first_lr, self.decoupled, self.args, self.steps = lr, decoupled, SimpleNamespace(least=least), 0

    @torch.no_grad()
    def step(self, closure=None):
        trained = [(each, group) for group in self.param_groups for each in group["params"] if each.grad is not None]
        if not trained:
            return
        self.steps += 1
        norm = sum(each.grad.square().sum() for each, _ in trained).sqrt()
        for each, group in trained:
            self.state[each]["kept"] = self.kept(each)
            each.sub_(each.grad, alpha=float(group["lr"] * self.first_lr * self.steps * group.get("rank", 1) / norm))

    def kept(self, each):
        return [1, "two", {"three": each.clone()}]

class NoRate(Counting):
    def __init__(self, params, size=1.0):
        torch.optim.Optimizer.__init__(self, params, {"size": size})

class TwoSets(Counting):
    def train(self): ...
    def eval(self): ...

class Decays(Counting):
    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for each in group["params"]:
                    each.mul_(0.9)

class Counts(Counting):
    def __init__(self, params):
        torch.optim.Optimizer.__init__(self, params, {"lr": 0.1, "k": 0})
    def step(self, closure=None):
        self.param_groups[0]["k"] += 1

class Remembers(Counting):
    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            self.state[each]["steps"] = 1

class Projects(Counting):
    def kept(self, each):
        return SimpleNamespace()

class OfNames(Counting):
    def __init__(self, named_parameters, lr=0.1):
        torch.optim.Optimizer.__init__(self, [each for _, each in named_parameters], {"lr": lr})
"""


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin's module."""
    (tmp_path / "own_classes.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(PLUGINS, "own_classes")
    yield importlib.import_module("own_classes")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices, vectors = ([each for each in model.parameters() if each.dim() == dim] for dim in (2, 1))
    return [{"params": vectors}, {"params": matrices, "rank": 3}]


def test_it_steps_as_in_a_plain_loop_with_keys_of_a_group_and_what_it_keeps_in_itself(classes: Any) -> None:
    """Also where the server has threads, and a schedule begins at another rate than that of the constructor."""
    model = net()
    optimizer = classes.Counting(groups(model), lr=0.5, betas=[0.8, 0.9])
    LinearLR(optimizer, start_factor=1e-3)
    named = list(model.named_parameters())
    spec = OptimizerSpec.from_json(json.loads(json.dumps(describe(optimizer, named).to_json())))
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    rule, _ = gradient_main.build(hybrid_spec(HybridOptions(), 1, None, spec.to_json(), 9), Layout.of(named), flat)
    set_threads(2)
    for step in range(3):
        for number, each in enumerate(model.parameters()):
            each.grad = torch.full_like(each, 0.1 * (number + step))
        gradients = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        rule.apply(flat, Update(0, step, step, 1.0, gradients))
        optimizer.step()
    set_threads(1)
    assert torch.equal(flat, nn.utils.parameters_to_vector(model.parameters()))
    assert build_optimizer(spec, Layout.of(named), flat).param_groups[1]["rank"] == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda own, given: own.Counting(given, decoupled=True), "would have False for decoupled, and .* has True"),
        (lambda own, given: own.Counting(given, least=8), r"would have 1 for args\.least, and the worker's has 8"),
        (lambda own, given: own.NoRate(given), 'NoRate, which has no "lr"'),
        (lambda own, given: own.TwoSets(given), r"TwoSets, whose eval\(\) gives the model other weights"),
        (lambda own, given: own.Decays(given), r"Decays, whose step\(\) does something where there are no gradients"),
        (lambda own, given: own.Counts(given), r"Counts, whose step\(\) does something where there are no gradients"),
        (lambda own, given: own.Remembers(given), r"Remembers, whose step\(\) does something where there are no grad"),
        (lambda own, given: own.Projects(given), "goes on from a state that was saved there .UnpicklingError"),
        (lambda own, given: own.OfNames([("", each["params"][0]) for each in given]), "cannot be made from its groups"),
    ],
)
def test_one_that_the_server_would_have_otherwise_is_refused_in_one_line(
    make: Callable[[Any, Any], Optimizer], message: str, classes: Any
) -> None:
    model = net()
    with pytest.raises(ConfigurationError, match=message) as caught:
        describe(make(classes, groups(model)), list(model.named_parameters()))
    assert "\n" not in str(caught.value)


def test_of_a_large_tensor_a_part_is_stepped(classes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding may be alone in its group, and copies of it would take seconds and gigabytes."""
    sizes: list[int] = []
    monkeypatch.setattr(classes.Counting, "kept", lambda self, each: sizes.append(each.numel()))
    embedding = nn.Parameter(torch.zeros(()).expand(60_000, 700))
    describe(classes.Counting([embedding]), [("embedding", embedding)])
    assert sizes and max(sizes) == 512 * 512
