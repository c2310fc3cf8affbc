"""A task's own ``optimizer_step`` under ``hybrid_async``, whose steps are the server's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.hybrid import HybridAsync
from tests.helpers.contract.fairseq_train import Criterion, Task
from tests.helpers.fairseq_trainers import HYBRID, Trainers, step
from tests.helpers.run_files import events

SGD = f"{HYBRID} --inner-optimizer sgd --lr 1.0 --weight-decay 0"


def double_gradients(optimizer: HybridAsync) -> None:
    for parameter in optimizer.params:
        if parameter.grad is not None:
            parameter.grad = 2 * parameter.grad


def halve(optimizer: HybridAsync) -> None:
    optimizer.multiply_grads(0.5)


def step_with_scale(optimizer: HybridAsync) -> None:
    optimizer.step(scale=2.0)


def hook(optimizer: HybridAsync) -> None:
    optimizer.optimizer.register_step_pre_hook(lambda *_: double_gradients(optimizer))


def stepped(trainer: Any) -> tuple[Tensor, Tensor]:
    """The gradient of the batch of a step, and what the step has taken from the parameters."""
    net, batch = trainer.model.net, dict[str, Any]()
    net.register_forward_pre_hook(lambda _, args, given: batch.update(given), with_kwargs=True)
    step(trainer)
    after = net.flat().float()
    nn.utils.vector_to_parameters(net.float().trace[0].float(), net.parameters())
    net.zero_grad()
    net.eval()(**{name: each.float() for name, each in batch.items()})["loss"].backward()
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in net.parameters()])
    return gradient, net.trace[0].float() - after


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
        (halve, 0.0, ""),
        (step_with_scale, 0.0, ""),
        (lambda optimizer: optimizer.step(lambda: 0.0), 0.0, "the task calls optimizer.step.closure."),
        (lambda optimizer: optimizer.clip_grad_norm(0.5), 0.0, "the task calls optimizer.clip_grad_norm beside"),
        (lambda optimizer: optimizer.step(), 0.0, "the task calls optimizer.step.. beside fairseq's trainer"),
        (lambda optimizer: optimizer.set_lr(0.2), 0.0, "the optimizer's param_groups were changed"),
        (lambda optimizer: optimizer.param_groups[0].update(weight_decay=1), 0.0, "param_groups were changed"),
    ],
)
def test_what_a_task_does_before_its_step_is_taken_or_is_one_line(
    trainers: Trainers,
    monkeypatch: pytest.MonkeyPatch,
    does: Callable[[HybridAsync], object],
    clip_norm: float,
    error: str,
) -> None:
    """The weight is that of the tokens, whatever the task multiplies its gradient by."""

    def optimizer_step(self: Task, optimizer: HybridAsync, model: object, update_num: int) -> None:
        does(optimizer)
        if optimizer.awaits_step or error:
            optimizer.step()

    monkeypatch.setattr(Task, "optimizer_step", optimizer_step)
    trainer = trainers.join(f"{SGD} --clip-norm {clip_norm}")
    if error:
        with pytest.raises(ConfigurationError, match=error):
            step(trainer)
        return
    gradient, change = stepped(trainer)
    factor = {double_gradients: 2.0, hook: 2.0, halve: 0.5, step_with_scale: 0.5}.get(does, 1.0)
    factor *= min(1.0, clip_norm / float(gradient.norm())) if clip_norm else 1.0
    torch.testing.assert_close(change, factor * gradient)
    (event,) = events(trainers.run_dir)
    assert (
        event["weight"] == 1.0
        and event["norm"] == pytest.approx(float(gradient.norm()))
        and not trainer.optimizer.awaits_step
    )


@pytest.mark.parametrize(("precision", "zeros"), [("", False), ("--bf16", True), ("--fp16 --fp16-init-scale 8", True)])
def test_only_in_fp32_is_a_parameter_without_a_gradient_left_alone(
    trainers: Trainers, precision: str, zeros: bool
) -> None:
    """fp32 masters have zeros for it, as with fairseq alone: a weight decay changes them."""
    step(trainers.join(f"{SGD} {precision}"))
    (event,) = events(trainers.run_dir)
    assert ("missing" not in event) is zeros


@pytest.mark.parametrize("scale", [8, 16])
def test_a_gradient_in_fp16_arrives_without_the_loss_scale_of_its_step(trainers: Trainers, scale: int) -> None:
    gradient, change = stepped(trainers.join(f"{SGD} --fp16 --fp16-init-scale {scale}"))
    torch.testing.assert_close(change, gradient, rtol=0.05, atol=0.05)
    (event,) = events(trainers.run_dir)
    assert event["weight"] == 1.0 and event["norm"] == pytest.approx(float(gradient.norm()), rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "weight"), [([0, torch.tensor(0.0)], 1e-9), ([0, 1], 1.0), ([4, 4], 8.0), ([1e-12], 1e-12)]
)
def test_batches_without_a_target_token_have_no_weight_in_a_mean(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch, tokens: list[Any], weight: float
) -> None:
    """fairseq divides by 1 then, as by one token."""
    forward, sizes = Criterion.forward, iter(tokens)

    def with_size(self: Criterion, *args: Any, **kwargs: Any) -> Any:
        loss, _, output = forward(self, *args, **kwargs)
        return loss, next(sizes), output

    monkeypatch.setattr(Criterion, "forward", with_size)
    step(trainers.join(SGD), 1, len(tokens))
    assert events(trainers.run_dir)[0]["weight"] == pytest.approx(weight, rel=1e-6, abs=0.0)


def test_a_task_that_does_not_step_is_one_line(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would count one step less than fairseq, and its learning rate would be another."""
    monkeypatch.setattr(Task, "optimizer_step", lambda *_, **__: None)
    with pytest.raises(ConfigurationError, match="optimizer_step has not called optimizer.step"):
        step(trainers.join(HYBRID))
