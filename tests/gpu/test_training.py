"""Training on a real GPU: as on the CPU, and by NCCL where there are two GPUs."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from fairseq_async.algorithms import adasum
from fairseq_async.collective import DistributedAdasum
from fairseq_async.options.addresses import free_port
from fairseq_async.pytorch import HybridAsync
from fairseq_async.server.programs import gradient_main
from tests.helpers.commands import MODEL, Processes, command
from tests.helpers.fairseq_jobs import ADAM
from tests.helpers.run_files import events, load
from tests.helpers.thread_workers import ThreadWorkers

STEPS, DEVICE = 6, "cuda"


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    device = next(model.parameters()).device
    return nn.functional.mse_loss(model(inputs.to(device)).float(), inputs.sum(1, keepdim=True).sin().to(device))


def train(model: nn.Module, optimizer: SGD, dtype: torch.dtype | None) -> None:
    kind = next(model.parameters()).device.type
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(kind, dtype, enabled=dtype is not None):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_a_hybrid_worker_on_a_gpu_trains_as_a_plain_loop_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    model = model_of().to(DEVICE)
    plain = copy.deepcopy(model)
    train(plain, SGD(plain.parameters(), lr=0.05), dtype)

    def work(worker: int) -> None:
        optimizer = SGD(model.parameters(), lr=0.05)
        options = {"updates_per_step": 1, "look_ahead": "off", "total_steps": STEPS, "run_dir": str(tmp_path)}
        with HybridAsync(model, optimizer, **options):
            train(model, optimizer, dtype)

    ThreadWorkers(monkeypatch, tmp_path, 1, gradient_main.build).run(work)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def _adasum_rank(rank: int, port: int, backend: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=2)
    inputs = [torch.randn(1000, generator=torch.Generator().manual_seed(each)) for each in range(2)]
    combined = [inputs[rank].cuda()]
    DistributedAdasum()(combined)
    torch.testing.assert_close(combined[0].cpu(), adasum(inputs), rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank, and there are not two")
def test_adasum_by_nccl_is_the_tree() -> None:
    torch.multiprocessing.spawn(_adasum_rank, (free_port(), "nccl"), nprocs=2)


def test_adasum_of_ranks_that_share_a_gpu_is_the_tree() -> None:
    torch.multiprocessing.spawn(_adasum_rank, (free_port(), "gloo"), nprocs=2)


@pytest.mark.parametrize("method", ["hybrid_async", "hybrid_async --server-device cuda", "adasum", "adascale"])
def test_two_workers_of_fairseq_share_a_gpu(processes: Processes, data: Path, tmp_path: Path, method: str) -> None:
    start = [command("fairseq-async"), "launch", "--workers", 2, "--", "fairseq-train", data, *MODEL, *ADAM]
    flags = ["--save-dir", tmp_path, "--max-update", 8, "--fp16", "--optimizer", *method.split()]
    code, output = processes.run([*start, *flags])
    assert code == 0, output[-3000:]
    trained = load(tmp_path / "checkpoint_last.pt")
    assert trained["optimizer_history"][-1]["num_updates"] >= 8
    if "hybrid_async" in method:
        assert {event["worker"] for event in events(tmp_path)} == {0, 1}
    else:
        assert "(rank 1)" in (tmp_path / "logs" / "worker-1.log").read_text()
