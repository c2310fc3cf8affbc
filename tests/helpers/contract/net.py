"""A model whose training batches do what a case says, whichever front end trains it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

STEPS, ROWS, BATCH = 12, 32, 4  # the second epoch begins amid the run
RATE, DECAY = 0.02, 0.3  # a parameter that is not left alone decays
LOCAL = {"outer": "sgd", "outer_lr": 1.0, "local_steps": 3}  # the server takes the only worker's steps as they are


class Net(nn.Module):
    """Layers, and heads of which a batch uses one."""

    def __init__(self, case: "Case") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(5, 1) for _ in range(3))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
        self.layers[2].requires_grad_(not case.frozen)
        self.start = copy.deepcopy(self.state_dict())
        self.case, self.batches = case, 0
        self.head, self.without_gradient = 0, False

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.case.before(self, self.batches)
            self.batches += 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.without_gradient):
            for layer in self.layers:
                inputs = inputs + layer(inputs).tanh()
        return {"loss": nn.functional.mse_loss(self.heads[self.head](inputs), labels)}


def rows() -> list[dict[str, Tensor]]:
    inputs = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(5))
    return [{"inputs": each, "labels": each.sum(0, keepdim=True).sin()} for each in inputs]


def batches() -> list[dict[str, Tensor]]:
    """Those of a loop without a sampler of its own."""
    data = rows()
    parts = [data[BATCH * n % ROWS :][:BATCH] for n in range(STEPS)]
    return [{name: torch.stack([row[name] for row in part]) for name in part[0]} for part in parts]


@dataclass(frozen=True)
class Case:
    """What happens before the training batch of a number, and the error that ends each method; "" for none."""

    before: Callable[[Net, int], object] = lambda net, number: None
    hybrid_async: str = ""
    local_sgd: str = ""
    frozen: bool = field(default=False, kw_only=True)  # whether the last layer is, when the run begins


def switch(net: Net, number: int) -> None:
    net.head = number * number % 3  # 0 and 1; the third is in no loss


def warm_up(net: Net, number: int) -> None:
    net.without_gradient = number < 5


@torch.no_grad()
def clamp(net: Net, number: int) -> None:
    for parameter in net.parameters():
        parameter.clamp_(-0.2, 0.2)


def load(net: Net, number: int) -> None:
    if number == 4:
        net.load_state_dict(net.start)


def swap(net: Net, number: int) -> None:
    """As a script that evaluates a moving average and puts the weights back."""
    own = copy.deepcopy(net.state_dict())
    net.load_state_dict(net.start)
    net.load_state_dict(own)


def make_anew(net: Net, number: int) -> None:
    if number == 4:
        net.layers[1] = nn.Linear(5, 5)


def unfreeze(net: Net, number: int) -> None:
    net.layers[2].requires_grad_(number >= 4)


MISSING = {
    "heads that are switched": Case(switch),
    "a body that is frozen at first": Case(warm_up),
    "a layer that is frozen": Case(frozen=True),
}
TAKEN = "is not as this worker took it from the server"
OUTSIDE = {
    "clamped": Case(clamp, TAKEN),
    "loaded": Case(load, TAKEN),
    "swapped and put back": Case(swap),
    "a layer made anew": Case(make_anew, "layers.1.", "layers.1."),
    "a layer unfrozen": Case(unfreeze, "layers.2.", "layers.2.", frozen=True),
}
CASES = MISSING | OUTSIDE
