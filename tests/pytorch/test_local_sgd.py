"""``AsyncLocalSGD`` round an ordinary optimizer, against references in float64."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.testing._internal.two_tensor import TwoTensor

from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from fairseq_async.pytorch.copies import Copies
from fairseq_async.server.programs import gradient_main, local_sgd_main
from fairseq_async.worker.async_worker import MOST_LEFT_OUT
from fairseq_async.worker.server_state import fetch_state
from fairseq_async.worker.start.process import check_guard
from tests.helpers.anchored import Anchored
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]
TARGETS = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]])  # one a worker: they pull apart
LR, H, ROUNDS = 0.1, 3, 4
DILOCO: dict[str, Any] = {"outer": "diloco", "outer_lr": 0.5, "outer_momentum": 0.8, "local_steps": H}


class Point(nn.Module):
    """|θ − target|²/2, whose gradient is θ − target."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(3))

    def forward(self, target: Tensor) -> Tensor:
        return (self.theta - target).square().sum() / 2


def diloco(workers: int, rates: Callable[[int], float], rounds: int = ROUNDS) -> Tensor:
    """Algorithm 1 of DiLoCo (arXiv 2311.08105) in float64, with SGD inside and Nesterov's momentum as torch has it."""
    theta, momentum = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for number in range(rounds):
        deltas = []
        for target in TARGETS[:workers].double():
            local = theta.clone()
            for step in range(H):
                local -= rates(number * H + step) * (local - target)
            deltas.append(theta - local)
        mean = torch.stack(deltas).mean(0)
        momentum = 0.8 * momentum + mean
        theta = theta - 0.5 * (0.8 * momentum + mean)
    return theta


@pytest.mark.parametrize("count", [1, 2])
def test_it_is_diloco_with_a_scheduler(workers: Start, count: int) -> None:
    """A lone worker's scheduler may be the user's, who steps it; with several it follows the run."""

    def train(worker: int) -> Tensor:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        given = None if count == 1 else scheduler
        with AsyncLocalSGD(model, optimizer, given, total_steps=H * ROUNDS, **DILOCO) as training:
            while not training.finished:
                optimizer.zero_grad()
                model(TARGETS[worker]).backward()
                optimizer.step()
                if count == 1:
                    scheduler.step()
            assert training.progress == H * ROUNDS
        return model.theta.detach()

    expected = diloco(count, lambda step: LR / (1 + step))
    for ended in workers(count, local_sgd_main.build).run(train):
        torch.testing.assert_close(ended.double(), expected, rtol=1e-5, atol=1e-6)


