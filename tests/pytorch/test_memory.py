"""Parameters that cannot be exchanged are one line before a server is started. A block that was left leaves nothing."""

import gc
import os
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync, training
from fairseq_async.pytorch.closure import ComputedLoss
from fairseq_async.pytorch.parameters import (
    check_exchanged,
    check_memory,
    check_optimizers,
    exchanged_parameters,
    l2_norm,
    note_untrained,
)
from fairseq_async.server.programs import gradient_main, local_sgd_main
from fairseq_async.worker import loop
from fairseq_async.worker.replica import TensorReplica
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.thread_workers import ThreadWorkers
from tests.helpers.waiting import wait_until


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    return model


def overlapping() -> nn.Module:
    """By one element."""
    model, flat = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(7)
    model[0].weight.data, model[1].weight.data = flat[:4].view(2, 2), flat[3:].view(2, 2)
    return model


def with_parameter(value: torch.Tensor, trained: bool = True) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_parameter("more", nn.Parameter(value, requires_grad=trained))
    return model


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: nn.LazyLinear(2), "weight is lazy .*: compute one batch"),
        (lambda: nn.Linear(2, 2, device="meta").requires_grad_(False), "weight is on meta .*: call to_empty"),
        (lambda: with_parameter(torch.eye(2).to_sparse(), trained=False), "more is a sparse tensor"),
        (lambda: with_parameter(torch.ones(2, dtype=torch.complex64)), "more is complex"),
        (shared, "1.weight shares its memory with 0.weight"),
        (overlapping, "1.weight shares its memory with 0.weight"),
    ],
)
def test_a_parameter_that_cannot_be_exchanged_is_one_line(make: Callable[[], nn.Module], line: str) -> None:
    with pytest.raises(ConfigurationError, match=line):
        check_memory(make())


def test_parts_of_one_flat_tensor_and_tied_parameters_are_parameters_like_others() -> None:
    model, flat = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(8)
    model[0].weight.data, model[1].weight.data = flat[:4].view(2, 2), flat[4:].view(2, 2)
    check_memory(model)
    model[1].bias = model[0].bias
    model[0].weight.requires_grad_(False)
    model[1].weight.requires_grad_(False).data = model[0].weight.data
    model.register_parameter("more", nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False))
    check_memory(model)  # what is frozen is not exchanged


def test_the_norm_of_gradients_in_half_precision_is_that_in_fp32() -> None:
    """In float16 it would be infinite, and the step left out."""
    large = torch.full((100,), 1e4)
    assert l2_norm([large.half(), large.bfloat16().fill_(0.0)]) == pytest.approx(l2_norm([large])) == pytest.approx(1e5)
    ones = torch.ones(3)
    assert l2_norm([0 * ones, ones.bfloat16()]) == pytest.approx(3**0.5, rel=1e-6), "beside one in fp32, too"


def test_what_is_frozen_in_an_optimizer_is_not_exchanged() -> None:
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    assert [name for name, _ in exchanged_parameters(net, [SGD(net.parameters())], [torch.float32], 1)] == ["weight"]


@pytest.mark.parametrize("restored", [False, True])
def test_the_buffers_of_a_worker_that_brings_a_state_are_not_compared(restored: bool) -> None:
    """Training has changed them. What is frozen is as it was."""
    net = nn.Linear(2, 2)
    net.register_buffer("table", torch.ones(3))
    net.register_buffer("count", torch.ones(1), persistent=False)  # which training may change
    worker: Any = SimpleNamespace(details=SimpleNamespace(buffers="", unsaved={}))
    worker.replica = TensorReplica([("weight", net.weight)])
    note_untrained(worker, net, {id(net.weight)}, restored)
    assert worker.details.untrained and bool(worker.details.buffers) is not restored
    assert not worker.details.unsaved


def test_a_gradient_that_was_left_in_a_frozen_layer_is_none() -> None:
    net = nn.Linear(2, 2)
    net(torch.ones(2)).sum().backward()
    with pytest.raises(ConfigurationError, match="bias has a gradient and is not exchanged"):
        check_exchanged(net, {id(net.weight)}, "remedy")
    net.bias.requires_grad_(False)
    check_exchanged(net, {id(net.weight)}, "remedy")


def test_the_ranks_of_a_worker_may_divide_a_step_among_themselves() -> None:
    class ZeroRedundancyOptimizer(SGD): ...

    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), lr=0.1)
    check_optimizers([optimizer], ranks=2)
    with pytest.raises(ConfigurationError, match="optimizer is a ZeroRedundancyOptimizer, which divides each step"):
        check_optimizers([optimizer], ranks=1)


