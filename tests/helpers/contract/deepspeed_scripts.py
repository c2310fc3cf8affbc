"""What scripts with an engine of DeepSpeed's do beside its steps, and the line that ends each; "" for none."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_full_optimizer_state
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.helpers.contract import deepspeed_engine
from tests.helpers.contract.net import Case, Net, Run


def loss(model: Any, run: Run) -> Any:
    kind = next(model.parameters()).dtype
    given = {name: each.to(kind) if each.is_floating_point() else each for name, each in run.batch(0).items()}
    return model(**given)["loss"]


def step(engine: Any, run: Run) -> None:
    engine.backward(loss(engine, run))
    engine.step()


@torch.no_grad()
def move(engine: Any, rate: float = 0.1) -> None:
    """As a loop that steps by hand."""
    for each in engine.module.parameters():
        each.data -= rate * (each if each.grad is None else each.grad)


@dataclass(frozen=True)
class Script(Case):
    """``does`` is given the engine, of the layers alone or of the whole net, and the run."""

    of_layers: bool = False
    ep_size: int = 1  # of the layers, as if they were experts
    does: Callable[[Any, Run], object] = lambda engine, run: None


def by_hand(passes: int, end: Callable[[Any], object], after: int = 0) -> Callable[[Any, Run], None]:
    """Passes without the engine's step, after some with it."""

    def does(engine: Any, run: Run) -> None:
        for _ in range(after):
            step(engine, run)
        for _ in range(passes):
            engine.backward(loss(engine, run))
            move(engine)
        end(engine)

    return does


def before_the_run(end: Callable[[Any, Run], object]) -> Callable[[Any, Run], None]:
    """Training that has never called the engine itself, but engine.module."""

    def does(engine: Any, run: Run) -> None:
        made = {name: each.clone() for name, each in engine.module.state_dict().items()}
        nn.init.zeros_(engine.module.layers[0].weight)
        engine.end()  # a change alone is no training
        engine.module.load_state_dict(made)
        loss(engine.module, run).backward()
        engine.end()  # nor is a gradient alone
        move(engine)
        end(engine, run)

    return does


def no_mistake(engine: Any, run: Run) -> None:
    """Many passes, and changes after the last step."""
    for _ in range(20):
        engine.backward(loss(engine, run))
    engine.pull()
    engine.zero_grad()
    step(engine, run)
    for _ in range(3):
        loss(engine, run)
    engine.pull()
    for _ in range(7):
        loss(engine, run)
    for _ in range(2):  # without a gradient it is no step
        engine.zero_grad()
        engine.step()


def without_gradient(engine: Any, run: Run) -> None:
    """A hundred steps in a row have none."""
    for steps in (99, 100):
        step(engine, run)
        for _ in range(steps):
            loss(engine, run)
            engine.step()


def own_backward(engine: Any, run: Run) -> None:
    """As DeepSpeed takes it with ZeRO: of a loss that the engine has computed, and that the script may scale."""
    for _ in range(2):
        engine.scale(loss(engine, run)).backward()
        engine.step()
    assert engine.was_step_applied() and not engine.skipped_steps


def change_option(name: str, value: float) -> Callable[[Any, Run], None]:
    def does(engine: Any, run: Run) -> None:
        step(engine, run)
        engine.optimizer.param_groups[0][name] = value
        step(engine, run)

    return does


def another_models_optimizer(engine: Any, run: Run) -> None:
    other = nn.Linear(2, 1)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    step(engine, run)
    while not engine.finished:
        step(engine, run)
    engine.module.layers[0].weight.grad = torch.ones(5, 5)
    torch.optim.SGD(engine.module.parameters(), lr=0.1).step()  # the model is the script's after the run


def own_step(engine: Any, run: Run) -> None:
    step(engine, run)
    engine.optimizer.step()


def own_scheduler(engine: Any, run: Run) -> None:
    LambdaLR(engine.optimizer, lambda step: 1.0)
    step(engine, run)


def hook(when: str) -> Callable[[Any, Run], None]:
    """A hook that changes something at each step."""

    def does(engine: Any, run: Run) -> None:
        called: list[object] = []
        getattr(engine.basic_optimizer, f"register_step_{when}_hook")(lambda *_: called.append(1))
        for _ in range(3):
            step(engine, run)
        assert called

    return does


def wrap_step(engine: Any, run: Run) -> None:
    own = engine.optimizer.step
    engine.optimizer.step = lambda *given, **named: own(*given, **named)
    step(engine, run)


