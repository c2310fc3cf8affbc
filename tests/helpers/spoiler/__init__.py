"""A fairseq user directory: our plugin, and a criterion's loss that is NaN for the first SPOILT_BATCHES batches."""

import os
from typing import Any

from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion

import fairseq_async.fairseq_plugin  # noqa: F401

_batches = 0
_forward = LabelSmoothedCrossEntropyCriterion.forward


def _spoilt(self: Any, model: Any, sample: Any, reduce: bool = True) -> Any:
    global _batches
    loss, sample_size, logging_output = _forward(self, model, sample, reduce)
    if model.training:
        _batches += 1
        if _batches <= int(os.environ["SPOILT_BATCHES"]):
            loss = loss * float("nan")
    return loss, sample_size, logging_output


LabelSmoothedCrossEntropyCriterion.forward = _spoilt
