"""What DeepSpeed's functions and optimizers answer about masters and moments that are in the server."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.deepspeed_plugin.engines.loss_scale import LossScale
from fairseq_async.deepspeed_plugin.server_description import half_precision
from fairseq_async.errors import ConfigurationError, fail


def answer_for_masters(parameters: Iterable[Parameter], optimizer: Any) -> None:
    """Makes these parameters answer DeepSpeed's functions, which do nothing without a word where they find no master.

    A master is read as the parameter in fp32, and written by writing the parameter, which the run then finds changed.
    For moments the process ends with one line. The optimizer of the parameters, which is torch's, takes a script's call
    that would refresh masters, and refuses a state as ZeRO's optimizers have it.
    """
    optimizer.refresh_fp32_params = _refresh
    optimizer.register_load_state_dict_pre_hook(_check_state)
    for parameter in parameters:
        links = {
            "get_full_hp_param": partial(_get, parameter),
            "set_full_hp_param": partial(_set, parameter),
            "get_full_hp_grad": _no_gradient,
            "set_full_hp_grad": _no_gradient,
            "_hp_mapping": None,  # by which DeepSpeed's functions know that there is a master
        }
        for name, value in links.items():
            setattr(parameter, name, value)


def wrapped(optimizer: Any, config: dict[str, Any]) -> Any:
    """Returns an optimizer that wraps torch's, as DeepSpeed's in half precision and with ZeRO, for scripts that unwrap
    it; else the optimizer itself. All other attributes of the wrapper are those of the one that it wraps, whichever of
    the two they are set on."""
    if half_precision(config) is None and not (config.get("zero_optimization") or {}).get("stage", 0):
        return optimizer
    kind = type(optimizer)
    wrapper: Any = object.__new__(type(kind.__name__, (kind,), {"optimizer": property(lambda _: optimizer)}))
    wrapper.__dict__ = optimizer.__dict__
    return wrapper


def show_scale(optimizer: Any, scaler: LossScale, overflow: bool) -> None:
    """Gives torch's optimizer what scripts read of DeepSpeed's in half precision: the loss scale of the next step, and
    whether the last one overflowed."""
    optimizer.cur_scale = optimizer.loss_scale = scaler.value
    optimizer.overflow = overflow


def check_scale(optimizer: Any, scaler: LossScale) -> None:
    """Checks that the script has not set the scale that :func:`show_scale` shows.

    Raises:
        ConfigurationError: it has.
    """
    if not optimizer.cur_scale == optimizer.loss_scale == scaler.value:
        raise ConfigurationError(
            "the script has set the loss scale of the optimizer, which with hybrid_async only shows it: give "
            '"fp16": {"loss_scale": …} in the configuration'
        )


def check_unhooked(*optimizers: Any) -> None:
    """Checks that the script has given no optimizer step hooks, or a ``step``; schedulers wrap it, too.

    Raises:
        ConfigurationError: it has.
    """
    for optimizer in optimizers:
        hooks = (getattr(optimizer, f"_optimizer_step_{kind}_hooks", None) for kind in ("pre", "post"))
        if any(hooks) or ("step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")):
            raise ConfigurationError(
                "the optimizer has a step hook, or a step() of the script's own, but it steps in the server, and "
                "neither is called: change the gradients before engine.step(), or use local SGD"
            )


def refuse_moments(optimizer: Any) -> None:
    """Makes the optimizer of ZeRO 3, which has masters and no moments, end the process with one line for a moment, and
    for a state that a script loads."""
    find = optimizer._get_fp32_opt_state_partition  # of which all its functions get a master or a moment

    def find_master(parameter: Parameter, release_swap_buffers: bool, optim_state_key: str | None = None) -> object:
        _check(optim_state_key)
        return find(parameter, release_swap_buffers)

    optimizer._get_fp32_opt_state_partition = find_master
    optimizer.load_state_dict = _refuse_state


def accept_state(optimizer: Any) -> None:
    """Lets the optimizer of ZeRO 3 take a state again: after the run, DeepSpeed loads parameters by it."""
    vars(optimizer).pop("load_state_dict", None)


def _get(parameter: Parameter, optim_state_key: str | None = None) -> Tensor:
    _check(optim_state_key)
    return parameter.detach().to(torch.float32, copy=True)


@torch.no_grad()
def _set(parameter: Parameter, value: Tensor, optim_state_key: str | None = None) -> None:
    _check(optim_state_key)
    parameter.copy_(value.view_as(parameter))


def _check(optim_state_key: str | None) -> None:
    if optim_state_key is not None:
        fail(
            f"{optim_state_key} of hybrid_async's optimizer is in the server, which no script reads or sets: "
            "leave out safe_get_full_optimizer_state and its like"
        )


def _refresh() -> None:
    """Does nothing: the model's parameters are what the run begins with, or notices as changed."""


def _check_state(optimizer: object, state: object) -> None:
    if not isinstance(state, dict):
        _refuse_state(state)


def _refuse_state(*_: object, **__: object) -> NoReturn:
    fail(
        "optimizer.load_state_dict: a state of ZeRO's belongs to masters of a rank's own, and with hybrid_async the "
        "optimizer is in the server: load parameters alone, or go on with the run by fairseq-async launch --resume"
    )


def _no_gradient(*_: object) -> Tensor:
    raise ValueError("gradients are only there between backward and step")
