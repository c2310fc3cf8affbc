"""A fairseq user directory whose task takes a fixed time for each batch, whatever the machine does at the time.

``--user-dir scripts/bench/slow_batches --task timed_translation --seconds-per-batch 0.3,0.9`` trains as ``--task
translation`` does, but sleeps after each batch's gradient: rank 0, or worker 0 of an asynchronous run, for 0.3 seconds.
With ``--slower-from 40``, the last worker sleeps four times as long from its 40th batch on.
"""

import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

import fairseq_async.fairseq_plugin  # noqa: F401 - registers the optimizers
from fairseq_async.environment import WORKER


@dataclass
class TimedTranslationConfig(TranslationConfig):
    seconds_per_batch: str = field(default="", metadata={"help": "seconds of each rank or worker, with commas"})
    slower_from: int = field(default=0, metadata={"help": "batch of the last worker from which it is 4 times slower"})


@register_task("timed_translation", dataclass=TimedTranslationConfig)
class TimedTranslationTask(TranslationTask):
    """Translation in which each batch takes a worker its number of ``--seconds-per-batch`` longer."""

    batches = 0

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train_step(*args, **kwargs)
        self.batches += 1
        ranks = torch.distributed.is_initialized()
        worker = torch.distributed.get_rank() if ranks else int(os.environ[WORKER])
        seconds = [float(each) for each in self.cfg.seconds_per_batch.split(",")]
        slower = worker == len(seconds) - 1 and 0 < self.cfg.slower_from <= self.batches
        time.sleep(seconds[worker] * (4 if slower else 1))
        return result
