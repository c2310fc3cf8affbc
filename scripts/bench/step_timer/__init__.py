"""A fairseq user directory that adds to every log record the mean time of an optimizer's step: ``optimizer_ms``."""

import time
from typing import Any

from fairseq.logging import metrics
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_started: dict[int, float] = {}


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _started[id(optimizer)] = time.perf_counter()


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    seconds = time.perf_counter() - _started[id(optimizer)]
    metrics.log_scalar("optimizer_ms", 1000 * seconds, priority=620, round=3)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
