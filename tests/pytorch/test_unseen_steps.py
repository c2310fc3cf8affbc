"""Training, and changes, that a run does not see end the worker with one line; an ordinary script goes through."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from fairseq_async.pytorch.steps import OtherOptimizers, UnseenTraining
from fairseq_async.server.programs import gradient_main, local_sgd_main
from tests.helpers.plain_loop import AS_IT_IS, STEPS, backward, flat, net
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]


def hybrid(model: nn.Module, optimizer: Optimizer, **options: Any) -> HybridAsync:
    return HybridAsync(model, optimizer, total_steps=STEPS, **options)


def local(model: nn.Module, optimizer: Optimizer, **options: Any) -> AsyncLocalSGD:
    return AsyncLocalSGD(model, optimizer, total_steps=STEPS, **AS_IT_IS, **options)


METHODS = {"hybrid": (hybrid, gradient_main.build), "local SGD": (local, local_sgd_main.build)}


class Sharpness(Optimizer):
    """SAM as it is commonly written: an optimizer whose step calls another one's."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class SlowWeights:
    """Lookahead: no optimizer of torch's, and moves the weights after another one's step."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.calls = inner, 0
        self.tensors = [each for group in inner.param_groups for each in group["params"]]
        self.slow = [each.detach().clone() for each in self.tensors]

    def step(self) -> None:
        self.inner.step()
        self.calls += 1
        if self.calls % 4 == 0:
            for fast, slow in zip(self.tensors, self.slow, strict=True):
                fast.data.copy_(slow.lerp_(fast.data, 0.5))


@torch.no_grad()
def by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter -= 0.1 * parameter.grad


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.data - 0.1 * parameter.grad


def later(model: nn.Module, optimizer: Optimizer) -> Callable[[], object]:
    other, calls = SGD(model.parameters(), lr=0.1), count()
    return lambda: (optimizer if next(calls) < 3 else other).step()


def wrapped(model: nn.Module, optimizer: Optimizer) -> Callable[[], object]:
    return Sharpness(optimizer).step


UNSEEN: dict[str, tuple[Callable[..., Callable[[], object]], str]] = {
    "another one after three steps": (later, "SGD steps 0.weight, and is not the optimizer"),
    "a wrapper that the run was not given": (wrapped, "Sharpness steps 0.weight"),
    "by hand": (lambda model, _: lambda: by_hand(model), "0.weight is trained, and no step"),
    "by hand, other data": (lambda model, _: lambda: through_data(model), "0.weight is trained, and no step"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", UNSEEN)
def test_training_that_the_run_does_not_see_is_one_line(
    workers: Start, capfd: pytest.CaptureFixture[str], case: str, method: str
) -> None:
    (make, build), (steps, said) = METHODS[method], UNSEEN[case]

    def train(worker: int) -> int:
        model, taken = net(), 0
        optimizer = SGD(model.parameters(), lr=0.1)
        with pytest.raises(SystemExit), make(model, optimizer):
            step = steps(model, optimizer)
            for taken in range(STEPS):
                model.zero_grad()
                backward(model, taken)
                step()
        return taken

    (taken,) = workers(1, build).run(train)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert said in line and taken < 9


def undivided(model: nn.Module, step: int, worker: int) -> None:
    backward(model, step)


def through_a_module(model: nn.Module, step: int, worker: int) -> None:
    assert isinstance(model, nn.Sequential)
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    model[2](model[0](inputs).tanh()).sum().backward()


def constant(model: nn.Module, step: int, worker: int) -> None:
    model(torch.ones(4, 5)).sum().backward()


def within_vmap(model: nn.Module, step: int, worker: int) -> None:
    """A tensor that nobody can read; then the worker's own data."""
    torch.func.vmap(model)(torch.ones(4, 5))
    backward(model, step, worker)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("compute", "is_said"),
    [(undivided, True), (through_a_module, True), (backward, False), (constant, False), (within_vmap, False)],
)
def test_two_workers_that_begin_with_the_same_batches_are_named(
    workers: Start, capfd: pytest.CaptureFixture[str], method: str, compute: Callable[..., None], is_said: bool
) -> None:
    """Whatever their dropout; data whose rows are all equal shows nothing."""
    make, build = METHODS[method]

    def train(worker: int) -> int:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.01)
        with make(model, optimizer):
            for step in range(6):
                model.zero_grad()
                compute(model, step, worker)
                optimizer.step()
        return sum(len(module._forward_hooks) for module in model.modules())

    left = workers(2, build).run(train)
    said = "warning: workers 0 and 1 began with the same batches: give each its own part" in capfd.readouterr().err
    assert said == is_said and left == [0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_a_step_outside_of_a_block_that_was_forgotten_is_one_line(
    workers: Start, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    """And not a step in the block of another run with the same optimizer."""
    make, build = METHODS[method]

    def train(worker: int) -> bool:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        make(model, optimizer)
        with pytest.raises(SystemExit, match="2"):
            optimizer.step()
        with make(model, optimizer) as training:
            for number in range(STEPS):
                backward(model, number)
                optimizer.step()
            return training.finished

    assert workers(1, build).run(train) == [True]
    assert "error: SGD was given to a run whose with block was not entered, and steps" in capfd.readouterr().err


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("in_turn, count", [(False, 1), (True, 1), (True, 2)])
def test_a_copy_that_is_trained_in_the_models_place_is_named(
    workers: Start, capfd: pytest.CaptureFixture[str], method: str, in_turn: bool, count: int
) -> None:
    """A network that is trained beside it is named where there are several workers, which each have their own."""
    make, build = METHODS[method]

    def train(worker: int) -> None:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with make(model, optimizer):
            other = copy.deepcopy(model)
            others = SGD(other.parameters(), lr=0.1)
            for number in range(STEPS):
                for trained, of_it in ((model, optimizer), (other, others)) if in_turn else ((other, others),):
                    trained.zero_grad()
                    backward(trained, number)
                    of_it.step()

    workers(count, build).run(train)
    said = capfd.readouterr().err
    if count == 1:  # else those of the other worker are in this process, too
        assert said.count("warning: SGD steps parameters of the same shapes as the run's") == (not in_turn)
    assert said.count("warning: SGD steps parameters that are in no exchange") == (2 if count == 2 else 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_loop_too_short_to_be_looked_at_is_found_at_its_end(
    workers: Start, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    make, build = METHODS[method]

    def train(worker: int) -> None:
        model = net()
        with pytest.raises(SystemExit), make(model, SGD(model.parameters(), lr=0.1)):
            backward(model, 0)
            by_hand(model)

    workers(1, build).run(train)
    assert "error: 0.weight " in capfd.readouterr().err


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("raised", [nullcontext(), pytest.raises(KeyError)], ids=["whole", "with an exception"])
def test_a_change_while_the_model_has_the_servers_parameters_is_taken_or_one_line(
    workers: Start, capfd: pytest.CaptureFixture[str], method: str, raised: AbstractContextManager[object]
) -> None:
    """In the middle of a round; weights that are put back are no change. One before an exception stays, as in torch."""
    make, build = METHODS[method]

    def train(worker: int) -> None:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)

        def steps(count: int) -> None:
            for number in range(count):
                model.zero_grad()
                backward(model, number)
                optimizer.step()

        with make(model, optimizer) as training:
            steps(4)
            own, weight = flat(model), model.get_parameter("0.weight")
            with training.server_parameters(), torch.no_grad():
                weight.add_(1.0)
                training.take_server_parameters()  # once more, as for a save after an evaluation
            assert torch.equal(flat(model), own)
            with raised, training.server_parameters(), torch.no_grad():
                servers = weight.clone()
                weight.clamp_(-0.1, 0.1)
                if not isinstance(raised, nullcontext):
                    raise KeyError
            wanted = torch.where(servers.abs() > 0.1, servers.clamp(-0.1, 0.1), own[:40].view(8, 5))
            assert torch.equal(weight, wanted) and torch.equal(flat(model)[40:], own[40:])
            training.pull()
            torch.testing.assert_close(weight.detach(), wanted)  # the server has it

    if method == "local SGD":
        workers(1, build).run(train)
        return
    workers(1, build).run(lambda worker: pytest.raises(SystemExit, train, worker))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert "0.weight is not as this worker took it" in line


WRAPPERS: dict[str, Callable[[Optimizer], tuple[Any, Optimizer]]] = {
    "a wrapper that the run was given": lambda inner: (each := Sharpness(inner), each),
    "one that is no optimizer, round the run's": lambda inner: (SlowWeights(inner), inner),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_local_sgd_takes_what_a_wrapper_does(workers: Start, case: str) -> None:
    def loop(model: nn.Module, step: Callable[[], object]) -> Tensor:
        for number in range(STEPS):
            model.zero_grad()
            backward(model, number)
            step()
        return flat(model)

    def train(worker: int) -> Tensor:
        model = net()
        stepped, given = WRAPPERS[case](SGD(model.parameters(), lr=0.1, momentum=0.9))
        with local(model, given) as training:
            loop(model, stepped.step)
            assert training.progress == STEPS
        return flat(model)

    (ended,) = workers(1, local_sgd_main.build).run(train)
    plain = net()
    torch.testing.assert_close(
        ended, loop(plain, WRAPPERS[case](SGD(plain.parameters(), lr=0.1, momentum=0.9))[0].step)
    )


def too_late(optimizer: Optimizer) -> None:
    """Hooks that the script had registered before, before the step and after it, find the gradients in each step."""
    optimizer.register_step_pre_hook(lambda *of_step: None)


def load_new(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(AdamW(optimizer.param_groups[0]["params"], lr=0.01).state_dict())


def read(optimizer: Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].zero_()


def setting(name: str, value: Any) -> Callable[[Optimizer], object]:
    return lambda optimizer: optimizer.param_groups[0].update({name: value})


OF = 'param_groups[0]["{}"] of the optimizer'
STATE = "the state of the optimizer was loaded or cleared during the run"
CHANGES: dict[str, tuple[Callable[[Optimizer], object], bool, str]] = {  # and whether there is a scheduler
    "a rate beside a scheduler": (setting("lr", 0.0), True, OF.format("lr")),
    "a decay": (setting("weight_decay", 5.0), True, OF.format("weight_decay")),
    "betas": (setting("betas", (0.5, 0.5)), True, OF.format("betas")),
    "a rate": (setting("lr", 0.5), False, OF.format("lr") + " was 0.01 and is 0.5 now"),
    "a hook": (too_late, False, "a hook before optimizer.step() was registered within the block"),
    "parameters": (setting("params", []), True, "param_groups[0] of the optimizer"),
    "moments that are read": (read, False, STATE.replace("loaded or cleared", "read")),
    "moments that are loaded": (load_new, False, STATE),
    **{
        f"moments, by {name}": (of, False, STATE.replace("loaded or cleared", "read"))
        for name, of in {
            "values()": lambda optimizer: list(optimizer.state.values()),
            "items()": lambda optimizer: list(optimizer.state.items()),
            "keys()": lambda optimizer: list(optimizer.state.keys()),
            "iteration": lambda optimizer: list(optimizer.state),
            "get()": lambda optimizer: optimizer.state.get(optimizer.param_groups[0]["params"][0]),
        }.items()
    },
    "a moment that is taken out": (lambda optimizer: optimizer.state.pop(None, None), False, STATE),
    "a moment that is deleted": (lambda optimizer: optimizer.state.__delitem__(None), False, STATE),
    "a moment that is set": (lambda optimizer: optimizer.state.__setitem__(None, {}), False, STATE),
    "moments that are cleared": (lambda optimizer: optimizer.state.clear(), False, STATE),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_the_loop_changes_in_the_optimizer_and_the_server_does_not_take_is_one_line(
    workers: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    """The server would go on with what it has."""
    change, has_schedule, said = CHANGES[case]

    def train(worker: int) -> list[bool]:
        model = net()
        optimizer, seen = AdamW(model.parameters(), lr=0.01), list[bool]()
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda *of_step: seen.append(next(model.parameters()).grad is not None))
        scheduler = CosineAnnealingLR(optimizer, STEPS) if has_schedule else None
        given = {"scheduler": scheduler, "total_steps": STEPS, "run_dir": str(tmp_path / "own")}
        with pytest.raises(SystemExit, match="2"), HybridAsync(model, optimizer, **given):
            for step in range(3):
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                assert step < 2
                if step == 1:
                    change(optimizer)
        optimizer.state.clear()  # after the block it is the script's own
        return seen

    (seen,) = workers(1, gradient_main.build).run(train)
    assert f"error: {said}" in capfd.readouterr().err and len(seen) >= 4 and all(seen)


def test_an_error_of_the_loop_is_not_hidden_where_a_library_moves_the_moments_after_it(workers: Start) -> None:
    """As Lightning's Trainer does before it raises the error again."""

    def train(worker: int) -> None:
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        with pytest.raises(ZeroDivisionError), HybridAsync(model, optimizer):
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                assert not list(optimizer.state.items())
                raise

    workers(1, gradient_main.build).run(train)


@pytest.mark.parametrize("of_trainer", [False, True])
def test_an_optimizer_that_is_saved_without_its_moments_is_named_once(
    workers: Start, capfd: pytest.CaptureFixture[str], of_trainer: bool
) -> None:
    """A checkpoint of the Trainer has the server's state."""

    def train(worker: int) -> None:
        model = net()
        optimizer = Adam(model.parameters(), lr=0.01)
        training = HybridAsync(model, optimizer, updates_per_step=1)
        training.of_trainer = of_trainer
        with training:
            backward(model, 0)
            optimizer.step()
            assert not optimizer.state_dict()["state"]
        assert not optimizer.state_dict()["state"]

    workers(1, gradient_main.build).run(train)
    assert capfd.readouterr().err.count("warning: Adam.state_dict() has no moments") == (not of_trainer)


def test_an_optimizer_may_be_copied_in_the_block_and_its_copy_does_not_step(
    workers: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """Adagrad looks at all its moments when it is copied."""

    def train(worker: int) -> None:
        model = net()
        optimizer = Adagrad(model.parameters(), lr=0.01)
        with pytest.raises(SystemExit, match="2"), HybridAsync(model, optimizer, updates_per_step=1) as training:
            backward(model, 0)
            optimizer.step()
            copied = copy.deepcopy(optimizer)
            assert not copied.state_dict()["state"] and training.progress == 1
            for parameter in copied.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            copied.step()

    workers(1, gradient_main.build).run(train)
    assert STATE.replace("loaded or cleared", "read") in capfd.readouterr().err


def test_a_step_within_a_step_ends_with_the_outer_one() -> None:
    """Another optimizer that a wrapper calls after it is still the wrapper's."""
    parameter = nn.Parameter(torch.zeros(2))
    outer, inner, third = (SGD([parameter], lr=0.1) for _ in range(3))
    hook = OtherOptimizers([outer, inner], [("theta", parameter)], workers=2, of_trainer=False)
    hook(outer, (), {})
    hook(inner, (), {})
    hook.after(inner, (), {})
    hook(third, (), {})
    hook.after(outer, (), {})
    with pytest.raises(SystemExit):
        hook(third, (), {})


def of_two() -> tuple[OtherOptimizers, SGD, SGD]:
    """What watches a run of one worker, with its optimizer and another one of a parameter of the same shape."""
    own, other = (SGD([nn.Parameter(torch.zeros(2))], lr=0.1) for _ in range(2))
    named = [("theta", own.param_groups[0]["params"][0])]
    return OtherOptimizers([own], named, workers=1, of_trainer=False), own, other


def test_two_steps_of_parameters_of_the_same_shapes_in_a_row_are_no_copys_and_three_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As of a discriminator, which may step twice for each step of its generator."""
    hook, own, other = of_two()
    for stepping in (other, other, own, other, other):
        hook(stepping, (), {})
        hook.after(stepping, (), {})
    assert not capsys.readouterr().err
    hook(other, (), {})
    assert "warning: SGD steps parameters of the same shapes as the run's" in capsys.readouterr().err


def test_weights_that_a_script_loads_once_between_its_first_gradients_are_no_training() -> None:
    hook, own, _ = of_two()
    (parameter,) = own.param_groups[0]["params"]
    unseen = UnseenTraining([("theta", parameter)], hook)
    for gradient in range(1, 9):  # it looks at the first, second, fourth and eighth
        with torch.no_grad():
            parameter.add_(gradient in (2, 7))
        with pytest.raises(SystemExit) if gradient == 8 else nullcontext():
            unseen(parameter)