def clear_state(engine: Any, run: Run) -> None:
    step(engine, run)
    engine.optimizer.state.clear()
    step(engine, run)


def scale_moments(engine: Any, run: Run) -> None:
    step(engine, run)
    for moments in engine.optimizer.state.values():
        moments["exp_avg"].mul_(0.5)
    step(engine, run)


def set_moment(engine: Any, run: Run) -> None:
    step(engine, run)
    weight = engine.module.layers[0].weight
    safe_set_full_optimizer_state(weight, torch.ones(5, 5), "exp_avg")
    step(engine, run)


def set_master(engine: Any, run: Run) -> None:
    step(engine, run)
    weight = engine.module.layers[0].weight
    if run.method == "hybrid_async" or run.case.stage:
        with GatheredParameters([weight]):
            master = safe_get_full_fp32_param(weight)
            assert torch.equal(master, weight)
            master.zero_()
            assert weight.any(), "what is read is a copy"
    safe_set_full_fp32_param(weight, torch.zeros(5, 5))
    step(engine, run)


def change_beside_master(engine: Any, run: Run) -> None:
    weight = engine.module.layers[0].weight
    with GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.mul_(0.5)
    step(engine, run)


def load_after_initialize(engine: Any, run: Run, refreshes: bool = False) -> None:
    """Without masters beside them, or with these refreshed, the run begins with the parameters that are loaded."""
    loaded = {name: each / 2 for name, each in engine.module.state_dict().items()}
    engine.module.load_state_dict(loaded)
    if refreshes:
        engine.optimizer.refresh_fp32_params()
    engine.join_run()
    assert all(torch.equal(loaded[name], each) for name, each in engine.module.named_parameters())
    step(engine, run)


def load_state(engine: Any, run: Run) -> None:
    """As ZeRO's optimizers take it: of each rank."""
    step(engine, run)
    engine.optimizer.load_state_dict([engine.optimizer.state_dict()])
    step(engine, run)


def steps_of_the_schedule(engine: Any, run: Run) -> None:
    engine.backward(loss(engine, run))
    engine.step(lr_kwargs={"last_batch_iteration": 7})


def sparse_gradient(engine: Any, run: Run) -> None:
    if run.method == "hybrid_async":
        engine.backward(loss(engine, run))
        weight = engine.module.layers[0].weight
        weight.grad = weight.grad.to_sparse()
        engine.step()


def save_average(engine: Any, run: Run) -> None:
    """Local SGD would take it for a step, and save the server's parameters."""
    if run.method == "local_sgd":
        step(engine, run)
        move(engine, 0.5)
        engine.save_16bit_model(f"{run.path}.average")


def save_average_later(engine: Any, run: Run) -> None:
    while not engine.finished if engine.global_steps else True:
        step(engine, run)
    move(engine, 0.5)
    engine.save_16bit_model(f"{run.path}.average")


def load_best(engine: Any, run: Run) -> None:
    """As at the end of a run, whose last parameters are others."""
    parameters, path = list(engine.module.parameters()), f"{run.path}.best"
    step(engine, run)
    engine.save_checkpoint(path, "best")
    with GatheredParameters(parameters):
        best = [each.detach().clone() for each in parameters]
    for _ in range(2):
        step(engine, run)
    engine.end()
    engine.load_checkpoint(path, "best")
    with GatheredParameters(parameters):
        assert all(map(torch.equal, best, parameters))


def offload(engine: Any, run: Run) -> None:
    if run.method == "local_sgd":
        engine.offload_states()


def read_optimizer(engine: Any, run: Run) -> None:
    """Which DeepSpeed wraps neither in fp32 nor without ZeRO, so that a script can copy it whole."""
    step(engine, run)
    assert engine.optimizer is engine.basic_optimizer and not hasattr(engine.optimizer, "optimizer")


def read_scale(engine: Any, run: Run) -> None:
    """As scripts of fp16 do, for their logs and their counts of steps."""
    assert engine.config["fp16"]["enabled"] and engine.config["zero_optimization"]["stage"] == 1
    for factor in (1.0, math.inf):
        engine.backward(factor * loss(engine, run))
        engine.step()
        optimizer = engine.optimizer
        assert optimizer.overflow == (not engine.was_step_applied()) and optimizer.cur_scale == optimizer.loss_scale > 1
        inner = optimizer.optimizer
        assert isinstance(inner, torch.optim.Optimizer) and not hasattr(inner, "optimizer")  # a loop that unwraps ends
        assert inner.param_groups is optimizer.param_groups and inner.state is optimizer.state
    assert optimizer.overflow and engine.skipped_steps
    assert engine.dynamic_loss_scale() and engine.loss_scale() == 0 and engine.initial_dynamic_scale() == 2**16


