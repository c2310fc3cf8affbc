"""An optimizer whose state has copies of the parameters."""

from typing import Any

import torch
from torch.optim import SGD


class Anchored(SGD):
    """Takes the steps of SGD from a copy of the first parameters, as dual averaging does, and keeps an average."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in (each for each in group["params"] if each.grad is not None):
                state = self.state[each]
                if not state:
                    state |= {"step": 0, "sum": torch.zeros_like(each), "first": each.clone(), "slow": each.clone()}
                state["step"] += 1
                state["sum"] += group["lr"] * each.grad
                each.copy_(state["first"] - state["sum"])
                state["slow"].lerp_(each, 0.5)
