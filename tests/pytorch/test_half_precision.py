"""``HybridAsync`` round a model in bf16."""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from fairseq_async.pytorch import HybridAsync
from fairseq_async.server.programs import gradient_main
from tests.helpers.plain_loop import STEPS, flat, net
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]


def backward(model: nn.Module, step: int) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    nn.functional.mse_loss(model(inputs.bfloat16()).float(), inputs.sum(1, keepdim=True).sin()).backward()


def test_a_model_in_bf16_is_rounded_from_the_servers_fp32(workers: Start) -> None:
    """Steps of a thousandth of a parameter would be lost in bf16. After a validation the model is as before."""

    def train(worker: int) -> Tensor:
        model = net().bfloat16()
        optimizer = AdamW(model.parameters(), lr=1e-4)
        with HybridAsync(model, optimizer, total_steps=STEPS) as training:
            for step in range(STEPS):
                with training.server_parameters():
                    pass
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
        return flat(model)

    model, masters = net().bfloat16(), net()
    optimizer = AdamW(masters.parameters(), lr=1e-4)
    for own, master in zip(model.parameters(), masters.parameters(), strict=True):
        master.data.copy_(own)
    begun = flat(model)
    for step in range(STEPS):
        model.zero_grad()
        backward(model, step)
        for own, master in zip(model.parameters(), masters.parameters(), strict=True):
            assert own.grad is not None
            master.grad = own.grad.float()
        optimizer.step()
        for own, master in zip(model.parameters(), masters.parameters(), strict=True):
            own.data.copy_(master)
    (ended,) = workers(1, gradient_main.build).run(train)
    assert torch.equal(ended, flat(model)) and not torch.equal(ended, begun)


@pytest.mark.parametrize("found", [None, 0.0, 1.0])
def test_a_step_that_a_scaler_lets_a_fused_optimizer_skip_is_none_of_the_run(found: float | None) -> None:
    """A loop leaves its scheduler's step out then, which is no mistake."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), 8.0)
    optimizer, hook = SGD([weight]), MagicMock()
    optimizer.register_step_pre_hook(hook)
    if found is not None:
        vars(optimizer).update(found_inf=torch.tensor(found), grad_scale=torch.tensor(4.0))
    part = MagicMock(optimizer=optimizer, named=[("weight", weight)])
    training: Any = MagicMock(_before_step=hook, _parts=[part], finished=False, of_trainer=False, _passes=None)
    HybridAsync._prepare_step(training, optimizer)
    took = not found
    assert len(part.before_step.mock_calls) == len(training.async_worker.write_ahead.mock_calls) == took
    norm = (8.0 if found is None else 2.0) * 2**0.5  # without the loss scale
    assert [each.args for each in training._push.mock_calls] == [(pytest.approx(norm),)] * took
    part.take_gradients.assert_called_once_with()