def set_scale(engine: Any, run: Run) -> None:
    step(engine, run)
    engine.optimizer.loss_scale = 2.0
    step(engine, run)


def coalesced(engine: Any, run: Run) -> None:
    with engine.coalesce_grad_reduction():
        for _ in range(2):
            engine.backward(loss(engine, run))
    engine.step()
    assert engine.was_step_applied() and engine.global_steps == 1


def validation_first(engine: Any, run: Run) -> None:
    """It is not the worker's first batch."""
    engine.eval()
    loss(engine, run)
    engine.train()
    with torch.no_grad():
        loss(engine, run)
    assert not engine.async_worker.batches._calls
    step(engine, run)
    assert engine.async_worker.batches._calls


def two_micro_batches(engine: Any, run: Run) -> None:
    """The time of a step is that of both; that of the first begins with its first batch."""
    engine.join_run()
    seconds, take = list[float](), engine.async_worker.step
    if run.method == "local_sgd":
        engine.async_worker.step = lambda spent, loss: (seconds.append(spent), take(spent, loss))[1]
        for _ in range(4):
            time.sleep(0.05)
            step(engine, run)
        assert len(seconds) == 2 and seconds[1] >= 0.1


ALONE = "the run sees the steps of engine.step() alone"
HAND = "is trained without engine.step(), which alone the run sees"
UNSTEPPED = "heads.0.weight has a gradient and is in no exchange"
STATE = "optimizer.load_state_dict: a state of ZeRO's belongs to masters of a rank's own"
BEFORE = "the model is trained before the run is joined"


def refused(does: Callable[[Any, Run], object], said: str, local: str | None = None, stage: int = 0) -> Script:
    local = said if local is None else local
    return Script(compared=False, hybrid_async=said, local_sgd=local, does=does, stage=stage)