class Early(Anchored):
    """Makes the copies before the first step, as some constructors do."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        for each in self.param_groups[0]["params"]:
            copies = {"first": each.detach().clone(), "slow": each.detach().clone()}
            self.state[each] = {"step": 0, "sum": torch.zeros_like(each), **copies}


@pytest.mark.parametrize("copying", [Anchored, Early])
def test_copies_of_parameters_in_an_optimizer_move_with_the_parameters(workers: Start, copying: type[SGD]) -> None:
    """An optimizer that steps from such a copy goes on from the server's parameters, as SGD does, also from those that
    a worker takes when it joins."""
    lags: list[Tensor] = []

    def train(worker: int, kind: type[SGD]) -> Tensor:
        model = Point()
        nn.init.constant_(model.theta, 2.0 + worker)
        optimizer = kind(model.parameters(), lr=LR)
        with AsyncLocalSGD(model, optimizer, outer="diloco", outer_lr=0.5, outer_momentum=0.0, local_steps=H):
            for _ in range(H * ROUNDS):
                optimizer.zero_grad()
                model(TARGETS[worker]).backward()
                optimizer.step()
        lags.extend(state["slow"] - model.theta.detach() for state in optimizer.state.values() if "slow" in state)
        return model.theta.detach()

    (expected, _), (ended, _) = (
        workers(2, local_sgd_main.build).run(partial(train, kind=kind)) for kind in (SGD, copying)
    )
    torch.testing.assert_close(ended, expected)
    assert 0 < lags[0].abs().max() < 0.6  # the average is behind by local steps alone


class TwoSets(SGD):
    """Trains between an average and the end of plain steps, as a schedule-free optimizer does."""

    trains = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            end = self.state[each].setdefault("end", each.clone())
            end.sub_(LR * each.grad)
            each.lerp_(end, 0.3)

    def eval(self) -> None:
        self._go(trains=False, to_end=-1 / 9)

    def train(self) -> None:
        self._go(trains=True, to_end=0.1)

    @torch.no_grad()
    def _go(self, trains: bool, to_end: float) -> None:
        if self.trains is not trains:
            self.trains = trains
            for each in self.param_groups[0]["params"]:
                each.lerp_(self.state[each]["end"], to_end).mul_(1 + 1e-7)  # a rounding error, in all values


@pytest.mark.parametrize("trains_within", [False, True])
def test_a_validation_with_other_weights_loses_no_local_step(workers: Start, trains_within: bool) -> None:
    """Of an optimizer that is put back to training within the block, which leaves rounding errors, or behind it."""

    def train(worker: int) -> None:
        model = Point()
        model.theta.data = torch.tensor([2.1, -0.7, 3.3])
        optimizer = TwoSets(model.parameters(), lr=LR)
        with AsyncLocalSGD(model, optimizer, outer="sgd", local_steps=H) as training:
            for _ in range(H + 2):
                optimizer.zero_grad()
                model(TARGETS[0]).backward()
                optimizer.step()
            own, end = model.theta.detach().clone(), optimizer.state[model.theta]["end"].clone()
            with training.server_parameters():
                servers = model.theta.detach().clone()
                optimizer.eval()
                validated = model.theta.detach().clone()
                if trains_within:
                    optimizer.train()
                    assert not torch.equal(model.theta, servers)
            optimizer.train()
            assert (own - servers).abs().min() > 0.01 and (validated - servers).abs().min() > 0.01
            torch.testing.assert_close(model.theta.detach(), own, rtol=1e-6, atol=0.0)
            torch.testing.assert_close(optimizer.state[model.theta]["end"], end, rtol=1e-6, atol=0.0)

    workers(1, local_sgd_main.build).run(train)


class Momentum(SGD):
    """Keeps an average of the gradients, a tenth of the first at first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            moment = self.state[each].setdefault("moment", torch.zeros_like(each)).lerp_(each.grad, 0.1)
            each.sub_(LR * moment)