def test_a_process_that_was_forked_from_a_worker_ends_without_it() -> None:
    for has_left, of_trainer in ((True, False), (False, True)):  # a Trainer ends amid its loop if it stops
        did: list[str] = []
        run: Any = SimpleNamespace(_client=object(), _has_left=has_left, of_trainer=of_trainer, finished=False)
        run.abandon = lambda did=did: did.append("abandons")
        for process, expected in ((os.getpid() + 1, []), (os.getpid(), ["abandons"])):
            AsyncLocalSGD._end_with_process(run, process)
            assert did == expected


LOCAL = AsyncLocalSGD, local_sgd_main.build
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "hybrid": (HybridAsync, gradient_main.build, {"compress": "topk:chunk=2,keep=1"}),
    "overlap": (*LOCAL, {"local_steps": 1, "overlap": True}),
    "fragments": (*LOCAL, {"local_steps": 2, "fragments": 2}),
}


def left(net: nn.Module, optimizer: SGD) -> dict[str, Any]:
    """What a block could leave in this process."""
    gc.collect()
    hooks = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, _global_optimizer_pre_hooks]
    hooks += [each._post_accumulate_grad_hooks or {} for each in net.parameters()]
    files = [os.readlink(f"/proc/self/fd/{each.name}") for each in os.scandir("/proc/self/fd") if os.path.islink(each)]
    return {
        "hooks": [len(each) for each in hooks],
        "threads": [
            each.name for each in threading.enumerate() if re.search("stay_alive|exchange|residual", each.name)
        ],
        "memory": sum("/dev/shm" in each for each in files),
        "files": len(files),
    }


def has_no_more(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """What the block before had may have been on its way out at that time."""
    same = now["hooks"] == before["hooks"] and set(now["threads"]) <= set(before["threads"])  # of tests before this one
    return same and all(now[key] <= before[key] for key in ("memory", "files"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_was_left_leaves_no_hook_thread_file_or_memory(
    workers: Callable[..., ThreadWorkers], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("fairseq_async.worker.connection.lasting_connection._PAUSE", 0.01)
    front_end, build, options = KINDS[kind]
    run = workers(1, build)

    def work(worker: int) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = SGD(net.parameters(), lr=0.1)
        earlier, runs = left(net, optimizer)["threads"], weakref.WeakSet[Any]()
        for attempt in range(3):  # the first one begins the run, whose server then has its files
            before = left(net, optimizer) | {"threads": earlier}
            try:
                with front_end(net, optimizer, **options) as run:
                    runs.add(run)
                    del run
                    for _ in range(3):
                        optimizer.zero_grad()
                        net(torch.ones(2)).sum().backward()
                        optimizer.step()
                    if attempt < 2:
                        raise (KeyError, SystemExit(3))[attempt]
            except (KeyError, SystemExit):
                pass
            if attempt:
                wait_until(lambda before=before: has_no_more(left(net, optimizer), before) and not runs)  # type: ignore[misc]

    run.run(work)


def test_the_time_of_a_step_is_without_what_comes_between_and_longer_on_a_slowed_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, slept, replica = [1.0], list[float](), TensorReplica([("w", torch.zeros(3))])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=sleep))
    worker: Any = SimpleNamespace(replica=replica, settle=lambda: None, check_unchanged=lambda: None)
    of_worker = loop.WorkerLoop(worker, WorkerContext(slowdown=3.0))
    of_worker.begin_step()
    clock[0] = 5.0
    assert of_worker.slowed_down() == 12.0 and slept == [8.0]
    of_worker.take_server_parameters(lambda: {"server": {"parameters": torch.ones(3)}})
    clock[0] = 100.0
    of_worker.give_back()
    assert (of_worker.began, of_worker.state) == (100.0, None), "after an evaluation"


@pytest.mark.parametrize(
    ("returned", "loss"), [(0.5, 0.5), (torch.tensor([2.0]), 2.0), (torch.ones(2), None), (None, None), (3, None)]
)
def test_what_a_closure_returns_is_a_loss_if_it_is_one_number(returned: object, loss: float | None) -> None:
    computed = ComputedLoss(lambda: returned, [])
    assert computed.loss == loss and computed() is returned
    step, others = ("the optimizer", abs, "more"), {"named": 1}
    assert computed.in_place(step, others) == ((step[0], computed, "more"), others)
    assert computed.in_place(step[:1], others) == (step[:1], others | {"closure": computed})


@pytest.mark.parametrize(
    ("variable", "runs", "refused"),
    [("RANK", 1, True), ("FAIRSEQ_ASYNC_WORKER", 1, True), ("RANK", 0, False), (None, 1, False)],
)
def test_a_process_of_a_launcher_takes_part_in_one_run(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, runs: int, refused: bool
) -> None:
    monkeypatch.setattr(training, "_runs", [True] * runs)
    for name in ("RANK", "FAIRSEQ_ASYNC_WORKER"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "0")
    with pytest.raises(ConfigurationError, match="takes part in one run") if refused else nullcontext():
        training._note_run()
    assert len(training._runs) == runs + (not refused)
