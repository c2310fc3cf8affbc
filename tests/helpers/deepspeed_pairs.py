"""DeepSpeed scripts with optimizers and schedules of their own, by plain DeepSpeed and as the one worker of a run.

Each case is a process that is forked after DeepSpeed is imported. It leaves in its own file of --out the parameters
that both have come to, and the learning rates that the engines showed; or the line with which initialize has ended.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

import fairseq_async.deepspeed_plugin as deepspeed_async
from fairseq_async.deepspeed_plugin.synchronous_engine import set_environment_without_launcher

STEPS = 8
Arguments = dict[str, Any]  # of initialize
Case = Callable[[nn.Module], Arguments]


def groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Weights, and biases that lie between them and are not decayed; the last bias does not learn at all."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.5, **options},
        {"params": [p for n, p in named if "bias" in n][:-1], "weight_decay": 0.0, "lr": 0.03},
        {"params": [named[-1][1]], "lr": 0.0, "weight_decay": 0.0},
    ]


def section(name: str, **params: Any) -> Arguments:
    return {"optimizer": {"type": name, "params": {"lr": 0.01, **params}}}


def with_optimizer(model: nn.Module, make: Callable[..., Any], **options: Any) -> Arguments:
    return {"optimizer": make(groups(model), lr=0.01, **options)}


def with_schedule(model: nn.Module, make: Callable[..., Any]) -> Arguments:
    optimizer = SGD(groups(model), lr=0.05)
    return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}


def of_groups(model: nn.Module, name: str, **params: Any) -> Arguments:
    return {"model_parameters": groups(model), "config": section(name, **params)}


def scheduled(model: nn.Module, name: str, **params: Any) -> Arguments:
    scheduler = {"type": name, "params": params}
    return {"model_parameters": groups(model), "config": section("SGD") | {"scheduler": scheduler}}


def halved(step: int) -> float:
    return float(0.5**step)


def of_another_model(model: nn.Module) -> Arguments:
    return {"optimizer": SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)}


EQUAL: dict[str, Case] = {
    "groups_adamw": partial(of_groups, name="AdamW", torch_adam=True, betas=[0.8, 0.95]),
    "groups_fused": partial(of_groups, name="Adam"),
    "groups_l2": partial(of_groups, name="Adam", torch_adam=True, adam_w_mode=False),
    "groups_sgd": partial(of_groups, name="SGD", momentum=0.9, nesterov=True),
    "torch_default_decay": lambda model: {"config": section("AdamW", torch_adam=True)},
    "client_sgd": partial(with_optimizer, make=SGD, momentum=0.5, dampening=0.1),
    "client_adam": partial(with_optimizer, make=Adam, amsgrad=True),
    "client_adamw": partial(with_optimizer, make=AdamW, maximize=True),
    "client_cpu_adam": partial(with_optimizer, make=DeepSpeedCPUAdam),
    "client_fused_l2": partial(with_optimizer, make=FusedAdam, adam_w_mode=False),
    "callable": lambda model: {"optimizer": partial(SGD, lr=0.02), "model_parameters": groups(model)},
    "tiny": lambda model: {"optimizer": SGD(model.parameters(), lr=1e-9)},
    "part": lambda model: {"optimizer": SGD(list(model.parameters())[2:3], lr=0.1)},
    "clipped": lambda model: of_groups(model, "SGD") | {"config": section("SGD") | {"gradient_clipping": 0.1}},
    "warmup": partial(scheduled, name="WarmupLR", warmup_num_steps=4, warmup_type="linear"),
    "cosine": partial(scheduled, name="WarmupCosineLR", warmup_num_steps=2, total_num_steps=STEPS),
    "torch_section": partial(scheduled, name="StepLR", step_size=2, gamma=0.3),
    "lambda": partial(with_schedule, make=lambda optimizer: LambdaLR(optimizer, [halved, lambda step: 1.0, halved])),
    "one_cycle": partial(with_schedule, make=partial(OneCycleLR, max_lr=0.1, total_steps=STEPS, cycle_momentum=False)),
    "step": partial(with_schedule, make=partial(StepLR, step_size=3)),
    "deepspeeds": partial(with_schedule, make=partial(WarmupLR, warmup_num_steps=4)),
    "schedule_callable": lambda model: with_schedule(model, lambda _: partial(CosineAnnealingLR, T_max=STEPS)),
}
REFUSED: dict[str, Case] = {
    "rmsprop": partial(with_optimizer, make=RMSprop),
    "no_bias_correction": partial(with_optimizer, make=FusedAdam, bias_correction=False),
    "another_model": of_another_model,
    "infinite": partial(with_optimizer, make=partial(SGD, weight_decay=float("inf"))),
    "plateau": partial(with_schedule, make=ReduceLROnPlateau),
    "short": partial(with_schedule, make=partial(OneCycleLR, max_lr=0.1, total_steps=3, cycle_momentum=False)),
    "momentum": partial(with_schedule, make=partial(OneCycleLR, max_lr=0.1, total_steps=STEPS)),
    "no_end": lambda model: with_schedule(model, partial(StepLR, step_size=3)) | {"total_steps": 0},
    "twice": lambda model: {"optimizer": partial(SGD, lr=0.1), "model_parameters": 2 * list(model.parameters())},
}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 1))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    for _ in range(STEPS):
        inputs = torch.randn(8, 8)
        yield inputs, 5 * inputs.sin().sum(1, keepdim=True)


def train(case: Case, initialize: Callable[..., Any], **changes: Any) -> tuple[nn.Module, list[list[float]]]:
    model = make_model()
    arguments = case(model)
    steps = arguments.pop("total_steps", STEPS)
    config = {"train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True, **arguments.pop("config", {})}
    if "async_training" in changes:
        changes["async_training"] |= {"total_steps": steps}
    engine, *_ = initialize(model=model, config=config | changes, **arguments)
    rates = []
    for inputs, targets in batches():
        engine.backward(nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
        assert engine.was_step_applied()
        rates.append(engine.get_lr())
    return model, rates


def run(name: str, case: Case, out: Path) -> None:
    set_environment_without_launcher()
    asynchronous = {"method": "hybrid_async", "run_dir": str(out / name), "updates_per_step": 1}
    if name in REFUSED:
        return train(case, deepspeed_async.initialize, async_training=asynchronous) and None
    expected, expected_rates = train(case, deepspeed.initialize)
    torch.distributed.destroy_process_group()
    model, rates = train(case, deepspeed_async.initialize, async_training=asynchronous)
    torch.save([make_model().state_dict(), expected.state_dict(), model.state_dict()], out / f"{name}.pt")
    (out / f"{name}.json").write_text(json.dumps([expected_rates, rates]))


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(exist_ok=True)
    cases = EQUAL | REFUSED
    for name in sys.argv[2:] or cases:
        if os.fork() == 0:
            with (out / f"{name}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            return run(name, cases[name], out)  # and ends, as a script would
        os.wait()


if __name__ == "__main__":
    main()
