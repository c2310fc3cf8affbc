"""A simulated run against real processes that train the same model on the same data."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from fairseq_async.simulation.experiment import read
from fairseq_async.simulation.trial import Trial
from fairseq_async.simulation.workers import SharedModel
from fairseq_async.worker.shards import ShardOrder, shard_sizes
from tests.helpers.commands import DEEPSPEED, DEEPSPEED_JOB, Processes, command, free_port


class Sines:
    """The task of deepspeed_job.py."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(256, 8)
        self.samples = 256
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def batch(self, indices: Sequence[int]) -> Tensor:
        return self.inputs[list(indices)]

    def loss(self, x: Tensor) -> tuple[Tensor, float]:
        return nn.functional.mse_loss(self.model(x), x.sin().sum(1, keepdim=True)), float(len(x))

    def evaluate(self) -> float:
        return float(self.loss(self.inputs)[0].detach())


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
