"""A simulated run against real processes that train the same model on the same data."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from fairseq_async.algorithms.rule import State
from fairseq_async.method.spec import MethodSpec, hybrid_spec
from fairseq_async.options.addresses import free_port
from fairseq_async.options.config import HybridOptions
from fairseq_async.protocol import Layout
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule
from fairseq_async.server.plan import EpochPlan
from fairseq_async.simulation.experiment import read
from fairseq_async.simulation.trial import Trial
from fairseq_async.simulation.workers import SharedModel
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.shards import ShardOrder, shard_sizes
from scripts.faults.thread_server import ThreadServer
from tests.helpers.commands import DEEPSPEED, DEEPSPEED_JOB, Processes, command


class Sines:
    """The task of deepspeed_job.py."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(256, 8)
        self.samples = 256
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def batch(self, indices: Sequence[int]) -> Tensor:
        return self.inputs[list(indices)].to(self.model[0].weight)

    def loss(self, x: Tensor) -> tuple[Tensor, float]:
        return nn.functional.mse_loss(self.model(x), x.sin().sum(1, keepdim=True)), float(len(x))

    def evaluate(self) -> float:
        return float(self.loss(self.batch(range(256)))[0].detach())


@pytest.mark.parametrize(
    "method",
    [{"method": "hybrid_async", "barrier": True}, {"method": "local_sgd", "outer": "diloco", "local_steps": 5}],
    ids=["synchronous", "DiLoCo"],
)
def test_a_simulation_ends_where_two_deepspeed_workers_end(
    processes: Processes, tmp_path: Path, method: dict[str, object]
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1 unless told otherwise
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}},
        "async_training": method | {"total_steps": 30},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    launcher = [command("deepspeed"), "--num_accelerators", 2, "--master_port", free_port()]
    job = [DEEPSPEED_JOB, "--out", tmp_path, "--deepspeed", "--deepspeed_config", tmp_path / "config.json"]
    code, output = processes.run([*launcher, *job], seconds=200, **DEEPSPEED)
    assert code == 0, output
    real = torch.load(tmp_path / "worker-0-0.pt", weights_only=True)
    experiment = {
        "problem": {"type": "here"},
        "steps": 30,
        "batch_size": 8,
        "optimizer": {"type": "adamw", "lr": 0.02, "weight_decay": 0.1},
        "cluster": {"workers": 2},
        "methods": {"it": method},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    given, problem = read(tmp_path / "experiment.yaml"), Sines()
    model = SharedModel(problem, 8, ShardOrder(shard_sizes(256, 2), seed=1), seed=1)
    before = problem.evaluate()
    trial = Trial(given, given.methods[0], given.clusters[""], model, model.flat.clone(), lambda *_: None)
    while trial.advance():
        pass
    simulated = trial.parameters.double()
    expected = torch.cat([tensor.double().flatten() for tensor in real.values()])
    assert torch.linalg.vector_norm(simulated - expected) <= 1e-6 * torch.linalg.vector_norm(expected)
    assert trial.evaluate() < 0.8 * before


class Cosine:
    """Six steps of warm-up, then half a cosine down to a tenth at the 40th step of the server."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.learning_rate = optimizer, 0.0

    def follow(self, steps: int) -> None:
        falling = 0.1 + 0.9 * (1 + math.cos(math.pi * (steps - 6) / 34)) / 2
        self.learning_rate = 0.05 * ((steps + 1) / 6 if steps < 6 else falling)
        self.optimizer.param_groups[0]["lr"] = self.learning_rate

    def state_dict(self) -> State:
        return {}


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[ScheduledRule, EpochPlan]:
    """As the servers of both plugins."""
    optimizer = torch.optim.SGD([parameters], lr=0.05, momentum=0.5)
    schedule = Cosine(optimizer)
    scheduled = ScheduledRule(optimizer, 1, schedule)  # type: ignore[arg-type]  # it meets no epochs
    return scheduled, EpochPlan(scheduled, spec.max_epoch, spec.whole_steps)


class Real:
    """One worker: a model of its own, and the batches of its shard."""

    def __init__(
        self, server: ThreadServer, spec: MethodSpec, worker: int, order: ShardOrder, bf16: bool = False
    ) -> None:
        self.sines, self.order = Sines(), order
        if bf16:
            self.sines.model.bfloat16()
        named = list(self.sines.model.named_parameters())
        self.hybrid = HybridWorker(Client(LastingConnection(server.address, server.token, worker)), named)
        welcome = self.hybrid.join(spec)
        self.hybrid.begin(welcome if welcome.initialised else self.hybrid.bring_parameters(None))

    def step(self) -> float:
        """The learning rate that the server has said."""
        rate = self.hybrid.learning_rate
        indices = self.order.indices(self.hybrid.shard, 8 * self.hybrid.sequence, 8)
        loss, samples = self.sines.loss(self.sines.batch(indices))
        self.sines.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.hybrid.step(int(samples), None)
        return rate


def test_with_one_gradient_a_step_and_four_workers_both_schedules_count_the_servers_steps(tmp_path: Path) -> None:
    """Ten gradients of each worker are 40 steps: the cosine ends at the 40th and not at the 10th, in both."""
    options = HybridOptions(updates_per_step=1, look_ahead=0.0)
    spec, order = hybrid_spec(options, 4, None, {}, 40), ShardOrder(shard_sizes(256, 4), seed=1)
    with ThreadServer(4, tmp_path / "real", build=build) as server:
        workers = [Real(server, spec, worker, order) for worker in range(4)]
        for _ in range(10):
            rates = [worker.step() for worker in workers]
        real = server.service.described.coordinator.server.parameters.clone()
    experiment = {
        "problem": {"type": "here"},
        "steps": 10,
        "batch_size": 8,
        "optimizer": {"type": "sgd", "lr": 0.05, "momentum": 0.5},
        "schedule": {"type": "cosine", "warmup": 6, "minimum": 0.1},
        "cluster": {"workers": 4},
        "methods": {"it": {"method": "hybrid_async", "updates_per_step": 1, "look_ahead": 0.0}},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    given, model = read(tmp_path / "experiment.yaml"), SharedModel(Sines(), 8, order, seed=1)
    trial = Trial(given, given.methods[0], given.clusters[""], model, model.flat.clone(), lambda *_: None)
    while trial.advance():
        pass
    assert trial.server.version == 40 and rates[-1] < 0.3 * 0.05
    assert torch.allclose(trial.parameters, real, rtol=1e-5, atol=1e-6)


def test_a_simulation_in_bf16_ends_where_a_real_worker_in_bf16_ends(tmp_path: Path) -> None:
    """Masters below the precision of bf16 are kept: the server's, of which the worker's model is the rounding."""
    order = ShardOrder([256], seed=1)
    with ThreadServer(1, tmp_path / "real", build=build) as server:
        worker = Real(server, hybrid_spec(HybridOptions(look_ahead=0.0), 1, None, {}, 40), 0, order, bf16=True)
        for _ in range(40):
            worker.step()
        real = server.service.described.coordinator.server.parameters.clone()
    experiment = {
        "problem": {"type": "here"},
        "bf16": True,
        "steps": 40,
        "batch_size": 8,
        "optimizer": {"type": "sgd", "lr": 0.05, "momentum": 0.5},
        "cluster": {"workers": 1},
        "schedule": {"type": "cosine", "warmup": 6, "minimum": 0.1},
        "methods": {"it": {"method": "hybrid_async", "look_ahead": 0.0}},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    given = read(tmp_path / "experiment.yaml")
    model = SharedModel(Sines(), 8, order, seed=1, bf16=given.head.bf16)
    trial = Trial(given, given.methods[0], given.clusters[""], model, model.flat.clone(), lambda *_: None)
    while trial.advance():
        pass
    assert trial.server.version == 40 and torch.allclose(trial.parameters, real, rtol=1e-6, atol=1e-7)
    assert not torch.equal(real, real.bfloat16().float())
