"""An optimizer round another one of fairseq's, which it names by ``--inner-optimizer``."""

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
from fairseq.optim import OPTIMIZER_REGISTRY, FairseqOptimizer, build_optimizer
from fairseq.optim.fused_lamb import FairseqLAMB
from torch.nn import Parameter

from fairseq_async.algorithms.lamb import Lamb


class WrappedOptimizer(FairseqOptimizer):
    """Passes everything on to the inner optimizer.

    Attributes:
        skip: do not take this step.
    """

    def __init__(self, args: Namespace, params: Iterable[Parameter]) -> None:
        super().__init__(args)
        self.skip = False
        self.inner = build_inner(args, list(params))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.inner.optimizer

    @property
    def optimizer_config(self) -> dict[str, Any]:
        return dict(self.inner.optimizer_config)

    def __getstate__(self) -> Any:
        return self.inner.__getstate__()

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        self.inner.load_state_dict(state_dict, optimizer_overrides)

    def step(self, closure: Any = None, scale: float = 1.0, groups: Any = None) -> None:
        if not self.skip:
            self.inner.step(closure, scale, groups)

    @property
    def supports_flat_params(self) -> bool:
        return bool(self.inner.supports_flat_params)


class TorchLAMB(FairseqLAMB):
    """fairseq's LAMB where apex, with which it is compiled for GPUs, is not there."""

    def __init__(self, args: Namespace, params: list[Parameter]) -> None:
        self.args = args
        self._optimizer = Lamb(params, **self.optimizer_config)


def build_inner(args: Namespace, params: list[Parameter]) -> FairseqOptimizer:
    """The optimizer that ``--inner-optimizer`` names, with its own flags."""
    given = {name: _as_on_a_command_line(name, value) for name, value in vars(args).items()}
    inner = Namespace(**given | {"optimizer": args.inner_optimizer})
    try:
        return build_optimizer(inner, params)
    except ImportError:
        if OPTIMIZER_REGISTRY[args.inner_optimizer] is not FairseqLAMB:
            raise
        return TorchLAMB(inner, params)


def _as_on_a_command_line(name: str, value: Any) -> Any:
    """fairseq takes no tuple for betas here."""
    return repr(tuple(value)) if name.endswith("_betas") and not isinstance(value, str) else value
