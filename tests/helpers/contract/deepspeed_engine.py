"""A loop with an engine of DeepSpeed's."""

from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR

import fairseq_async.deepspeed_plugin as deepspeed_async
from fairseq_async.deepspeed_plugin.engines import synchronous
from tests.helpers.contract.net import BATCH, DECAY, HALF, RATE, STEPS, WARM, Net, Run, factor, settings

assert deepspeed.ops.__compatible_ops__  # a search that would take each fork half a second
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # one rank needs no shared memory, which is cleared


def make(net: Net, run: Run, parameters: Iterable[Parameter] | None = None) -> Any:
    """An engine that has not joined its run; of some of the net's parameters, or of all."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": BATCH}
    config["gradient_accumulation_steps"] = run.case.micro_batches
    config["zero_optimization"] = {"stage": run.case.stage}
    config |= {run.case.half: {"enabled": True}} if run.case.half else {}
    if run.case.half == "fp16":  # which each CPU computes, if slowly
        get_accelerator().is_fp16_supported = lambda: True
    given: dict[str, Any] = {"model": net, "model_parameters": parameters or net.parameters(), "config": config}
    if run.case.has_schedule:
        given["lr_scheduler"] = lambda optimizer: LambdaLR(optimizer, factor)
    if run.case.brings_state:
        given["optimizer"] = optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
        given["lr_scheduler"] = schedule = LambdaLR(optimizer, factor)
        for number in range(WARM):
            optimizer.zero_grad()
            net(**run.batch(number))["loss"].backward()
            optimizer.step()
            schedule.step()
    else:
        adamw = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY, "torch_adam": True}}
        config["optimizer"] = adamw
    if run.method == "plain":
        synchronous.set_environment_without_launcher()
        return deepspeed.initialize(**given)[0]
    own = {"method": run.method, "run_dir": str(run.path), "total_steps": STEPS, **settings(run)}
    return deepspeed_async.initialize(**given | {"config": config | {"async_training": own}})[0]


def train(net: Net, run: Run) -> None:
    engine = make(net, run)
    if run.case.goes_on:
        engine.load_checkpoint(f"{run.before}.saved", "half")
    if run.method != "plain":
        engine.join_run()
    taken = 0
    while taken < run.steps if run.method == "plain" else not engine.finished:
        taken += 1
        if run.method == "plain" and net.batches in run.case.spoilt:  # DeepSpeed takes a missing gradient for zeros
            net(**run.batch(net.batches))
            continue
        engine.backward(engine(**run.batch(net.batches))["loss"])
        if run.case.rate:
            engine.optimizer.param_groups[0]["lr"] = run.case.rate(net.batches - 1)
        engine.step()
        for _ in range(run.case.steps_schedule(net.batches - 1) if run.case.steps_schedule else 0):
            engine.lr_scheduler.step()
        if run.case.saves and taken == HALF and run.method != "plain":
            engine.save_checkpoint(f"{run.path}.saved", "half")
