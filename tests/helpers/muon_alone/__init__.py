"""A fairseq user directory: our plugin, and a plain trainer that says of each parameter whether it is Muon's."""

from fairseq.trainer import Trainer

import fairseq_async.fairseq_plugin  # noqa: F401
from fairseq_async.fairseq_plugin.compat.muon import divide_for_muon
from fairseq_async.fairseq_plugin.compat.optimizers import trainable_parameters

build = Trainer._build_optimizer


def _build(trainer: Trainer) -> None:
    divide_for_muon(trainable_parameters(trainer.model, trainer.criterion))
    build(trainer)


Trainer._build_optimizer = _build
