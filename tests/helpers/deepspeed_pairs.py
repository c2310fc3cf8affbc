"""DeepSpeed scripts with parameter groups of their own, by plain DeepSpeed and as the one worker of a run, or as two.

Each is a process that is forked after DeepSpeed is imported, and leaves in files of --out what it has printed, the
parameters that it came to, and the learning rates that its engine showed.
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
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.optim import SGD, AdamW, NAdam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import fairseq_async.deepspeed_plugin as deepspeed_async
from fairseq_async.deepspeed_plugin.engines.synchronous import set_environment_without_launcher
from fairseq_async.options.addresses import free_port
from fairseq_async.torch import MuonAdamW, muon_groups

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # one rank needs no shared memory, which is cleared
STEPS = 8
PLAIN = {
    "train_batch_size": 8,
    "gradient_clipping": 0.5,
    "steps_per_print": 4,
    "log_level": "info",
    "zero_allow_untested_optimizer": True,
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights, and biases that lie between them and are not decayed; the last bias does not learn at all."""
    named = list(model.named_parameters())
    return [
        {"params": [each for name, each in named if "weight" in name], "weight_decay": 0.5},
        {"params": [each for name, each in named if "bias" in name][:-1], "weight_decay": 0.0, "lr": 0.03},
        {"params": [named[-1][1]], "lr": 0.0, "weight_decay": 0.0},
    ]


def of_the_json(model: nn.Module) -> dict[str, Any]:
    """Groups of AdamW, with a schedule of DeepSpeed's."""
    adamw = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.95], "torch_adam": True}}
    warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    return {"model_parameters": groups(model), "config": PLAIN | {"optimizer": adamw, "scheduler": warm_up}}


def of_the_script(model: nn.Module) -> dict[str, Any]:
    """Groups of an optimizer of the script's, with a schedule of torch's."""
    optimizer = SGD(groups(model), lr=0.05, momentum=0.9)
    schedule = OneCycleLR(optimizer, [0.1, 0.05, 0.0], total_steps=STEPS, cycle_momentum=False)
    return {"optimizer": optimizer, "lr_scheduler": schedule, "config": PLAIN}


def in_half_precision(model: nn.Module, **precision: Any) -> dict[str, Any]:
    """Rounded from fp32 masters, which plain DeepSpeed divides among ranks, and which the server has otherwise."""
    schedule = partial(LambdaLR, lr_lambda=lambda step: 0.9**step)
    config = PLAIN | {"zero_optimization": {"stage": 1}} | precision
    return {"optimizer": AdamW(groups(model), lr=0.05), "lr_scheduler": schedule, "config": config}


def in_fp32_sums(model: nn.Module) -> dict[str, Any]:
    """Of micro-batches in bf16, which sums in bf16 would round. SGD with a momentum shows what Adam divides out."""
    arguments = in_half_precision(model, bf16={"enabled": True}, data_types={"grad_accum_dtype": "float32"})
    arguments["config"] = arguments["config"] | {"gradient_accumulation_steps": 4, "gradient_clipping": 0.0}
    return arguments | {"optimizer": SGD(groups(model), lr=0.5, momentum=0.9)}


def in_fp16(model: nn.Module) -> dict[str, Any]:
    """With a loss scale at which the first steps overflow."""
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.float16]  # computes in it, if slowly
    get_accelerator().is_fp16_supported = lambda: True
    return in_half_precision(model, fp16={"enabled": True, "initial_scale_power": 15, "hysteresis": 1})


def of_an_ordinary_run(model: nn.Module) -> dict[str, Any]:
    """An optimizer and a schedule that have taken five steps."""
    optimizer = NAdam(groups(model), lr=0.05, decoupled_weight_decay=True)
    schedule = LambdaLR(optimizer, lambda step: 0.8**step)
    for inputs, targets in list(batches())[:5]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    return {"optimizer": optimizer, "lr_scheduler": schedule, "config": PLAIN}


def of_a_checkpoint(model: nn.Module) -> dict[str, Any]:
    """FusedAdam, which counts the steps of a group at one of its parameters; plain DeepSpeed saves a checkpoint."""
    arguments = of_the_json(model)
    adamw = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.3}}
    return arguments | {"config": arguments["config"] | {"optimizer": adamw}}


def of_deepspeeds_muon(model: nn.Module) -> dict[str, Any]:
    """Muon for the matrices, and Adam for the rest, as DeepSpeed divides them."""
    params = {"lr": 0.03, "adam_lr": 0.01, "weight_decay": 0.1, "torch_adam": True, "ns_method": "standard"}
    warm_up = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.03, 0.01], "warmup_num_steps": 4}}
    config = PLAIN | {"optimizer": {"type": "Muon", "params": params}, "scheduler": warm_up}
    return {"model_parameters": model.parameters(), "config": config}