CASES = {
    "the optimizer's own step": refused(own_step, ALONE),
    "by hand": refused(by_hand(8, lambda engine: None), HAND),
    "by hand, found at pull": refused(by_hand(1, lambda engine: engine.pull()), HAND),
    "by hand, found at end": refused(by_hand(1, lambda engine: engine.end()), HAND),
    "by hand, found at save": refused(by_hand(1, lambda engine: engine.save_checkpoint("directory")), HAND),
    "by hand, found at the process's end": refused(by_hand(1, lambda engine: None), HAND),
    "by hand after a step": refused(by_hand(8, lambda engine: None, after=1), HAND),
    "before the run, found at backward": refused(
        before_the_run(lambda engine, run: engine.backward(torch.ones((), requires_grad=True))), BEFORE
    ),
    "before the run, found at forward": refused(before_the_run(lambda engine, run: loss(engine, run)), BEFORE),
    "before the run, found at pull": refused(before_the_run(lambda engine, run: engine.pull()), BEFORE),
    "before the run, found at end": refused(before_the_run(lambda engine, run: engine.end()), BEFORE),
    "before the run, found at save": refused(
        before_the_run(lambda engine, run: engine.save_checkpoint("here")), BEFORE
    ),
    "before the run, found at the process's end": refused(before_the_run(lambda engine, run: None), BEFORE),
    "no mistake": refused(no_mistake, ""),
    "no gradient": refused(without_gradient, "100 calls of engine.step() in a row had no gradient"),
    "another model's optimizer": refused(another_models_optimizer, ""),
    "a rate": refused(change_option("lr", 0.0), 'param_groups[0]["lr"] of the optimizer was 0.02 and is 0 now', ""),
    "a rate beside a schedule": Script(
        compared=False,
        hybrid_async='param_groups[0]["lr"] of the optimizer was',
        has_schedule=True,
        does=change_option("lr", 0.001),
    ),
    "a decay": refused(change_option("weight_decay", 0.5), '"weight_decay"] of the optimizer was 0.3 and is 0.5', ""),
    "a scheduler": refused(own_scheduler, "the optimizer has a scheduler, but it steps in the server", ""),
    "a rate in ZeRO 3": refused(change_option("lr", 0.0), '["lr"] of the optimizer was 0.02 and is 0.0', "", stage=3),
    "a decay in ZeRO 3": refused(
        change_option("weight_decay", 0.5), '"weight_decay"] of the optimizer was 0.3 and is 0.5', "", stage=3
    ),
    **{
        f"a {when}-step hook": refused(hook(when), "the optimizer has a step hook, or a step()", "")
        for when in ("pre", "post")
    },
    "a step of the script's own": refused(wrap_step, "the optimizer has a step hook, or a step()", ""),
    "moments": refused(clear_state, "state of the optimizer was loaded or cleared during the run", ""),
    "all moments": refused(scale_moments, "moments", ""),
    "a moment by DeepSpeed's function": refused(set_moment, "exp_avg of hybrid_async's optimizer is in the server", ""),
    "a master by DeepSpeed's function": refused(set_master, "layers.0.weight", ""),
    "a moment in ZeRO 3": refused(set_moment, "exp_avg of hybrid_async's optimizer is in the server", "", stage=3),
    "a master in ZeRO 3": refused(set_master, "layers.0.weight", "", stage=3),
    "beside the masters of ZeRO 3": refused(
        change_beside_master, "layers.0.weight was changed after initialize, and its fp32 master was not", stage=3
    ),
    "loaded after initialize": refused(
        load_after_initialize, "", "was changed after initialize, and its fp32 master was not", stage=1
    ),
    "masters that DeepSpeed has decayed": Script(
        compared=False,
        half="fp16",
        does=lambda engine, run: engine.join_run(),  # in the step of zeros that it takes without ZeRO
    ),
    "loaded, and masters refreshed": refused(partial(load_after_initialize, refreshes=True), "", stage=1),
    "a state in ZeRO 1": refused(load_state, STATE, "", stage=1),
    "a state in ZeRO 3": refused(load_state, STATE, "", stage=3),
    "the schedule's steps": refused(steps_of_the_schedule, "engine.step(lr_kwargs=…): the schedule follows the run"),
    "a gradient in no exchange": Script(
        compared=False,
        local_sgd=UNSTEPPED,
        does=step,
        of_layers=True,  # hybrid_async leaves it as it is, as DeepSpeed
    ),
    "the loss's own backward": refused(own_backward, "loss.backward() on a loss of the engine", "", stage=1),
    "the loss's own backward in ZeRO 3": refused(own_backward, "", stage=3),
    "a gradient in no exchange, of the loss's own backward": Script(
        compared=False,
        hybrid_async="loss.backward() on a loss of the engine",
        local_sgd=UNSTEPPED,
        does=own_backward,
        of_layers=True,
        stage=1,
    ),
    "the optimizer": refused(read_optimizer, ""),
    "the loss scale": Script(compared=False, half="fp16", stage=1, does=read_scale),
    "a loss scale of the script's own": Script(
        compared=False,
        half="fp16",
        stage=1,
        hybrid_async="the script has set the loss scale of the optimizer",
        does=set_scale,
    ),
    **{f"one reduction in ZeRO {stage}": refused(coalesced, "", stage=stage) for stage in (1, 3)},
    "a sparse gradient": refused(sparse_gradient, "the gradient of layers.0.weight is sparse: make the layer", ""),
    "an average that is saved": refused(save_average, "", "save_16bit_model() saves the server's parameters"),
    "an average that is saved after the run": refused(save_average_later, ""),
    "a validation first": refused(validation_first, ""),
    "experts of another rank": Script(
        compared=False,
        hybrid_async="layers: ep_size is 2: every rank must have the whole model",
        local_sgd="layers: ep_size is 2: every rank must have the whole model",
        ep_size=2,
    ),
    "two micro-batches": Script(compared=False, does=two_micro_batches, micro_batches=2),
    **{f"the best checkpoint in ZeRO {stage}": refused(load_best, "", stage=stage) for stage in (0, 1, 3)},
    "the best checkpoint in bf16 in ZeRO 3": Script(compared=False, half="bf16", stage=3, does=load_best),
    "offloading": refused(offload, "", 'offload_states: with "async_training"'),
}


def train(net: Net, run: Run) -> None:
    assert isinstance(run.case, Script)
    if run.case.ep_size > 1:
        net.layers.ep_size = run.case.ep_size  # type: ignore[assignment]
    engine = deepspeed_engine.make(net, run, list(net.layers.parameters()) if run.case.of_layers else None)
    run.case.does(engine, run)
