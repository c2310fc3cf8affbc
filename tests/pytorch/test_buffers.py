"""Batch normalisation in local SGD: whose its statistics are, against the workers' own values."""

import copy
import json
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fairseq_async.algorithms import NesterovMomentum, StalenessPolicy, Update, WorkerBuffers
from fairseq_async.options.config import LocalSGDOptions
from fairseq_async.protocol import Status
from fairseq_async.pytorch import AsyncLocalSGD
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.worker.buffers import with_buffers
from fairseq_async.worker.loop import WorkerLoop
from fairseq_async.worker.replica import TensorReplica
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]
H, ROUNDS = 2, 3
DILOCO: dict[str, Any] = {"outer": "diloco", "outer_lr": 0.7, "outer_momentum": 0.9}
QUORUM: dict[str, Any] = {"outer": "direction_averaging", "quorum": 2, "grace_period": 30.0}
ONE_AT_A_TIME = threading.Lock()
FLOATS, COUNTS = ("0.running_mean", "0.running_var"), ("0.num_batches_tracked",)


def model() -> nn.Module:
    """Its statistics are those of the input, which no parameter changes."""
    with ONE_AT_A_TIME:  # the workers are threads, which have torch's generator in common
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """Workers see inputs of another scale, so that their statistics differ."""
    x = (1 + 4 * worker) * torch.randn(16, 3, generator=torch.Generator().manual_seed(100 * worker + step)) + worker
    return x, x.sum(1, keepdim=True).sign()


def step(net: nn.Module, optimizer: SGD, worker: int, number: int) -> dict[str, Tensor]:
    """One step; returns the buffers as the forward pass has left them, before an exchange."""
    x, y = batch(worker, number)
    optimizer.zero_grad()
    (net(x) - y).square().mean().backward()
    before = copy.deepcopy(dict(net.named_buffers()))
    optimizer.step()
    return before


def rounds(worker: int, **options: Any) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], Tensor]:
    """Returns the worker's buffers before and after each exchange, and its last parameters."""
    net = model()
    optimizer, before, after = SGD(net.parameters(), lr=0.1), [], []
    with AsyncLocalSGD(net, optimizer, local_steps=H, total_steps=H * ROUNDS, **options) as training:
        for number in range(H * ROUNDS):
            left = step(net, optimizer, worker, number)
            if number % H == H - 1:
                before.append(left)
                after.append(copy.deepcopy(dict(net.named_buffers())))
        assert training.finished
    assert all(torch.equal(after[-1][name], buffer) for name, buffer in net.named_buffers())
    return before, after, torch.cat([each.detach().flatten() for each in net.parameters()])


def expected(whose: str, before: list[dict[str, Tensor]], worker: int, name: str) -> Tensor:
    if whose == "average" and name in FLOATS:
        return torch.stack([each[name] for each in before]).double().mean(0).float()
    return before[0 if whose == "worker 0" and name in FLOATS else worker][name]


@pytest.mark.usefixtures("recipe_rules")
@pytest.mark.parametrize("outer", [DILOCO, QUORUM], ids=lambda outer: str(outer["outer"]))
@pytest.mark.parametrize("whose", ["own", "average", "worker 0"])
def test_after_a_round_the_statistics_are_whose_the_option_says(workers: Start, whose: str, outer: Any) -> None:
    results = workers(3, local_sgd_main.build).run(lambda worker: rounds(worker, buffers=whose, **outer))
    for number in range(ROUNDS):
        before = [result[0][number] for result in results]
        assert not torch.equal(before[0][FLOATS[0]], before[1][FLOATS[0]])  # the workers have different statistics
        for worker, (_, after, _) in enumerate(results):
            for name in (*FLOATS, *COUNTS):
                assert torch.equal(after[number][name], expected(whose, before, worker, name))


def test_parameters_norms_and_cosines_are_those_without_an_exchange_of_buffers(workers: Start, tmp_path: Path) -> None:
    """The momentum sees the parameters alone."""
    ended, logged = [], []
    for number, whose in enumerate(("own", "average", "worker 0")):
        results = workers(2, local_sgd_main.build).run(partial(rounds, buffers=whose, **DILOCO))
        ended.append([parameters for *_, parameters in results])
        lines = (tmp_path / f"run-{number}" / "events.jsonl").read_text().splitlines()
        logged.append(
            sorted(
                (each["worker"], each["sequence"], each["norm"], each["cosine"] or 0.0)
                for each in map(json.loads, lines)
                if "norm" in each
            )
        )
    assert len(logged[0]) == 2 * ROUNDS and logged[0] == logged[1] == logged[2]
    assert all(torch.equal(one, other) for others in ended[1:] for one, other in zip(ended[0], others, strict=True))


