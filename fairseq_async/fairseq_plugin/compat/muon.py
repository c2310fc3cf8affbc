"""``--inner-optimizer muon``: Muon for the matrices of the layers, and AdamW for the rest, in fairseq.

fairseq gives an optimizer parameters without names, and embeddings are known by their names: each parameter says itself
whose it is, in ``use_muon``, as DeepSpeed's parameters do.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch.nn import Parameter

from fairseq_async.algorithms.muon import MuonAdamW, is_muons
from fairseq_async.errors import ConfigurationError


def divide_for_muon(named: Iterable[tuple[str, Parameter]]) -> None:
    """Says of each parameter whether it is a matrix of a layer."""
    for name, parameter in named:
        vars(parameter)["use_muon"] = is_muons(name, parameter)


@dataclass
class MuonConfig(FairseqDataclass):
    """The flags of ``--inner-optimizer muon``."""

    muon_momentum: float = field(default=0.95, metadata={"help": "momentum of Muon"})
    muon_betas: Any = field(default=(0.9, 0.999), metadata={"help": "betas of AdamW, for what is no matrix"})
    weight_decay: float = field(default=0.0, metadata={"help": "weight decay"})
    lr: list[float] = II("optimization.lr")


@register_optimizer("muon", dataclass=MuonConfig)
class FairseqMuon(FairseqOptimizer):
    """fairseq's interface of :class:`~fairseq_async.algorithms.muon.MuonAdamW`, with one learning rate for both.

    Raises:
        ConfigurationError: the parameters are not those that :func:`divide_for_muon` has seen.
    """

    def __init__(self, cfg: Any, params: Iterable[Parameter]) -> None:
        super().__init__(cfg)
        given = list(params)
        if not all(hasattr(each, "use_muon") for each in given):
            raise ConfigurationError(
                "muon steps the fp32 matrices of a model, as the inner optimizer of hybrid_async or local_sgd: leave "
                "out --fp16 and --bf16 with local_sgd, and --optimizer muon"
            )
        groups = [
            {"params": [p for p in given if vars(p)["use_muon"] is use], "use_muon": use} for use in (True, False)
        ]
        self._optimizer = MuonAdamW([group for group in groups if group["params"]], **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The options with which a checkpoint goes on, as the flags have them."""
        lr = self.cfg.lr if isinstance(self.cfg.lr, float | int) else self.cfg.lr[0]
        betas = self.cfg.muon_betas
        return {
            "lr": float(lr),
            "weight_decay": float(self.cfg.weight_decay),
            "momentum": float(self.cfg.muon_momentum),
            "betas": tuple(map(float, ast.literal_eval(betas) if isinstance(betas, str) else betas)),
            "adjust_lr_fn": "match_rms_adamw",
        }
