"""Workers of several ranks in ``DistributedDataParallel``: each is one worker with the mean of their gradients."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync, enter_island, islands
from fairseq_async.server.programs import gradient_main, local_sgd_main
from fairseq_async.worker.start import world
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.commands import HELPERS, Processes, command
from tests.helpers.plain_loop import STEPS, backward, flat, net
from tests.helpers.run_files import events
from tests.helpers.thread_workers import ThreadWorkers


def synchronous(ranks: list[int]) -> Tensor:
    """One process with the mean of the gradients of these ranks."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            backward(model, step, rank)
        for each in model.parameters():
            assert each.grad is not None
            each.grad.div_(len(ranks))
        optimizer.step()
        schedule.step()
    return flat(model)


TORCHRUN = [command("torchrun"), "--standalone", "--nproc-per-node"]
UNEQUAL = [command("fairseq-async"), "launch", "--workers", 2, "--ranks-per-worker", "2,1", "--", sys.executable]


@pytest.mark.parametrize(
    ("method", "ranks", "start"),
    [("hybrid", 4, [*TORCHRUN, 4]), ("local", 2, [*TORCHRUN, 2]), ("hybrid", 3, UNEQUAL)],
    ids=["hybrid", "local", "unequal"],
)
def test_islands_train_as_all_their_ranks_together(
    processes: Processes, tmp_path: Path, method: str, ranks: int, start: list[object]
) -> None:
    code, output = processes.run([*start, HELPERS / "island_job.py", method, tmp_path / "out"])
    assert code == 0, output
    found = [torch.load(tmp_path / f"out-{rank}.pt", weights_only=True) for rank in range(ranks)]
    for each in found:
        assert torch.equal(each["model"], found[0]["model"])
        torch.testing.assert_close(each["model"], synchronous(list(range(ranks))), rtol=0, atol=1e-6)
    assert torch.equal(found[0]["servers"], found[1]["servers"]) and not found[0]["seen"].any()
    assert {event["worker"] for event in events(tmp_path / "out.run")} == set(range((ranks + 1) // 2))


def averaged(workers: list[list[int]]) -> Tensor:
    """Rounds of three local steps, of which the mean has the weights of the workers' numbers of ranks; in float64."""
    models = [net().double() for _ in workers]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) for optimizer in optimizers]
    shares = [len(ranks) / sum(map(len, workers)) for ranks in workers]
    for step in range(STEPS):
        for model, optimizer, schedule, ranks in zip(models, optimizers, schedules, workers, strict=True):
            optimizer.zero_grad()
            for rank in ranks:
                backward(model, step, rank)
            for each in model.parameters():
                assert each.grad is not None
                each.grad.div_(len(ranks))
            optimizer.step()
            schedule.step()
        if step % 3 == 2:
            mean = sum(share * flat(model) for share, model in zip(shares, models, strict=True))
            for model in models:
                torch.nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return flat(models[0])