def learned(worker: int, whose: str) -> float:
    """The error on the data of both workers, with the parameters that they have learned together.

    Worker 1's inputs have the mean 3 in each of three columns, worker 0's 0, and the target is the sum. Batch
    normalisation takes a worker's mean away, so that both learn the mean target, 4.5. The statistics of both give that
    at the mean of the inputs; those of one are about 4.5 off.
    """
    draws = torch.Generator().manual_seed(worker)
    with ONE_AT_A_TIME:
        torch.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))
    optimizer, data = SGD(net.parameters(), lr=0.05), torch.randn(512, 3, generator=draws)
    given = {"outer": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0, "buffers": whose}
    with AsyncLocalSGD(net, optimizer, local_steps=H, total_steps=120, **given):
        for _ in range(120):
            x = 3 * worker + torch.randn(16, 3, generator=draws)
            optimizer.zero_grad()
            (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    net.eval()
    with torch.no_grad():
        return float(sum((net(x) - x.sum(1, keepdim=True)).square().mean() / 2 for x in (data, data + 3)))


@pytest.mark.parametrize(("whose", "least", "most"), [("own", 16.5, 19.0), ("average", 0.04, 0.12)])
def test_the_average_of_statistics_predicts_for_the_data_of_all_workers(
    workers: Start, whose: str, least: float, most: float
) -> None:
    errors = workers(2, local_sgd_main.build).run(partial(learned, whose=whose))
    assert all(least < error < most for error in errors), errors


def test_worker_0_evaluates_with_the_servers_statistics_and_goes_on_with_its_own(
    workers: Start, tmp_path: Path
) -> None:
    """A forward pass in training mode moves the statistics, and is no training that the run does not see."""

    def train(worker: int) -> None:
        net = model()
        given = {"buffers": "average", "local_steps": H, "run_dir": str(tmp_path / "own")}
        with AsyncLocalSGD(net, optimizer := SGD(net.parameters(), lr=0.1), outer="sgd", **given) as training:
            net(batch(0, 7)[0])
            training.pull()
            assert torch.equal(net.get_buffer(FLOATS[0]), torch.zeros(3)), "the server's, which no worker has changed"
            for number in range(H):
                step(net, optimizer, worker, number)
            servers = copy.deepcopy(dict(net.named_buffers()))
            own = step(net, optimizer, worker, H)
            with training.server_parameters():
                assert all(torch.equal(net.get_buffer(name), servers[name]) for name in FLOATS)
                assert torch.equal(training.state_dict()["server"]["parameters"][-6:-3], servers[FLOATS[0]])
            assert all(
                torch.equal(net.get_buffer(name), own[name]) and not own[name].equal(servers[name]) for name in FLOATS
            )

    workers(1, local_sgd_main.build).run(train)


def test_of_the_ranks_that_share_a_slot_one_writes_its_statistics() -> None:
    net, options = nn.BatchNorm1d(2), LocalSGDOptions(buffers="average")
    named = list(net.named_parameters())
    one, other = (with_buffers(TensorReplica(named, first), net, options, first) for first in (True, False))
    slot = torch.full((one.layout.size,), 5.0)
    other.subtract(slot)
    other.read(slot, shared=True)
    assert slot[4:].tolist() == [5.0] * 4, "it has written none"
    one.subtract(slot)
    assert slot[4:].tolist() == [0.0, 0.0, -1.0, -1.0]
    one.read(slot, shared=True)
    assert slot.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    other.read(slot.fill_(5.0))
    assert slot.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], "of its own it reads all"


def test_an_evaluation_that_changes_a_parameter_leaves_the_statistics_the_workers_own() -> None:
    """A forward pass of the evaluation has changed them too."""
    net = model()
    replica = with_buffers(TensorReplica(list(net.named_parameters())), net, LocalSGDOptions(buffers="average"))
    of_worker: Any = SimpleNamespace(replica=replica, settle=lambda: None, check_unchanged=lambda: None)
    loop, own = WorkerLoop(of_worker, WorkerContext()), copy.deepcopy(net.state_dict())
    loop.take_server_parameters(lambda: {"server": {"parameters": torch.full((replica.layout.size,), 7.0)}})
    net.get_buffer(FLOATS[0]).fill_(9.0)
    with torch.no_grad():
        net.get_parameter("1.bias")[1] = 0.25
    loop.give_back(loop.changed())
    own["1.bias"][1] = 0.25
    assert all(torch.equal(value, own[name]) for name, value in net.state_dict().items())


