"""An optimizer that has stepped brings its moments to the server: ten more steps are those of the plain loop."""

import copy
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from fairseq_async.algorithms.rule import State
from fairseq_async.environment import PLUGINS
from fairseq_async.pytorch import HybridAsync
from fairseq_async.pytorch.brought_state import (
    check_brought,
    checksum_of_moments,
    has_stepped,
    note_end_of_run,
    warn_of_missing_moments,
    warn_of_run_before,
)
from fairseq_async.server.programs import gradient_main
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]
BEFORE, AFTER = 7, 10


class Net(nn.Module):
    """A frozen tensor between trained ones, one larger than a piece of the server, and one used every other step."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.frozen, self.wide, self.rare = (
            nn.Parameter(0.1 * torch.randn(*shape, generator=generator))
            for shape in ((5, 3), (3,), (3, 30_000), (30_000,))
        )
        self.frozen.requires_grad_(False)

    def forward(self, step: int) -> Tensor:
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        hidden = (inputs @ self.first + self.frozen).tanh() @ self.wide
        return (hidden + self.rare if step % 2 else hidden).square().mean() + hidden.mean()


def groups(net: Net) -> list[dict[str, Any]]:
    return [{"params": [net.wide, net.first], "weight_decay": 0.1}, {"params": [net.frozen, net.rare], "lr": 0.02}]


OPTIMIZERS: dict[str, Callable[[Net], Optimizer]] = {
    "SGD": lambda net: SGD(net.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda net: Adam(net.parameters(), lr=0.01),
    "AdamW": lambda net: AdamW(groups(net), lr=0.01, amsgrad=True),
    "Adagrad": lambda net: torch.optim.Adagrad(groups(net), lr=0.01),
    "NAdam": lambda net: torch.optim.NAdam(groups(net), lr=0.01),
    "Adafactor": lambda net: torch.optim.Adafactor(groups(net), lr=0.01),
}


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "a function": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.9**step),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, BEFORE + AFTER),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.05, BEFORE + AFTER, cycle_momentum=False),
}
CASES = [(make, SCHEDULERS["a function"]) for make in OPTIMIZERS.values()]
CASES += [(OPTIMIZERS["AdamW"], schedule) for schedule in SCHEDULERS.values()]


def train(net: Net, optimizer: Optimizer, begin: int, end: int, scheduler: LRScheduler | None = None) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        net(step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize(("make", "schedule"), CASES, ids=[*OPTIMIZERS, *SCHEDULERS])
def test_ten_steps_after_a_plain_run_are_its_own(
    workers: Start, make: Callable[[Net], Optimizer], schedule: Callable[[Optimizer], LRScheduler]
) -> None:
    net = Net()
    optimizer = make(net)
    scheduler = schedule(optimizer)
    train(net, optimizer, 0, BEFORE, scheduler)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    train(net, optimizer, BEFORE, BEFORE + AFTER, scheduler)

    def go_on(worker: int) -> Net:
        own = Net()
        its = make(own)
        rates = schedule(its)
        for each, state in zip((own, its, rates), saved, strict=True):
            each.load_state_dict(state)
        with HybridAsync(own, its, scheduler=rates, total_steps=AFTER) as training:
            train(own, its, BEFORE, BEFORE + AFTER, rates)
            assert training.finished
        assert not its.state
        return own

    (ended,) = workers(1, gradient_main.build).run(go_on)
    for (name, expected), found in zip(net.named_parameters(), ended.parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("goes_on", [False, True], ids=["anew", "with the state of the run before"])
def test_an_optimizer_whose_moments_have_gone_with_a_run_before_begins_the_next_with_a_warning(
    workers: Start, capfd: pytest.CaptureFixture[str], goes_on: bool
) -> None:
    net = Net()
    optimizer, states = Adam(net.parameters(), lr=0.01), list[State]()

    def run(worker: int) -> None:
        training = HybridAsync(net, optimizer)
        training.load_state_dict(states[-1] if goes_on and states else {})
        with training:
            train(net, optimizer, 3 * len(states), 3 * len(states) + 3)
            states.append(training.state_dict())

    for _ in range(2):
        workers(1, gradient_main.build).run(run)
    assert capfd.readouterr().err.count("warning: Adam begins anew") == (not goes_on)
    plain = Net()
    train(plain, Adam(plain.parameters(), lr=0.01), 0, 6)
    assert all(map(torch.equal, plain.parameters(), net.parameters())) == goes_on


@pytest.mark.parametrize("first", [0, 1], ids=["both have stepped", "the second has stepped"])
def test_of_two_optimizers_each_brings_its_own(workers: Start, first: int) -> None:
    def make(net: Net) -> list[Optimizer]:
        return [SGD([net.rare, net.first], lr=0.05, momentum=0.9), AdamW([net.wide], lr=0.01)]

    def both(net: Net, optimizers: list[Optimizer], begin: int, end: int) -> None:
        for step in range(begin, end):
            net.zero_grad()
            net(step).backward()
            for each in optimizers:
                each.step()

    net = Net()
    optimizers = make(net)
    both(net, optimizers[first:], 0, BEFORE)
    saved = copy.deepcopy((net.state_dict(), *(each.state_dict() for each in optimizers)))
    both(net, optimizers, BEFORE, BEFORE + AFTER)

    def go_on(worker: int) -> Net:
        own = Net()
        its = make(own)
        for each, state in zip((own, *its), saved, strict=True):
            each.load_state_dict(state)
        with HybridAsync(own, its, total_steps=AFTER):
            both(own, its, BEFORE, BEFORE + AFTER)
        return own

    (ended,) = workers(1, gradient_main.build).run(go_on)
    for (name, expected), found in zip(net.named_parameters(), ended.parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    ("taken", "refused"),
    [((0, 2), True), ((2, 1), True), ((2, 0), False), ((2, 2), False)],
    ids=["where worker 0 brings none", "other than worker 0's", "none", "the same"],
)
def test_moments_of_another_worker_are_worker_0s_or_one_line(
    workers: Start, capsys: pytest.CaptureFixture[str], taken: tuple[int, int], refused: bool
) -> None:
    def go_on(worker: int) -> object:
        net = Net()
        optimizer = Adam(net.parameters(), lr=0.01)
        train(net, optimizer, 0, taken[worker])
        try:
            with HybridAsync(net, optimizer, total_steps=2) as training:
                while not training.finished:
                    train(net, optimizer, 0, 1)
        except SystemExit as end:
            return end.code
        return 0

    assert workers(2, gradient_main.build).run(go_on) == [0, 2 if refused else 0]
    assert (
        "optimizer of worker 1 has stepped before this run, and has other moments" in capsys.readouterr().err
    ) == refused


def test_a_server_in_shards_which_cannot_be_given_moments_is_not_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Net()
    optimizer = Adam(net.parameters(), lr=0.01)
    train(net, optimizer, 0, 1)
    monkeypatch.setattr(WorkerContext, "connect", lambda *_: pytest.fail("it has joined"))
    with pytest.raises(SystemExit), HybridAsync(net, optimizer, total_steps=2, server_shards=2):
        pass
    assert "Adam has stepped before this run" in capsys.readouterr().err


def test_a_state_that_is_loaded_has_the_moments_and_not_the_optimizer_though_it_has_stepped(workers: Start) -> None:
    """With them any server may begin, one in shards too."""

    def run(worker: int, state: State | None = None) -> tuple[State, Tensor]:
        net = Net()
        optimizer = Adam(net.parameters(), lr=0.01)
        if state is not None:
            train(net, optimizer, 20, 23)  # of another run, which is of no effect
        training = HybridAsync(net, optimizer, server_shards=1 if state is None else 2)
        training.load_state_dict(state or {})
        assert training.describe(1).server.shards == (1 if state is None else 2)
        training = HybridAsync(net, optimizer)
        training.load_state_dict(state or {})
        with training:
            train(net, optimizer, 0 if state is None else 4, 4 if state is None else 6)
            return training.state_dict(), nn.utils.parameters_to_vector(net.parameters()).detach()

    ((state, _),) = workers(1, gradient_main.build).run(run)
    ((again, resumed),) = workers(1, gradient_main.build).run(partial(run, state=state))
    plain = Net()
    train(plain, Adam(plain.parameters(), lr=0.01), 0, 6)
    assert again["server"]["version"] == 6 and torch.equal(resumed, nn.utils.parameters_to_vector(plain.parameters()))


def test_moments_that_an_optimizer_begins_with_are_of_no_step_and_any_server_may_have_them() -> None:
    net = Net()
    optimizer = OPTIMIZERS["Adagrad"](net)
    assert optimizer.state
    check_brought(HybridAsync(net, optimizer, total_steps=2, server_shards=2).describe(1), [optimizer])


def test_a_class_of_a_plugin_steps_in_the_server_as_in_the_plain_loop(
    workers: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has stepped before. Without the plugin it is refused."""
    (tmp_path / "signs_of_ones_own.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = importlib.import_module("signs_of_ones_own").Signs
    with pytest.raises(SystemExit):
        HybridAsync((net := Net()), own(net.parameters()))
    monkeypatch.setenv(PLUGINS, str(tmp_path / "signs_of_ones_own.py"))
    make = partial(own, beta=0.8, shape=(1, 2), word="root")
    test_ten_steps_after_a_plain_run_are_its_own(workers, lambda net: make(groups(net), lr=0.01), SCHEDULERS["cosine"])


PLUGIN = """
import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, beta=0.9, shape=(3, 4), word="", weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "shape": shape, "word": word, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["shape"] == (1, 2) and group["word"] == "root"
            for each in group["params"]:
                if each.grad is not None:
                    mean = self.state[each].setdefault("mean", torch.zeros_like(each))
                    mean.lerp_(each.grad, 1 - group["beta"])
                    each.mul_(1 - group["lr"] * group["weight_decay"]).add_(mean.sign(), alpha=-group["lr"])
                    each.add_(mean.mean(), alpha=-group["lr"])  # of the whole tensor
"""


def test_equal_states_have_one_checksum_in_whatever_order_they_were_loaded() -> None:
    net = Net()
    optimizer = Adam(net.parameters(), lr=0.01)
    net(1).backward()
    optimizer.step()
    named = list(net.named_parameters())
    before = checksum_of_moments(named, [optimizer])
    for parameter, state in list(optimizer.state.items()):
        optimizer.state[parameter] = dict(reversed(state.items()))
    assert checksum_of_moments(named, [optimizer]) == before != ""
    optimizer.state[net.wide]["exp_avg"][0, 0] += 1.0
    assert checksum_of_moments(named, [optimizer]) != before


def test_an_optimizer_that_counts_no_steps_has_stepped_where_it_has_a_moment() -> None:
    optimizer = SGD([weight := nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(1)
    assert not has_stepped(optimizer)
    optimizer.step()
    assert has_stepped(optimizer)


def test_an_optimizer_that_has_its_moments_is_saved_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for steps, warnings in ((0, 1), (1, 0)):
        optimizer = Adam([weight := nn.Parameter(torch.zeros(1))])
        warn_of_missing_moments(optimizer, "worker.state_dict(), too", lambda: False)
        weight.grad = torch.ones(1)
        for _ in range(steps):
            optimizer.step()
        optimizer.state_dict(), optimizer.state_dict()
        assert capsys.readouterr().err.count("Adam.state_dict() has no moments") == warnings


def test_an_optimizer_that_has_stepped_since_a_run_has_moments_and_no_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = Net()
    for momentum in (0.0, 0.9):
        note_end_of_run(without := SGD(net.parameters(), lr=0.01, momentum=momentum))
        train(net, without, 0, 1)
        assert ("warning: SGD begins anew after the run" in capsys.readouterr().err) is (momentum > 0)
    optimizer = Adam(net.parameters(), lr=0.01)
    note_end_of_run(optimizer)
    for said in (True, False):
        warn_of_run_before(optimizer)
        assert ("warning: Adam begins anew" in capsys.readouterr().err) is said
        train(net, optimizer, 0, 2)
        assert capsys.readouterr().err.count("warning: Adam begins anew after the run") == said
