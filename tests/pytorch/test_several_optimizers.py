"""Several optimizers in one run, against the same plain loop."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from fairseq_async.algorithms import Update
from fairseq_async.protocol import Layout
from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from fairseq_async.server.optimizers.several import SeveralOptimizers
from fairseq_async.server.programs import gradient_main, local_sgd_main
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]
STEPS = 6
Loop = Callable[[list[nn.Module], list[Optimizer], int, int], None]


def models() -> list[nn.Module]:
    """A generator and a discriminator."""
    generator = torch.Generator().manual_seed(0)
    made: list[nn.Module] = [
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)),
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)),
    ]
    for model in made:
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return made


def noise(worker: int, step: int, size: int) -> Tensor:
    return torch.randn(8, size, generator=torch.Generator().manual_seed(1000 * worker + 10 * step + size))


def adversarial(nets: list[nn.Module], optimizers: list[Optimizer], worker: int, step: int) -> None:
    """The generator's loss leaves gradients in the discriminator, which are not its own; it steps first, and twice in
    every second round."""
    (make, judge), (of_make, of_judge) = nets, optimizers
    for turn in range(1 + step % 2):
        of_judge.zero_grad()
        fake = make(noise(worker, step + 100 * turn, 3)).detach()
        (judge(fake).mean() - judge(noise(worker, step, 4)).mean() + judge(fake).square().mean()).backward()
        of_judge.step()
    of_make.zero_grad()
    (-judge(make(noise(worker, step, 3))).mean()).backward()
    of_make.step()


def divided(nets: list[nn.Module], optimizers: list[Optimizer], worker: int, step: int) -> None:
    """Two optimizers that step after one backward pass."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    nets[1](nets[0](noise(worker, step, 3))).sub(1.0).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def by_model(nets: list[nn.Module]) -> list[Optimizer]:
    return [Adam(nets[0].parameters(), lr=0.02), SGD(nets[1].parameters(), lr=0.1, momentum=0.9)]


