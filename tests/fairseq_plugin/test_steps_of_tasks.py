"""A task's own ``optimizer_step`` under ``hybrid_async``, whose steps are the server's."""

from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import fairseq_async.fairseq_plugin  # noqa: F401
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.hybrid import HybridAsync, HybridTrainer


def double_gradients(optimizer: HybridAsync) -> None:
    for parameter in optimizer.params:
        parameter.grad = 2 * parameter.grad


def hook(optimizer: HybridAsync) -> None:
    optimizer.optimizer.register_step_pre_hook(lambda *_: double_gradients(optimizer))


@pytest.mark.parametrize(
    ("does", "clip_norm", "error"),
    [
        (lambda optimizer: None, 1.0, ""),
        (lambda optimizer: optimizer.optimizer.step(), 1.0, ""),
        (hook, 0.0, ""),
        (hook, 1.0, "--clip-norm 1: the task's optimizer_step, or a hook before optimizer.step.., changes gradients"),
        (lambda optimizer: optimizer.optimizer.state.clear(), 0.0, "changes the optimizer's state"),
        (double_gradients, 0.0, ""),
        (double_gradients, 1.0, "--clip-norm 1: the task's optimizer_step, or a hook"),
        (lambda optimizer: optimizer.multiply_grads(0.5), 0.0, ""),
        (lambda optimizer: optimizer.step(scale=2.0), 0.0, ""),
        (lambda optimizer: optimizer.step(lambda: 0.0), 0.0, "the task calls optimizer.step.closure."),
        (lambda optimizer: optimizer.clip_grad_norm(0.5), 0.0, "the task calls optimizer.clip_grad_norm beside"),
        (lambda optimizer: optimizer.step(), 0.0, "the task calls optimizer.step.. beside fairseq's trainer"),
        (lambda optimizer: optimizer.set_lr(0.2), 0.0, "the optimizer's param_groups were changed"),
        (lambda optimizer: optimizer.param_groups[0].update(weight_decay=1), 0.0, "param_groups were changed"),
    ],
)
def test_what_a_task_does_before_its_step_is_taken_or_is_one_line(
    does: Callable[[HybridAsync], object], clip_norm: float, error: str
) -> None:
    """A batch of 4 tokens has that weight, whatever the task multiplies its gradient by."""
    parameter, sent = Parameter(torch.ones(2)), list[tuple[Any, ...]]()
    slot = torch.zeros(2)
    client: Any = SimpleNamespace(worker=0, prepare=lambda write: write(slot))
    named = [("weight", parameter)]
    optimizer = HybridAsync(Namespace(lr=[0.1], clip_norm=clip_norm), named, client, None, False, True)

    def exchange(write: Callable[[torch.Tensor], object], *update: object) -> None:
        write(slot)
        sent.append((slot.tolist(), update))

    optimizer.worker.exchange, optimizer.worker.learning_rate = exchange, 0.1  # type: ignore[method-assign, assignment]
    optimizer.zero_grad()
    optimizer.backward((parameter * torch.tensor([12.0, 16.0])).sum())
    optimizer.multiply_grads(1 / 4)
    optimizer.clip_grad_norm(clip_norm)
    if error:
        with pytest.raises(ConfigurationError, match=error):
            does(optimizer)
            optimizer.step()
    else:
        does(optimizer)
        if optimizer.awaits_step:
            optimizer.step()
        ((gradient, (weight, _, norm)),) = sent
        assert (weight, norm) == (4.0, 5.0) and not optimizer.awaits_step
        if does in (double_gradients, hook):
            assert gradient == [6.0, 8.0]


def test_a_gradient_in_fp16_arrives_without_the_loss_scale_of_its_step() -> None:
    parameter, sent, slot = Parameter(torch.ones(2, dtype=torch.float16)), list[Any](), torch.zeros(2)
    scaler: Any = SimpleNamespace(scale=lambda loss: scaler.loss_scale * loss)
    scaler.check_overflow, scaler.update = lambda norm: None, lambda: None
    client: Any = SimpleNamespace(worker=0)
    for scaler.loss_scale in (8.0, 16.0):
        optimizer = HybridAsync(Namespace(lr=[0.1], clip_norm=0.0), [("weight", parameter)], client, scaler, False)
        optimizer.worker.exchange = lambda write, *update: sent.append((write(slot), update))  # type: ignore[method-assign]
        optimizer.zero_grad()
        optimizer.backward((parameter * torch.tensor([12.0, 16.0])).sum())
        optimizer.multiply_grads(1 / 4)
        optimizer.clip_grad_norm(0.0)
        optimizer.step()
        assert slot.tolist() == [3.0, 4.0] and (sent[-1][1][0], sent[-1][1][2]) == (4.0, 5.0)


@pytest.mark.parametrize(
    ("tokens", "weight"), [([0, torch.tensor(0.0)], 1e-9), ([0, 1], 1.0), ([], 1.0), ([1e-12], 1e-12)]
)
def test_batches_without_a_target_token_have_no_weight_in_a_mean(tokens: list[Any], weight: float) -> None:
    """fairseq divides by 1 then, as by one token."""
    optimizer: Any = object.__new__(HybridAsync)
    optimizer.dummy, optimizer._norm, optimizer.tokens, optimizer._scales_into_slot = False, None, tokens, True
    optimizer.worker = SimpleNamespace(scale_into_slot=lambda factor: None)
    optimizer.multiply_grads(1.0 if weight == 1e-9 else 1.0 / weight)
    assert optimizer._weight == pytest.approx(weight)


def test_a_task_that_does_not_step_is_one_line() -> None:
    """The server would count one step less than fairseq, and its learning rate would be another."""
    trainer: Any = object.__new__(HybridTrainer)
    trainer._optimizer = SimpleNamespace(awaits_step=True)
    with pytest.raises(ConfigurationError, match="optimizer_step has not called optimizer.step"):
        trainer._reduce_and_log_stats([], 1.0, torch.ones(()))