def of_muon_adamw(model: nn.Module) -> dict[str, Any]:
    """The package's own optimizer."""
    optimizer = MuonAdamW(muon_groups(model.named_parameters()), lr=0.03, adjust_lr_fn="match_rms_adamw")
    return {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, lambda step: 0.9**step), "config": PLAIN}


CASES: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "json": of_the_json,
    "script": of_the_script,
    "position": of_an_ordinary_run,
    "checkpoint": of_a_checkpoint,
    "local": of_the_script,
    "bf16": partial(in_half_precision, bf16={"enabled": True}),
    "sums": in_fp32_sums,
    "fp16": in_fp16,
    "muon": of_deepspeeds_muon,
    "muon_local": of_deepspeeds_muon,
    "muon_adamw": of_muon_adamw,
    "muon_adamw_local": of_muon_adamw,
}
SKIPPED = {"fp16": 3}  # steps that overflow
WORKERS = {"position": 2}  # each with half of every batch; of the others one
HYBRID = {"method": "hybrid_async", "barrier": True}
LOCAL = {"method": "local_sgd", "outer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.0, "local_steps": 3}
SAVED_AT = 3


def make_model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].register_parameter("unused_weight", nn.Parameter(torch.ones(3)))  # DeepSpeed gives it a gradient of zeros
    return model


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    for _ in range(STEPS):
        inputs = torch.randn(8, 8)
        yield inputs, 5 * inputs.sin().sum(1, keepdim=True)


def train(name: str, out: Path, worker: int | None) -> None:
    """Trains by plain DeepSpeed where ``worker`` is None."""
    model = make_model()
    arguments = CASES[name](model)
    first = SAVED_AT if worker is not None and name == "checkpoint" else 0
    steps = STEPS - first - SKIPPED.get(name, 0)
    section = (LOCAL if name.endswith("local") else HYBRID) | {"run_dir": str(out / name), "total_steps": steps}
    part = slice(None)
    if worker is None:
        set_environment_without_launcher()
    else:
        arguments["config"] = arguments["config"] | {"async_training": section}
        part = slice(worker, None, WORKERS.get(name, 1))
    given = [arguments.get(key) for key in ("optimizer", "model_parameters", "training_data", "lr_scheduler")]
    others = [29500, None, None, None]  # distributed_port, mpu, dist_init_required, collate_fn
    engine, *_ = (deepspeed if worker is None else deepspeed_async).initialize(
        None, model, *given, *others, arguments["config"]
    )
    kind = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else torch.float32
    rates, applied, norms = [], [], []
    if first:
        engine.load_checkpoint(str(out / name))
    for inputs, targets in list(batches())[first:]:
        if name == "checkpoint" and worker is None and engine.global_steps == SAVED_AT:
            engine.save_checkpoint(str(out / name))
        engine.backward(nn.functional.mse_loss(engine(inputs[part].to(kind)).float(), targets[part]))
        engine.step()
        rates.append([*engine.get_lr(), *engine.lr_scheduler.get_last_lr()])
        applied.append(engine.was_step_applied())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    for _ in range(0 if worker is None else 2):  # steps past the end
        engine.backward(engine(inputs.to(kind)).sum())
        engine.step()
        applied.append(engine.was_step_applied())
    ending = "plain" if worker is None else f"worker-{worker}"
    torch.save(model.state_dict(), out / f"{name}.{ending}.pt")
    seen = {"rates": rates, "applied": applied, "steps": engine.global_steps, "norms": norms}
    (out / f"{name}.{ending}.json").write_text(json.dumps(seen))


def main() -> None:
    out = Path(sys.argv[1])
    torch.save(make_model().state_dict(), out / "start.pt")
    for name in CASES:
        workers = WORKERS.get(name, 1)
        ranks = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for together in ([None], range(workers)):
            for worker in together:
                if os.fork() == 0:
                    if workers > 1 and worker is not None:  # as a launcher does
                        os.environ |= ranks | {"RANK": str(worker), "LOCAL_RANK": str(worker)}
                    with (out / f"{name}.log").open("a") as log:
                        os.dup2(log.fileno(), 1)
                        os.dup2(log.fileno(), 2)
                    return train(name, out, worker)  # and ends, as a script would
            for _ in together:
                os.wait()


if __name__ == "__main__":
    main()