def test_in_local_sgd_a_worker_has_the_weight_of_its_ranks(processes: Processes, tmp_path: Path) -> None:
    """A mean in which a worker of two ranks counts as one of one rank is well beyond the tolerance."""
    code, output = processes.run([*UNEQUAL, HELPERS / "island_job.py", "diloco", tmp_path / "out"])
    assert code == 0, output
    found = [torch.load(tmp_path / f"out-{rank}.pt", weights_only=True) for rank in range(3)]
    expected = averaged([[0, 1], [2]])
    for each in found:
        torch.testing.assert_close(each["model"].double(), expected, rtol=0, atol=1e-6)
    assert {event["worker"]: event["share"] for event in events(tmp_path / "out.run")} == {0: 4 / 3, 1: 2 / 3}


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_world_of_all_ranks_is_refused_and_so_is_a_model_that_waits_for_them(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DistributedDataParallel(net())
    within = nn.Sequential(model)  # as in Fabric's wrapper
    parts = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    made: list[tuple[Callable[[], Any], str]] = [
        (lambda: enter_island(2), "call enter_island before init_process_group"),
        (lambda: enter_island(0), "enter_island(0): give the number of a worker's ranks"),
        (lambda: HybridAsync(model, torch.optim.SGD(model.parameters())), "ranks wait for each other: unwrap it, and"),
        (
            lambda: AsyncLocalSGD(within, torch.optim.SGD(model.parameters())),
            "ranks wait for each other: unwrap it, and",
        ),
        (lambda: AsyncLocalSGD(parts, torch.optim.SGD(parts.parameters())), "the model is in FullyShardedDataParallel"),
    ]
    for make, message in made:
        with pytest.raises(SystemExit) as ended:
            make()
        assert ended.value.code == 2 and message in capfd.readouterr().err
    both = islands.unwrapped(nn.ModuleList([model, net()]))
    assert [name for name, _ in both.named_parameters()][0] == "0.0.weight"  # as in islands of another kind
    monkeypatch.setattr(world, "_entered", [WorkerContext(0, 2, rank=1, island_size=2)])
    for method, options, message in (
        (HybridAsync, {}, "this worker has 2 ranks, and the model is a Sequential: put it into DistributedDataP"),
        (AsyncLocalSGD, {"overlap": True}, "AsyncLocalSGD: overlap= is not supported in a worker of several ranks"),
    ):
        given: nn.Module = model if options else net()
        with pytest.raises(SystemExit) as ended:
            method(given, torch.optim.SGD(given.parameters()), **options)
        assert ended.value.code == 2 and message in capfd.readouterr().err


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_unwrapped_for_the_block_alone_is_one_line(
    workers: Callable[..., ThreadWorkers], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks would wait for each other, and each send the server the mean of all."""
    monkeypatch.setattr(islands, "get_world_size", lambda: 2)

    def train(worker: int) -> None:
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(SystemExit) as ended, HybridAsync(model.module, optimizer):
            backward(model.module, 0)
            optimizer.step()
            backward(model, 1)
        assert ended.value.code == 2

    workers(2, gradient_main.build).run(train)
    assert capfd.readouterr().err.count("unwrap it, and call the unwrapped model") == 2


@pytest.mark.usefixtures("alone")
def test_ranks_that_a_library_has_started_are_no_workers(
    workers: Callable[..., ThreadWorkers], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lightning does for devices=2. Each would start a server, or find that of another."""
    monkeypatch.setattr(islands, "get_world_size", lambda: 2)

    def train(worker: int) -> None:
        model = net()
        with pytest.raises(SystemExit, match="2"), AsyncLocalSGD(model, torch.optim.SGD(model.parameters())):
            pass

    workers(1, local_sgd_main.build).run(train)
    assert "torch.distributed has 2 ranks, and no launcher has made them workers" in capfd.readouterr().err


def waiting(module: nn.Module) -> nn.Module:
    """The module in a ``DistributedDataParallel`` that was not set up."""
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = module
    return wrapped


def test_of_several_models_each_waits_for_the_ranks_of_its_worker_and_no_others() -> None:
    plain, other = nn.Linear(2, 1), nn.Linear(2, 1)
    both = nn.ModuleList([waiting(plain), waiting(other)])
    islands.check_model(both, ranks=2, alone=True)
    assert [*islands.unwrapped(both)] == [plain, other]
    islands.check_model(nn.ModuleList([plain, other]), ranks=1, alone=False)
    with pytest.raises(ConfigurationError, match="this worker has 2 ranks, and the model is a Linear"):
        islands.check_model(nn.ModuleList([waiting(plain), other]), ranks=2, alone=True)
    with pytest.raises(ConfigurationError, match="the model is in DistributedDataParallel"):
        islands.check_model(nn.ModuleList([plain, nn.Sequential(waiting(other))]), ranks=1, alone=False)
