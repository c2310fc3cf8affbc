"""``--optimizer local_sgd``: fairseq's own optimizer on each worker, and an exchange every H steps."""

import sys
from argparse import ArgumentParser
from typing import Any

from fairseq.optim import FairseqOptimizer, FP16Optimizer, register_optimizer
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.fairseq_plugin import local_options
from fairseq_async.worker.replica import MasterReplica, Replica, TensorReplica


@register_optimizer("local_sgd")
class LocalSGDFlags(FairseqOptimizer):
    """Carries the flags: the optimizer that is built is the inner one, by :class:`LocalTrainer`."""

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        from fairseq_async.fairseq_plugin.session import attach

        local_options.add_arguments(parser)
        attach(sys.modules)


def replica_of(named: list[tuple[str, Parameter]], optimizer: FairseqOptimizer) -> Replica:
    """The parameters that fairseq's optimizer steps: fp32 masters where it keeps them, else the model's own."""
    if not isinstance(optimizer, FP16Optimizer):
        return TensorReplica(named)
    masters: Any = optimizer.fp32_params
    if isinstance(masters, dict):  # one flat master a device, of which there is one
        (flat,) = masters.values()
        parts: list[Tensor] = list(flat.data.split([parameter.numel() for _, parameter in named]))
    else:
        parts = [master.data.view(-1) for master in masters]
    return MasterReplica(named, [(0, part) for part in parts])
