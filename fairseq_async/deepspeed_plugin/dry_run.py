"""Makes the optimizer and the schedule of a JSON for one parameter, before anything starts, to find mistakes.

torch and DeepSpeed check little, and each value in its own way. So whatever fails here is a mistake, and a key without
which nothing fails is the one at fault.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from logging import LogRecord
from typing import Any

import torch
from deepspeed.utils import logger
from torch.nn import Parameter
from torch.optim import Optimizer

_PAIRS = ("betas",)


def fault_of_optimizer(kind: Callable[..., Optimizer], params: Mapping[str, Any]) -> str:
    """Returns what is wrong with the arguments of an optimizer, in words with the key; "" if nothing is."""
    return _fault(params, lambda given: kind([Parameter(torch.zeros(1))], **given))


def fault_of_schedule(kind: type, params: Mapping[str, Any]) -> str:
    """Returns what is wrong with the arguments of a schedule of DeepSpeed's or torch's; "" if nothing is."""
    try:
        inspect.signature(kind).bind(None, **params)
    except TypeError as error:
        return str(error)
    if any(isinstance(value, list) for value in params.values()):
        return ""  # one value for each parameter group, which nobody knows yet
    return _fault(params, lambda given: _take_a_step(kind, given))


def _take_a_step(kind: Callable[..., Any], params: Mapping[str, Any]) -> None:
    optimizer = torch.optim.Adam([Parameter(torch.zeros(1))], lr=1e-3)
    logger.addFilter(_nothing)  # DeepSpeed says it again when it makes the schedule itself
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer takes no steps
            kind(optimizer, **params).step()
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: LogRecord) -> bool:
    return False


def _fault(params: Mapping[str, Any], make: Callable[[Mapping[str, Any]], object]) -> str:
    error = _error(params, make)
    if error is None:
        return ""
    said = " ".join(str(error).split())
    if (parts := said.partition("unexpected keyword argument "))[1]:
        return f"there is no {parts[2].split()[0].rstrip('.')}"  # from Python 3.13 on, "Did you mean …?" follows
    for key, value in params.items():
        if _error({name: each for name, each in params.items() if name != key}, make) is None:
            if not isinstance(error, ValueError):  # torch has computed with whatever it was given
                said = "give two numbers" if key in _PAIRS else "give a number"
            return f'"{key}" is {value!r}: {said}'
    return said or type(error).__name__


def _error(params: Mapping[str, Any], make: Callable[[Mapping[str, Any]], object]) -> Exception | None:
    try:
        make(params)
    except Exception as error:  # whatever a wrong value leads to
        return error
    return None
