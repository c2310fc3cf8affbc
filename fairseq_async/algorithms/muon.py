"""Muon for the matrices of a model and AdamW for the rest, in one optimizer: most trainers take one alone."""

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

Loss = TypeVar("Loss")
Muon: Any = getattr(torch.optim, "Muon", None)  # not in every version of torch that we take

# In names of parameters: embeddings and output layers, whose rows are words.
WORDS = ("embed", "wte", "wpe", "lm_head", "output_projection")


def is_muons(name: str, parameter: Tensor, words: Collection[str] = WORDS) -> bool:
    """Whether Muon is made for a parameter: a matrix, and no embedding or output layer, by its name.

    Args:
        words: parts of names, in lower case, that only embeddings and output layers have.
    """
    return parameter.ndim == 2 and not any(word in name.lower() for word in words)


def muon_groups(named: Iterable[tuple[str, Tensor]], words: Collection[str] = WORDS) -> list[dict[str, Any]]:
    """Returns the groups of :class:`MuonAdamW`: the matrices that :func:`is_muons` finds, and all other parameters.

    Args:
        named: as ``model.named_parameters()`` returns them; those that are not trained are left out.
    """
    trained = [(name, each, is_muons(name, each, words)) for name, each in named if each.requires_grad]
    groups = [{"params": [p for _, p, own in trained if own is use], "use_muon": use} for use in (True, False)]
    return [group for group in groups if group["params"]]


class MuonAdamW(Optimizer):
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) and AdamW, each for groups of its own.

    A group with ``use_muon`` takes the steps of ``torch.optim.Muon``, to the bit, and another group those of
    ``torch.optim.AdamW``. Example::

        MuonAdamW(muon_groups(model.named_parameters()), lr=1e-3, adjust_lr_fn="match_rms_adamw")

    Args:
        params: groups with ``use_muon``, or matrices, which are all Muon's.
        lr: learning rate. With ``adjust_lr_fn="match_rms_adamw"`` one rate suits both, as Liu et al. 2025
            (arXiv 2502.16982) say: a step of Muon is as long there as one of AdamW.
        weight_decay: decoupled weight decay.
        momentum: of Muon.
        betas: of AdamW.
        eps: of AdamW; and of Muon, for the norm of a matrix.
        nesterov: whether Muon's momentum is Nesterov's.
        ns_steps: Newton-Schulz iterations of Muon.
        adjust_lr_fn: how Muon's step depends on the shape of a matrix, as in ``torch.optim.Muon``.

    Raises:
        ValueError: a group of Muon has a tensor that is no matrix.
        ImportError: this version of torch has no Muon.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        use_muon: bool = True,
    ) -> None:
        if Muon is None:
            raise ImportError(f"torch {torch.__version__} has no Muon: install torch 2.9 or newer")
        sample = [torch.zeros(1, 1)]
        own = {"weight_decay": weight_decay, "lr": lr, "eps": eps}
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        checked = AdamW(sample, betas=betas, **own), Muon(sample, **own, **muon)  # type: ignore[arg-type]
        super().__init__(params, checked[0].defaults | checked[1].defaults | {"use_muon": use_muon})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as any optimizer does; one with ``use_muon`` may have matrices alone."""
        super().add_param_group(param_group)
        _check(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """Takes one step; a closure computes the gradients first, and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, use in ((Muon, True), (AdamW, False)):
            half = kind.__new__(kind)  # with the same state; threads may step parts of the groups at the same time
            groups = [group for group in self.param_groups if group["use_muon"] is use]
            vars(half).update(defaults=self.defaults, state=self.state, param_groups=groups)
            for group in groups:
                _check(group)  # again: ZeRO and fp16 put flat tensors into a group
            inspect.unwrap(kind.step)(half)  # without the hooks of a step, which are this optimizer's
        return loss


def _check(group: dict[str, Any]) -> None:
    for parameter in group["params"] if group["use_muon"] else ():
        if parameter.ndim != 2:
            raise ValueError(
                f"MuonAdamW: a tensor of shape {tuple(parameter.shape)} in a group with use_muon, which takes whole "
                "matrices: divide parameters by muon_groups(), and give no ZeRO and no flat fp32 copies"
            )