def test_a_state_brings_the_statistics_back_and_a_module_may_have_another_tensor_each_step(workers: Start) -> None:
    class Mean(nn.Module):
        """A mean of its inputs that is another tensor after each step, and a cache that is not saved."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("mean", torch.zeros(3, dtype=torch.bfloat16))
            self.register_buffer("cache", torch.zeros(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.mean, self.cache = (self.mean + x.mean(0)).bfloat16(), torch.zeros(len(x))
            result: Tensor = self.linear(x)
            return result

    def train(state: dict[str, Any] | None) -> tuple[Tensor, dict[str, Any]]:
        net = Mean()
        training = AsyncLocalSGD(net, optimizer := SGD(net.parameters(), lr=0.1), local_steps=1, buffers="worker 0")
        training.load_state_dict(state or {})
        with training:
            began = net.mean.clone()
            step(net, optimizer, 0, 0)
            assert torch.equal(net.mean, began + batch(0, 0)[0].mean(0).bfloat16())
            return net.mean, training.state_dict()

    build = local_sgd_main.build
    ((first, state),) = workers(1, build).run(lambda worker: train(None))
    ((second, _),) = workers(1, build).run(lambda worker: train(state))
    assert torch.equal(second, 2 * first) and first.any()


def test_a_buffer_that_gets_another_shape_is_one_line(workers: Start, capfd: pytest.CaptureFixture[str]) -> None:
    def train(net: nn.Module) -> None:
        owner, _, name = FLOATS[0].rpartition(".")
        with AsyncLocalSGD(net, optimizer := SGD(net.parameters(), lr=0.1), local_steps=1, buffers="average"):
            step(net, optimizer, 0, 0)
            torch.stack([each.sum() for each in net.parameters()]).sum().backward()
            setattr(net.get_submodule(owner), name, torch.zeros(1))  # it would be broadcast
            optimizer.step()

    def ends(worker: int) -> None:
        with pytest.raises(SystemExit, match="2"):
            train(model())

    workers(1, local_sgd_main.build).run(ends)
    assert f"the buffer {FLOATS[0]} has changed its shape, or is gone" in capfd.readouterr().err


def test_without_rounds_the_average_is_that_of_the_last_values_and_no_variance_is_negative() -> None:
    """Two workers' variances fall from 10 to 1, one of them twice. A sum of halved differences would be −3.5."""
    rule = WorkerBuffers(NesterovMomentum(1.0, 0.9, workers=2), parameters=1, workers=2, average=True)
    server = ParameterServer(torch.tensor([0.0, 10.0]), rule, staleness=StalenessPolicy(power=-0.5))
    means = []
    for worker, sequence, value in [(0, 0, 1.0), (1, 0, 1.0), (0, 1, 0.5), (0, 2, 0.25)]:
        receipt = server.push(Update(worker, sequence, base_version=0, weight=1.0, delta=torch.tensor([3.0, -value])))
        assert receipt.norm == 3.0  # of the parameters
        means.append(float(server.parameters[1]))
        state, server.parameters[1] = server.state_dict(), -1.0
        server.load_state_dict(copy.deepcopy(state) | {"parameters": torch.tensor([0.0, means[-1]])})
    assert means == [1.0, 1.0, 0.75, 0.375]
    refused = server.push(Update(1, 1, base_version=0, weight=1.0, delta=torch.tensor([1.0, math.inf])))
    assert refused.status is Status.REFUSED and means[-1] == float(server.parameters[1])


def buffered(buffer: Tensor) -> nn.Module:
    net = model()
    net.register_buffer("ema", buffer)
    return net


WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "no buffers": (lambda: nn.Linear(2, 1), {}, "buffers= is average: the model has no buffers"),
    "lazy": (lambda: nn.Sequential(model(), nn.LazyBatchNorm1d(affine=False)), {}, "the buffer 1.running_mean has no"),
    "meta": (lambda: buffered(torch.zeros(2, device="meta")), {}, "the buffer ema has no values yet"),
    "float64": (
        lambda: buffered(torch.zeros(2, dtype=torch.float64)),
        {},
        "the buffer ema is float64: with buffers=, keep it in float32",
    ),
    "a bad value": (model, {"buffers": "mean"}, "buffers: Input should be 'own', 'average' or 'worker 0'"),
    **{
        name: (model, {name: value}, f"{name}= does not go with buffers= average")
        for name, value in {
            **{"compress": "int8", "overlap": True, "fragments": 2, "fragment_delay": 1, "server_shards": "2"},
            **{"upstream": "127.0.0.1:1,region=1,outer=sgd"},
        }.items()
    },
}


@pytest.mark.parametrize(("make", "options", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_go_is_one_line_before_a_server_is_started(
    make: Callable[[], nn.Module], options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    net = make()
    with pytest.raises(SystemExit) as end:
        AsyncLocalSGD(net, SGD(net.parameters(), lr=0.1), **({"buffers": "average"} | options)).__enter__()
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and said in line
