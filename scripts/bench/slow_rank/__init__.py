"""A fairseq user directory whose task makes ranks of a synchronous run slower.

``--user-dir scripts/bench/slow_rank --task slow_translation --slowdown 1,4`` trains as ``--task translation`` does. But
rank 1 sleeps after each batch's gradient, before fairseq reduces it, three times as long as forward and backward took.
``fairseq-async launch --slowdown 1,4`` does the same to an asynchronous worker; there the time that is multiplied also
includes the gradient's norm, so the synchronous run is slowed down a little less.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask


@dataclass
class SlowTranslationConfig(TranslationConfig):
    slowdown: str = field(default="", metadata={"help": "a factor for each rank: 1,4 makes rank 1 four times slower"})


@register_task("slow_translation", dataclass=SlowTranslationConfig)
class SlowTranslationTask(TranslationTask):
    """Translation in which each rank is slowed down by its factor of ``--slowdown``."""

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = super().train_step(*args, **kwargs)
        factor = float(self.cfg.slowdown.split(",")[torch.distributed.get_rank()])
        time.sleep((factor - 1.0) * (time.perf_counter() - started))
        return result
