"""What the engines count and exchange, of DeepSpeed's engine only what that needs."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD

from fairseq_async.deepspeed_plugin.engine import AsyncEngine, HybridEngine, LocalEngine
from fairseq_async.deepspeed_plugin.tensors import replica_of
from fairseq_async.errors import ConfigurationError


class Worker:
    """Of a worker that has joined: what it is told."""

    joined, finished = True, False

    def __init__(self) -> None:
        self.first_batch: str | None = None
        self.seconds: list[float] = []

    def step(self, seconds: float, loss: object) -> bool:
        self.seconds.append(seconds)
        return False


class Engine(LocalEngine):
    """DeepSpeed's part of it does nothing, but counts a step with every second micro-batch."""

    def __init__(self) -> None:
        self.async_worker = cast(Any, Worker())
        self.training, self.global_steps, self._step_ended, self._loss = True, 0, 0.0, None
        self.context, self.micro_batches = cast(Any, SimpleNamespace(slowdown=1.0)), 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def fp16_enabled(self) -> bool:
        return True

    def was_step_applied(self) -> bool:
        return True

    def _set_learning_rates(self) -> None:
        """There are none."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    def step(engine: Engine) -> None:
        engine.micro_batches += 1
        engine.global_steps = engine.micro_batches // 2

    monkeypatch.setattr(DeepSpeedEngine, "forward", lambda engine, *inputs: None)
    monkeypatch.setattr(DeepSpeedEngine, "step", step)
    return Engine()


def test_a_validation_before_training_is_not_the_workers_first_batch(engine: Engine) -> None:
    engine.training = False
    engine.forward(torch.zeros(2))
    engine.training = True
    with torch.no_grad():
        engine.forward(torch.zeros(2))
    assert engine.async_worker.first_batch is None
    engine.forward(torch.ones(2))
    assert engine.async_worker.first_batch is not None


def test_the_time_of_a_step_is_that_of_all_its_micro_batches(engine: Engine) -> None:
    for _ in range(2):
        engine.forward(torch.ones(2))
        time.sleep(0.05)
        engine.step()
    (seconds,) = cast(Any, engine.async_worker).seconds
    assert seconds >= 0.1


def with_optimizer(model: nn.Module, **optimizer: Any) -> Any:
    """An engine without ZeRO 3."""
    whole = SimpleNamespace(module=model, zero_optimization_partition_weights=lambda: False)
    return SimpleNamespace(**vars(whole), optimizer=SimpleNamespace(**optimizer))


def test_what_zero_does_not_step_is_not_exchanged() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for each in model[1].parameters():  # DeepSpeed has a master of what the optimizer steps
        address = SimpleNamespace(start=0)
        each._hp_mapping = SimpleNamespace(lp_fragment_address=address, hp_fragment=each.detach().clone().view(-1))
    engine = with_optimizer(model, bit16_groups=[list(model[1].parameters())])
    assert [segment.name for segment in replica_of(engine, 0).layout.segments] == ["1.weight", "1.bias"]


def test_an_optimizer_of_another_model_is_one_line() -> None:
    model = nn.Linear(2, 1)
    engine = with_optimizer(model, **vars(SGD([Parameter(torch.zeros(1))])))
    with pytest.raises(ConfigurationError, match="1 parameters that are not the model's"):
        replica_of(engine, 0)
    engine = with_optimizer(model.requires_grad_(False), **vars(SGD(model.parameters())))
    with pytest.raises(ConfigurationError, match="no parameter of the model that is trained"):
        replica_of(engine, 0)


@pytest.mark.parametrize("look_ahead", [0.0, 2.0])
def test_a_checkpoint_of_a_worker_that_is_ahead_is_of_the_servers_own_parameters(
    monkeypatch: pytest.MonkeyPatch, look_ahead: float
) -> None:
    done: list[str] = []
    engine = HybridEngine.__new__(HybridEngine)
    nn.Module.__init__(engine)
    engine.async_worker = cast(Any, SimpleNamespace(look_ahead=look_ahead, catch_up=lambda: done.append("pulls")))
    monkeypatch.setattr(AsyncEngine, "save_checkpoint", lambda *arguments: done.append(f"saves {arguments[1:]}"))
    engine.save_checkpoint("directory", "tag")
    assert done == ["pulls"] * bool(look_ahead) + ["saves ('directory', 'tag')"]