def by_shape(nets: list[nn.Module]) -> list[Optimizer]:
    """One for matrices, one for the rest: their tensors alternate."""
    own = [parameter for net in nets for parameter in net.parameters()]
    matrices, rest = ([p for p in own if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [SGD(matrices, lr=0.1, momentum=0.9, weight_decay=0.1), AdamW(rest, lr=0.02, weight_decay=0.1)]


def functions(optimizers: list[Optimizer]) -> list[LRScheduler]:
    """Whose positions a script may restore."""
    return [LambdaLR(each, lambda step, turn=turn: turn / (turn + step)) for turn, each in enumerate(optimizers, 1)]  # type: ignore[misc]


def with_muon(nets: list[nn.Module]) -> list[Optimizer]:
    own = [parameter for net in nets for parameter in net.parameters()]
    matrices, rest = ([p for p in own if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw"), AdamW(rest, lr=0.02)]


def schedules(optimizers: list[Optimizer]) -> list[LRScheduler | None]:
    return [LambdaLR(optimizers[0], lambda step: 1 / (1 + step)), StepLR(optimizers[1], 2, gamma=0.5)]


def flat(nets: list[nn.Module]) -> Tensor:
    return torch.cat([parameter.detach().flatten() for net in nets for parameter in net.parameters()])


CASES: dict[str, tuple[Loop, Callable[[list[nn.Module]], list[Optimizer]], Any]] = {
    "generator and discriminator": (adversarial, by_model, None),
    "matrices and the rest": (divided, by_shape, None),
    "Muon for matrices": (divided, with_muon, None),
    "Muon with its scheduler": (divided, with_muon, schedules),
    "each with its scheduler": (divided, by_shape, schedules),
}


def trained(
    loop: Loop, make: Callable[[list[nn.Module]], list[Optimizer]], schedule: Any, worker: int, **options: Any
) -> Tensor:
    nets = models()
    optimizers = make(nets)
    schedulers = None if schedule is None else schedule(optimizers)
    with HybridAsync(nets, optimizers, scheduler=schedulers, total_steps=STEPS, **options) as training:
        step = 0
        while not training.finished:
            loop(nets, optimizers, worker, step)
            for each in schedulers or []:
                each.step()
            step += 1
            assert training.progress == step
    assert step == STEPS and not any(optimizer.state for optimizer in optimizers)
    return flat(nets)


def plain(loop: Loop, make: Any, schedule: Any = None) -> Tensor:
    nets = models()
    optimizers = make(nets)
    schedulers = [] if schedule is None else schedule(optimizers)
    for step in range(STEPS):
        loop(nets, optimizers, 0, step)
        for scheduler in schedulers:
            scheduler.step()
    return flat(nets)


@pytest.mark.parametrize("options", [{}, {"updates_per_step": 1}, {"barrier": True}], ids=str)
@pytest.mark.parametrize(("loop", "make", "schedule"), CASES.values(), ids=CASES.keys())
def test_one_worker_is_the_plain_loop_to_the_bit(
    workers: Start, loop: Loop, make: Any, schedule: Any, options: dict[str, Any]
) -> None:
    (ended,) = workers(1, gradient_main.build).run(lambda worker: trained(loop, make, schedule, worker, **options))
    assert torch.equal(ended, plain(loop, make, schedule))


@pytest.mark.parametrize(("loop", "make"), [(adversarial, by_model), (divided, with_muon)])
@pytest.mark.parametrize("count", [1, 2])
def test_local_steps_are_those_of_all_optimizers_together(workers: Start, loop: Loop, make: Any, count: int) -> None:
    """One worker is the plain loop; two end with the same parameters, of all optimizers."""
    as_it_is: dict[str, Any] = {"outer": "sgd", "outer_lr": 1.0, "local_steps": 3, "total_steps": STEPS}

    def train(worker: int) -> Tensor:
        nets = models()
        optimizers = make(nets)
        with AsyncLocalSGD(nets, optimizers, **as_it_is) as training:
            step = 0
            while not training.finished:
                loop(nets, optimizers, worker, step)
                step += 1
            assert count > 1 or step == training.progress == STEPS
        return flat(nets)

    ended = workers(count, local_sgd_main.build).run(train)
    if count == 1:
        torch.testing.assert_close(ended[0], plain(loop, make))
    assert torch.equal(ended[0], ended[-1])


@pytest.mark.parametrize("bad", [0, 1])
def test_a_step_of_which_one_optimizer_has_a_finite_gradient_is_a_local_step(workers: Start, bad: int) -> None:
    def train(worker: int) -> tuple[int, bool]:
        nets = models()
        optimizers = [SGD(net.parameters(), lr=0.1) for net in nets]
        with AsyncLocalSGD(nets, optimizers, outer="sgd", outer_lr=1.0, local_steps=1, total_steps=1) as training:
            for number, net in enumerate(nets):
                for parameter in net.parameters():
                    parameter.grad = torch.full_like(parameter, math.nan if number == bad else 1.0)
            for optimizer in optimizers:
                optimizer.step()
            return training.async_worker.step_number, training.finished

    assert workers(1, local_sgd_main.build).run(train) == [(1, True)]


def test_a_gradient_counts_in_the_mean_of_its_own_optimizer_alone(workers: Start) -> None:
    """Two workers behind a barrier: each step is by the mean of both gradients of one optimizer."""
    nets = models()
    optimizers = by_shape(nets)
    for step in range(STEPS):
        gradients = []
        for worker in (0, 1):
            for optimizer in optimizers:
                optimizer.zero_grad()
            nets[1](nets[0](noise(worker, step, 3))).sub(1.0).square().mean().backward()
            gradients.append([parameter.grad for net in nets for parameter in net.parameters()])
        parameters = [parameter for net in nets for parameter in net.parameters()]
        for parameter, first, second in zip(parameters, *gradients, strict=True):
            assert first is not None and second is not None
            parameter.grad = first.lerp(second, 0.5)
        for optimizer in optimizers:
            optimizer.step()
    team = workers(2, gradient_main.build)
    for ended in team.run(lambda worker: trained(divided, by_shape, None, worker, barrier=True)):
        assert torch.equal(ended, flat(nets))


def test_workers_of_unequal_turns_end_together(workers: Start) -> None:
    """A step may be of one worker's generator and of the other's discriminator, each a part of a step then."""

    def train(worker: int) -> Tensor:
        nets = models()
        optimizers = by_model(nets)
        with HybridAsync(nets, optimizers, total_steps=STEPS) as training:
            step = worker
            while not training.finished:
                adversarial(nets, optimizers, worker, step)
                step += 1
            assert STEPS <= training.progress < STEPS + 1
        return flat(nets)

    one, other = workers(2, gradient_main.build).run(train)
    assert torch.equal(one, other) and not torch.allclose(one, flat(models()))


@pytest.mark.parametrize(("several", "expected"), [(True, [0, 0, 1, 0]), (False, [0, 1, 0, 0])])
def test_one_turn_of_all_optimizers_after_the_end_is_not_worth_a_word(
    workers: Start, capsys: pytest.CaptureFixture[str], several: bool, expected: list[int]
) -> None:
    """The run may end between the steps of a turn, which one optimizer has not."""

    def train(worker: int) -> list[int]:
        nets = models()
        optimizers = by_shape(nets) if several else [SGD([each for net in nets for each in net.parameters()], lr=0.1)]
        with HybridAsync(nets, optimizers, total_steps=1) as training:
            said = []
            for step in range(4):
                divided(nets, optimizers, 0, step)
                said.append(capsys.readouterr().err.count("the run has finished: steps change nothing"))
            assert training.finished
        return said

    assert workers(1, gradient_main.build).run(train) == [expected]


def test_a_state_of_one_optimizer_is_refused(workers: Start, capsys: pytest.CaptureFixture[str]) -> None:
    def save(worker: int) -> dict[str, Any]:
        nets = models()
        with HybridAsync(nn.ModuleList(nets), Adam(nn.ModuleList(nets).parameters())) as training:
            return copy.deepcopy(training.state_dict())

    def load(worker: int, several: bool, state: dict[str, Any]) -> None:
        nets = models()
        training = HybridAsync(nets, by_model(nets) if several else SGD(nn.ModuleList(nets).parameters(), lr=0.1))
        training.load_state_dict(state)
        with pytest.raises(SystemExit), training:
            pass

    def save_two(worker: int) -> dict[str, Any]:
        with HybridAsync(nets := models(), by_model(nets)) as training:
            return copy.deepcopy(training.state_dict())

    for saved, several in ((save, True), (save_two, False)):
        (state,) = workers(1, gradient_main.build).run(saved)
        workers(1, gradient_main.build).run(lambda worker, s=several, t=state: load(worker, s, t))  # type: ignore[misc]
        assert f"the checkpoint's state is of {1 if several else 2} optimizers, this run has" in capsys.readouterr().err


def test_a_saved_state_goes_on_with_both_optimizers(workers: Start) -> None:
    def train(steps: range, state: Any) -> tuple[Tensor, Any]:
        nets = models()
        optimizers = by_shape(nets)
        own: list[Any] = [*optimizers, *functions(optimizers)]
        for each, its in zip(own, [] if state is None else state[1], strict=state is not None):
            each.load_state_dict(its)
        training = HybridAsync(nets, optimizers, scheduler=own[2:], total_steps=STEPS)
        training.load_state_dict({} if state is None else state[0])
        with training:
            for step in steps:
                divided(nets, optimizers, 0, step)
                for scheduler in own[2:]:
                    scheduler.step()
            saved = copy.deepcopy((training.state_dict(), [each.state_dict() for each in own]))
        return flat(nets), saved

    build = gradient_main.build
    ((whole, _),) = workers(1, build).run(lambda worker: train(range(STEPS), None))
    ((_, state),) = workers(1, build).run(lambda worker: train(range(2), None))
    ((resumed, _),) = workers(1, build).run(lambda worker: train(range(2, STEPS), state))
    assert torch.equal(whole, resumed)


@pytest.mark.parametrize(("given", "updates"), [({}, 3), ({"updates_per_step": 1}, 1)])
def test_a_round_of_several_optimizers_has_the_updates_that_the_options_say(
    given: dict[str, Any], updates: int
) -> None:
    """Another server goes on amid it."""
    nets = models()
    layout = Layout.of(list(nn.ModuleList(nets).named_parameters()))
    spec = HybridAsync(nets, by_model(nets), **given).describe(3)
    made = [gradient_main.build(spec, layout, torch.zeros(layout.size))[0] for _ in range(2)]
    rule, other = (cast(SeveralOptimizers, each) for each in made)
    steps = []
    for number in range(updates):
        other.load_state_dict(copy.deepcopy(rule.state_dict()))
        assert (other.count, other.moves_parameters()) == (number, number == updates - 1)
        steps.append(rule.apply(torch.zeros(layout.size), Update(number, 0, 0, 1.0, torch.ones(layout.size))))
    assert steps == [False] * (updates - 1) + [True]
    for limit in (2, 9):
        rule.limit_round(limit)
        assert rule.updates_per_step == (min(limit, updates) if given else limit), "a number that is given is the most"


def test_the_log_has_the_other_optimizers_tensors_as_missing(workers: Start, tmp_path: Path) -> None:
    workers(1, gradient_main.build).run(lambda worker: trained(divided, by_model, None, worker))
    events = [json.loads(line) for line in (tmp_path / "run-0" / "events.jsonl").open()]
    assert [event["missing"] for event in events] == ["f0", "f"] * STEPS


WRONG: dict[str, tuple[Callable[[list[nn.Module]], Any], dict[str, Any], str]] = {
    "a parameter in both": (
        lambda nets: [Adam(nets[0].parameters()), SGD([*nets[0].parameters(), *nets[1].parameters()], lr=1.0)],
        {},
        "0.0.weight is in two optimizers",
    ),
    "none": (lambda nets: [], {}, "optimizer is an empty list"),
    "no optimizer": (
        lambda nets: [Adam(nets[0].parameters()), nets[1]],
        {},
        "optimizer is a Sequential: give a torch.optim.Optimizer",
    ),
    "one that the server has not": (
        lambda nets: [Adam(nets[0].parameters()), torch.optim.Rprop(nets[1].parameters())],
        {},
        "the optimizer is Rprop: the server steps with",
    ),
    "too few schedulers": (by_model, {"scheduler": [None]}, "scheduler has 1 for 2 optimizers"),
    "several updates": (by_model, {"updates_per_step": 3}, "with 2 optimizers, give 1"),
    "starts ahead": (by_model, {"look_ahead": 2}, "look_ahead is 2.0: with 2 optimizers, leave it out"),
    "shards": (by_model, {"server_shards": 2}, "server_shards= does not go with 2 optimizers"),
}


@pytest.mark.parametrize(("make", "options", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_go_with_several_optimizers_is_one_line(
    make: Any, options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nets = models()
    with pytest.raises(SystemExit) as end:
        HybridAsync(nets, make(nets), **options)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and said in line