@pytest.mark.parametrize("kind", [partial(SGD, momentum=0.9), Momentum])
@pytest.mark.parametrize("curvature", [1.0, 10.0])
def test_a_moment_is_no_copy_where_the_gradient_is_that_of_a_square(kind: Callable[..., SGD], curvature: float) -> None:
    """A gradient is the parameters then, or its tenth is."""
    parameter = nn.Parameter(TARGETS[0].clone())
    optimizer = kind([parameter], lr=0.01)
    copies = Copies([optimizer], 1, torch.device("cpu"))
    (curvature * parameter.square().sum() / 2).backward()
    optimizer.step()
    copies.note()
    assert optimizer.state[parameter] and not list(copies.pairs())


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_loop_that_ends_by_its_own_count_sends_the_rest_of_its_round(workers: Start, evaluates: bool) -> None:
    """One step of two, at a rate of 1, without momentum: the server adds up what the workers have moved; also where the
    model has the server's parameters as the block ends."""

    def train(worker: int) -> Tensor:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        with AsyncLocalSGD(model, optimizer, outer="sgd", outer_lr=1.0, local_steps=2) as training:
            for _ in range(3):
                optimizer.zero_grad()
                model(TARGETS[worker]).backward()
                optimizer.step()
            if evaluates:
                training.take_server_parameters()
        return model.theta.detach()

    (ended,) = workers(1, local_sgd_main.build).run(train)
    torch.testing.assert_close(ended, TARGETS[0] * (1 - (1 - LR) ** 3))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_change_by_hand_after_the_last_step_is_sent_also_while_that_ones_answer_is_on_its_way(
    workers: Start, overlap: bool
) -> None:
    def train(worker: int) -> Tensor:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        with AsyncLocalSGD(model, optimizer, outer="sgd", outer_lr=1.0, local_steps=1, overlap=overlap):
            model(TARGETS[0]).backward()
            optimizer.step()
            with torch.no_grad():
                model.theta += 5.0
        return model.theta.detach()

    (ended,) = workers(1, local_sgd_main.build).run(train)
    torch.testing.assert_close(ended, LR * TARGETS[0] + 5.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_with_nan_is_no_local_step_also_where_steps_go_on_while_an_answer_is_on_its_way(
    workers: Start, overlap: bool
) -> None:
    def train(worker: int) -> Tensor:
        model = Point()
        optimizer = AdamW(model.parameters(), lr=LR)
        options = {"outer": "sgd", "outer_lr": 1.0, "local_steps": 2, "total_steps": 6, "overlap": overlap}
        with AsyncLocalSGD(model, optimizer, **options) as training:
            step = 0
            while not training.finished and step < 100:
                optimizer.zero_grad()
                (model(TARGETS[0]) * (float("nan") if step in (0, 1, 4, 5) else 1.0)).backward()
                optimizer.step()
                step += 1
            steps = optimizer.state[model.theta]["step"]
            assert float(steps) == step - 4 and training.progress >= 6 and (step == 10 or overlap)
        return model.theta.detach()

    (ended,) = workers(1, local_sgd_main.build).run(train)
    assert ended.isfinite().all()


def test_worker_0_evaluates_the_servers_parameters_and_goes_on_with_its_own(workers: Start, tmp_path: Path) -> None:
    def train(worker: int) -> tuple[Tensor, Tensor, Tensor]:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        run_dir = str(tmp_path / "own")
        with AsyncLocalSGD(model, optimizer, outer="sgd", outer_lr=1.0, local_steps=2, run_dir=run_dir) as training:
            for _ in range(3):
                optimizer.zero_grad()
                model(TARGETS[0]).backward()
                optimizer.step()
            own, began = model.theta.detach().clone(), training.loop.began
            with training.server_parameters():
                servers = model.theta.detach().clone()
                state = training.state_dict()
                assert torch.equal(servers, state["server"]["parameters"]) and training.state_dict() is state
                training.take_server_parameters()  # as a Trainer that evaluates and then saves
                assert torch.equal(servers, model.theta.detach())
            assert torch.equal(model.theta.detach(), own) and training.loop.began > began, "it is no part of a step"
            training.pull()
            assert training.state_dict()["server"]["version"] == state["server"]["version"] + 1, "a checkpoint is new"
            return own, servers, model.theta.detach().clone()

    ((own, servers, pulled),) = workers(1, local_sgd_main.build).run(train)
    torch.testing.assert_close(servers, TARGETS[0] * (1 - (1 - LR) ** 2))  # as of the last exchange
    assert torch.equal(pulled, own)  # the third step was sent first
    assert list((tmp_path / "own").iterdir()) == []


@pytest.mark.parametrize("raises", [False, True])
def test_what_is_changed_while_the_model_has_the_servers_parameters_stays(
    workers: Start, tmp_path: Path, raises: bool
) -> None:
    def train(worker: int) -> Tensor:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        with AsyncLocalSGD(model, optimizer, local_steps=2, run_dir=str(tmp_path / "own")) as training:
            model(TARGETS[0]).backward()
            optimizer.step()
            with suppress(ValueError), training.server_parameters():
                model.theta.data.fill_(7.0)
                if raises:
                    raise ValueError
            return model.theta.detach().clone()

    (after,) = workers(1, local_sgd_main.build).run(train)
    assert torch.equal(after, torch.full_like(after, 7.0))


def test_a_loop_of_nan_alone_ends_with_one_line(
    workers: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(worker: int) -> None:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        with AsyncLocalSGD(model, optimizer, local_steps=2, run_dir=str(tmp_path / "own")):
            for _ in range(MOST_LEFT_OUT - 1):
                (model(TARGETS[0]) * float("nan")).backward()
                optimizer.step()
            (model(TARGETS[0]) * float("nan")).backward()
            with pytest.raises(SystemExit, match="2"):
                optimizer.step()

    workers(1, local_sgd_main.build).run(train)
    assert (
        f"the last {MOST_LEFT_OUT} local steps of worker 0 had NaN or Inf and were left out" in capfd.readouterr().err
    )


def test_a_loop_that_goes_on_after_it_has_left_is_one_line_of_error(
    workers: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(worker: int) -> None:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        with AsyncLocalSGD(model, optimizer, local_steps=2, run_dir=str(tmp_path / "own")) as training:
            training.leave()
            left = model.theta.detach().clone()
            model(TARGETS[0]).backward()
            with pytest.raises(SystemExit, match="2"):
                optimizer.step()
            assert torch.equal(model.theta.detach(), left)
        optimizer.step()  # after the block the model is the script's own

    workers(1, local_sgd_main.build).run(train)
    assert "error: leave() has ended this worker's part of the run" in capfd.readouterr().err


@pytest.mark.parametrize("options", [{"outer": "mla"}, {"outer": "sgd", "compress": "pull=int8"}])
def test_what_is_pulled_in_a_round_is_the_servers_also_where_work_starts_elsewhere(
    workers: Start, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Ahead of the parameters, or from compressed ones."""

    def train(worker: int) -> tuple[Tensor, Tensor]:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        with AsyncLocalSGD(model, optimizer, local_steps=2, run_dir=str(tmp_path / "own"), **options) as training:
            for _ in range(3):
                optimizer.zero_grad()
                model(TARGETS[0]).backward()
                optimizer.step()
            training.pull()
            pulled = model.theta.detach().clone()
            with training.server_parameters():
                return pulled, model.theta.detach().clone()

    ((pulled, servers),) = workers(1, local_sgd_main.build).run(train)
    assert pulled.any() and torch.equal(pulled, servers)


@pytest.mark.parametrize("ends", [AsyncLocalSGD.pull, AsyncLocalSGD.leave])
def test_local_steps_before_an_evaluation_are_sent_after_it(
    workers: Start, tmp_path: Path, ends: Callable[[AsyncLocalSGD], None]
) -> None:
    """Amid the evaluation, as a Trainer does at its end. The server takes the only worker's steps as they are."""

    def train(worker: int) -> tuple[Tensor, Tensor]:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        options: dict[str, Any] = {"outer": "sgd", "outer_lr": 1.0, "local_steps": 5, "run_dir": str(tmp_path / "own")}
        with AsyncLocalSGD(model, optimizer, **options) as training:
            for _ in range(3):
                optimizer.zero_grad()
                model(TARGETS[0]).backward()
                optimizer.step()
            own = model.theta.detach().clone()
            training.take_server_parameters()
            assert not model.theta.any()
            ends(training)
            return own, model.theta.detach().clone()

    ((own, sent),) = workers(1, local_sgd_main.build).run(train)
    torch.testing.assert_close(sent, own)


def test_a_step_that_a_scaler_lets_a_fused_optimizer_skip_is_no_local_step(workers: Start) -> None:
    """Its gradients are finite: they are those of another tensor's overflow too."""

    def train(worker: int) -> tuple[float, Tensor]:
        model = Point()
        optimizer: Any = SGD(model.parameters(), lr=LR, fused=True)
        with AsyncLocalSGD(model, optimizer, outer="sgd", outer_lr=1.0, local_steps=1) as training:
            for found in (0.0, 1.0, 0.0):
                optimizer.found_inf, optimizer.grad_scale = torch.tensor(found), torch.tensor(1.0)
                optimizer.zero_grad()
                model(TARGETS[0]).backward()
                optimizer.step()
            return training.progress, model.theta.detach().clone()

    ((progress, theta),) = workers(1, local_sgd_main.build).run(train)
    assert progress == 2.0
    torch.testing.assert_close(theta, (1 - (1 - LR) ** 2) * TARGETS[0])


def test_a_block_in_a_generator_that_is_closed_is_left_like_any_other(workers: Start) -> None:
    """Without an error: the local steps of before are in the run, and so in the model."""

    def steps(model: Point) -> Iterator[AsyncLocalSGD]:
        optimizer = SGD(model.parameters(), lr=LR)
        with AsyncLocalSGD(model, optimizer, outer="sgd", outer_lr=0.5, local_steps=5) as training:
            while True:
                optimizer.zero_grad()
                model(TARGETS[0]).backward()
                optimizer.step()
                yield training

    def train(worker: int) -> tuple[bool, Tensor]:
        loop: Any = steps(model := Point())
        training = next(loop)
        loop.close()
        return training._has_left, model.theta.detach()

    ((has_left, theta),) = workers(1, local_sgd_main.build).run(train)
    assert has_left
    torch.testing.assert_close(theta, 0.5 * LR * TARGETS[0])


def test_the_servers_state_is_worker_0s_to_save(workers: Start, tmp_path: Path) -> None:
    def train(worker: int) -> set[str]:
        model = Point()
        options: dict[str, Any] = {"run_dir": str(tmp_path / "own"), "total_steps": 2}
        with AsyncLocalSGD(model, SGD(model.parameters(), lr=LR), **options) as training:
            return set(training.state_dict())

    first, second = workers(2, local_sgd_main.build).run(train)
    assert {"server", "method"} <= first and not second


def test_only_worker_0_is_given_the_servers_parameters_and_another_is_told_what_to_do(tmp_path: Path) -> None:
    said = (
        r"server_parameters\(\) on worker 1: the server gives its state to worker 0 alone: write if worker.worker == 0"
    )
    with pytest.raises(ConfigurationError, match=said):
        fetch_state(MagicMock(worker=1), tmp_path)


def test_a_state_brings_the_outer_momentum_back(workers: Start, tmp_path: Path) -> None:
    def train(rounds: int, state: dict[str, Any] | None) -> tuple[Tensor, dict[str, Any]]:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        training = AsyncLocalSGD(model, optimizer, run_dir=str(tmp_path / "own"), **DILOCO)
        training.load_state_dict(state or {})
        with training:
            assert training._restored is None, "its memory is free"
            for _ in range(rounds * H):
                optimizer.zero_grad()
                model(TARGETS[0]).backward()
                optimizer.step()
            saved = training.state_dict()
        return model.theta.detach(), saved

    build = local_sgd_main.build
    ((_, state),) = workers(1, build).run(lambda worker: train(2, None))
    ((resumed, _),) = workers(1, build).run(lambda worker: train(ROUNDS - 2, state))
    torch.testing.assert_close(resumed.double(), diloco(1, lambda step: LR), rtol=1e-5, atol=1e-6)
    assert list((tmp_path / "own").iterdir()) == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a rule that there is not": ({"outer": "adagrad"}, "outer: Input should be 'diloco'"),
    "an option of another rule": (
        {"outer": "diloco", "delay": 3},
        "AsyncLocalSGD: delay is of no use with outer diloco",
    ),
    "a bad value": ({"local_steps": 0}, "local_steps: Input should be greater than or equal to 1 (it is 0)"),
}


@pytest.mark.parametrize(("options", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_mistake_is_one_line(options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Point()
    with pytest.raises(SystemExit) as end:
        AsyncLocalSGD(model, SGD(model.parameters(), lr=LR), **options)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and said in line


def test_a_model_in_half_precision_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = Point().bfloat16()
    with pytest.raises(SystemExit):
        AsyncLocalSGD(model, SGD(model.parameters(), lr=LR))
    assert "theta is bfloat16: keep parameters in float32" in capsys.readouterr().err


def test_what_is_no_model_or_no_optimizer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = Point()
    optimizer = SGD(model.parameters(), lr=LR)
    wrapped = cast(Any, type("AcceleratedOptimizer", (SGD,), {"__init__": lambda self: None}))()
    shares = cast(Any, type("FabricSGD", (SGD,), {"__init__": lambda self: None}))()  # as Lightning's wrapper does
    shares.__dict__ |= vars(optimizer) | {"optimizer": optimizer}
    for given, said in [
        ((optimizer, model), "model is a SGD: give a torch.nn.Module, or a list of them, and then its optimizer"),
        ((model, model.parameters()), "optimizer is a generator: give a torch.optim.Optimizer"),
        ((model, wrapped), "optimizer is a AcceleratedOptimizer, which wraps another: give that one"),
        ((model, shares), "optimizer is a FabricSGD, which wraps another: give that one, optimizer.optimizer"),
        ((model, LBFGS(model.parameters())), "optimizer is LBFGS, whose step() computes the loss several times"),
    ]:
        with pytest.raises(SystemExit):
            AsyncLocalSGD(*cast(Any, given))
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_an_optimizer_that_steps_for_other_ranks_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Each worker would train its own part of the parameters, by its own batches alone."""
    model = Point()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=LR)
        with pytest.raises(SystemExit, match="2"):
            AsyncLocalSGD(model, optimizer)
    finally:
        distributed.destroy_process_group()
    (line,) = capsys.readouterr().err.splitlines()
    assert "optimizer is a ZeroRedundancyOptimizer, which divides each step" in line


@pytest.mark.parametrize("late", ["of the model", "of no model"])
def test_a_parameter_that_is_added_later_on_is_one_line(
    workers: Start, capsys: pytest.CaptureFixture[str], late: str
) -> None:
    """It is in no exchange: each worker would train its own."""

    def train(worker: int) -> None:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        second, other = model[1].requires_grad_(False), nn.Parameter(torch.ones(1))
        optimizer = SGD(model[0].parameters(), lr=LR)
        with pytest.raises(SystemExit), AsyncLocalSGD(model, optimizer):
            for step in range(4):
                optimizer.zero_grad()
                (other * model(torch.ones(1, 1)).sum()).backward()
                optimizer.step()
                assert step < 2
                if step == 1:
                    added = [other] if late == "of no model" else second.requires_grad_(True).parameters()
                    optimizer.add_param_group({"params": list(added)})

    workers(1, local_sgd_main.build).run(train)
    name = "a parameter of shape (1,)" if late == "of no model" else "1.weight"
    said = capsys.readouterr().err
    assert f"{name} has a gradient and is not exchanged" in said and "to the optimizer, trainable, before the" in said


class Quantised(nn.Linear):
    """As bitsandbytes has it: what it saves has scales beside the codes, in no parameter and no buffer."""

    __module__ = "bitsandbytes.nn.modules"
    scale = 0.5

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}SCB"] = torch.full((2,), self.scale)


class Based(nn.Sequential):
    """A layer behind a frozen base, of which one value is another: that in ``differs``. With "of a trained base" it is
    not frozen."""

    def __init__(self, differs: str, value: float) -> None:
        linear, norm = Quantised(2, 2).requires_grad_(False), nn.BatchNorm1d(2).requires_grad_(False)
        super().__init__(linear, norm, nn.Linear(2, 1))
        differs, _, whole = differs.partition(" of a ")
        for tensor, kept in ((linear.weight, "weight"), (linear.bias, "bias")):
            tensor.fill_(value if differs == kept else 0.5)
        linear.scale = value if differs == "scales" else 0.5
        if differs == "tensor of two":
            two = TwoTensor(torch.ones(2, 2), torch.full((2, 2), value))
            linear.weight = nn.Parameter(two, requires_grad=False)
        for kept, size in (("codes", 4), ("cache", 4), ("count", 1)):
            own = torch.full((size,), value if differs == kept else 0.5)
            self.register_buffer(kept, own, persistent=kept != "cache")
        if differs == "last bits":  # as another CPU may round a cosine
            self.cache = self.get_buffer("cache").mul_(1 + 2 * value * torch.finfo(torch.float32).eps)
        norm.running_mean.fill_(value if differs == "statistics" else 0.5)  # type: ignore[union-attr]
        if whole:
            self.requires_grad_()


@pytest.mark.parametrize(
    ("differs", "refused"),
    [
        ("nothing", ""),
        ("weight", "parameters that are not trained"),
        ("scales", "parameters that are not trained"),
        ("tensor of two", "parameters that are not trained"),
        *[(each, "buffers that the model saves") for each in ("codes", "codes of a trained base")],
        ("cache", "the buffer cache (4,), which the model does not save"),
        *[(each, "") for each in ("statistics", "statistics of a trained base", "count", "last bits")],
    ],
)
def test_a_base_that_differs_between_workers_is_one_line(
    workers: Start, capsys: pytest.CaptureFixture[str], differs: str, refused: str
) -> None:
    """It is not exchanged: the workers would train one layer behind different ones."""

    def train(worker: int) -> bool:
        model = Based(differs, value=float(worker))
        optimizer = SGD([each for each in model.parameters() if each.requires_grad], lr=LR)
        try:
            with AsyncLocalSGD(model, optimizer, total_steps=1, local_steps=1) as run:
                while not run.finished:
                    model[2](torch.ones(1, 2)).sum().backward()
                    optimizer.step()
        except SystemExit:
            return False
        return True

    assert sorted(workers(2, local_sgd_main.build).run(train)) == [not refused, True]
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == bool(refused) and all(f"other values than the others in {refused}" in line for line in errors)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("kind", "build", "options"),
    [(AsyncLocalSGD, local_sgd_main.build, DILOCO), (HybridAsync, gradient_main.build, {"clip_norm": 2.0})],
)
def test_a_closure_computes_the_gradients_of_a_step(
    workers: Start, kind: Any, build: Any, options: dict[str, Any], by_name: bool
) -> None:
    """The model is that of a loop without; the loss is reported, and returned to the loop."""

    def train(worker: int, has_closure: bool) -> tuple[Tensor, list[float]]:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR, momentum=0.9)
        losses, reported = [], list[Any]()

        def compute() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(TARGETS[0])
            loss.backward()
            return loss

        with kind(model, optimizer, total_steps=H * ROUNDS, **options) as training:
            take = training._take_loss
            training._take_loss = lambda: reported.append(take()) or reported[-1]
            while not training.finished:
                if has_closure:
                    loss = optimizer.step(closure=compute) if by_name else optimizer.step(compute)
                else:
                    training.loss = loss = compute()
                    optimizer.step()
                losses.append(float(loss))
        assert losses == list(map(float, reported))
        return model.theta.detach(), losses

    (plain, losses), (ended, returned) = (
        workers(1, build).run(partial(train, has_closure=has_closure))[0] for has_closure in (False, True)
    )
    assert torch.equal(ended, plain) and plain.norm() > 1 and returned == losses


class Sharp(SGD):
    """Computes the gradients elsewhere, as SAM does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        closure()


class Twice(SGD):
    def step(self, closure: Any = None) -> float:  # type: ignore[override]
        return float(closure() + closure())


@pytest.mark.parametrize("kind", [Sharp, Twice])
def test_a_closure_of_which_an_optimizer_wants_other_gradients_is_refused(
    workers: Start, capsys: pytest.CaptureFixture[str], kind: type[SGD]
) -> None:
    def train(worker: int) -> None:
        model = Point()
        optimizer = kind(model.parameters(), lr=LR)
        with pytest.raises(SystemExit), AsyncLocalSGD(model, optimizer):
            optimizer.step(lambda: model(TARGETS[0]))

    workers(1, local_sgd_main.build).run(train)
    assert "optimizer.step(closure) changes parameters before it calls the closure" in capsys.readouterr().err


def test_a_spawned_process_that_imports_an_unguarded_script_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data loader's, for one; multiprocessing has the same sign for its own error."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    check_guard()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit) as end:
        AsyncLocalSGD(model := Point(), SGD(model.parameters(), lr=LR)).__enter__()
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and 'if __name__ == "__main__":' in line
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    for code in (1, 2):  # of the loader's process, for which the process that has spawned it ends
        error.__cause__ = RuntimeError(f"DataLoader worker (pid 7) exited unexpectedly with exit code {code}. Details")
        with pytest.raises(SystemExit, match="2") if code == 2 else nullcontext():
            sys.excepthook(RuntimeError, error, None)
        assert (f"exit code {code}, and says why above" in capsys.readouterr().err) == (code == 2)
