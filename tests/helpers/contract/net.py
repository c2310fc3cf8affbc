"""A model whose training batches do what a case says, whichever front end trains it, and which notes what they find."""

import copy
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.waiting import wait_until

STEPS, ROWS, BATCH = 12, 32, 4  # the second epoch begins amid the run
HALF, WARM = 6, 5  # steps before a checkpoint, and those of a plain loop before the run
RATE, DECAY = 0.02, 0.3  # a parameter that is not left alone decays
LOCAL = {"outer": "sgd", "outer_lr": 1.0, "local_steps": 3}  # the server takes the only worker's steps as they are


@dataclass(frozen=True)
class Case:
    """What happens before the training batch of a number, and the error that ends each method; "" for none.

    Attributes:
        compared: whether one worker is compared with the plain loop.
        frozen: whether the last layer is, when the run begins.
        goes_on: the case from whose checkpoint, after half of the steps, the run goes on.
        steps_schedule: how often a loop of the script's own does so in a step.
        joins: whether worker 1 was not announced.
    """

    before: Callable[["Net", int], object] = lambda net, number: None
    hybrid_async: str = ""
    local_sgd: str = ""
    compared: bool = True
    workers: int = 1
    frozen: bool = False
    saves: bool = False
    goes_on: str = ""
    has_schedule: bool = False
    steps_schedule: int = 1
    brings_state: bool = False
    spoilt: tuple[int, ...] = ()  # batches whose loss is NaN
    joins: bool = False
    micro_batches: int = 1  # of a step, in DeepSpeed


@dataclass(frozen=True)
class Run:
    """One worker of a run of a case: ``path`` is the run's directory, and begins the names of its other files."""

    case: Case
    method: str
    path: Path
    worker: int = 0

    @property
    def steps(self) -> int:
        """Those of the plain loop, which takes no step for a batch of NaN."""
        return STEPS + len(self.case.spoilt)

    @property
    def needs(self) -> tuple[str, str]:
        """The case and method of the run whose checkpoint this one may load."""
        return ("saved", "plain") if self.case.brings_state else (self.case.goes_on, self.method)

    @property
    def before(self) -> Path:
        return self.path.with_name(".".join(self.needs))

    def rows(self) -> list[dict[str, Tensor]]:
        """The worker's own part."""
        return rows()[self.worker :: self.case.workers + self.case.joins]

    def batch(self, number: int) -> dict[str, Tensor]:
        """That of a loop without a sampler."""
        data = self.rows()
        part = data[BATCH * number % len(data) :][:BATCH]
        return {name: torch.stack([row[name] for row in part]) for name in part[0]}

    def mark(self, text: str) -> Path:
        return Path(f"{self.path}-{text}")

    def wait(self, text: str) -> None:
        wait_until(self.mark(text).exists, 60)


def rows() -> list[dict[str, Tensor]]:
    inputs = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(5))
    return [{"inputs": each, "labels": each.sum(0, keepdim=True).sin()} for each in inputs]


def factor(step: int) -> float:
    return float(0.9**step)


class Net(nn.Module):
    """Layers, and heads of which a batch uses one; ``trace`` has the parameters that each training batch has found."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(5, 1) for _ in range(3))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
        self.layers[2].requires_grad_(not run.case.frozen)
        self.start = copy.deepcopy(self.state_dict())
        self.run, self.batches, self.trace = run, HALF if run.case.goes_on else 0, list[Tensor]()
        self.head, self.without_gradient, self.factor = 0, False, 1.0
        if run.method == "plain":  # which leaves out what a run leaves out
            for each in filter(lambda parameter: parameter.requires_grad, self.parameters()):
                each.register_post_accumulate_grad_hook(self.leave_out)

    def leave_out(self, parameter: Tensor) -> None:
        if self.factor != 1.0:
            parameter.grad = None

    def flat(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.parameters()])

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.trace.append(self.flat())
            self.factor = nan if self.batches in self.run.case.spoilt else 1.0
            self.run.case.before(self, self.batches)
            self.batches += 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.without_gradient):
            for layer in self.layers:
                inputs = inputs + layer(inputs).tanh()
        return {"loss": self.factor * nn.functional.mse_loss(self.heads[self.head](inputs), labels)}


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


def step_in_backward(net: Net, number: int) -> None:
    """Each parameter has an optimizer of its own, which steps as soon as the gradient is there."""
    for parameter in net.parameters() if number == 4 else ():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())  # type: ignore[misc]


def step_another(net: Net, number: int) -> None:
    """An optimizer that the script makes anew."""
    if number == 4:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        other = torch.optim.SGD(net.parameters(), lr=0.1)
        other.step()
        other.zero_grad()


def meet(net: Net, number: int) -> None:
    """Both workers are in the run before it ends."""
    own = number - (HALF if net.run.case.goes_on else 0)
    if own == (1 if net.run.worker else 0):
        net.run.mark(f"at-work-{net.run.worker}").touch()
    if own == 2:
        net.run.wait(f"at-work-{1 - net.run.worker}")


def die_once(net: Net, number: int) -> None:
    """Worker 1 is killed amid the run, and worker 0 waits until it has come back."""
    died = net.run.mark("died")
    if net.run.worker and died.exists():
        net.run.mark("back").touch()
    elif net.run.worker and number == 4:
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    elif not net.run.worker and number == 4:
        net.run.wait("back")


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
    "another optimizer's step": Case(step_another, "SGD", "SGD"),
    "steps in backward hooks": Case(step_in_backward, "SGD", "SGD"),
}
STATE = {
    "a schedule stepped twice": Case(has_schedule=True, steps_schedule=2),
    "saved": Case(has_schedule=True, saves=True),
    "gone on with": Case(has_schedule=True, goes_on="saved", compared=False),
    "brought": Case(has_schedule=True, brings_state=True),
    "NaN": Case(spoilt=(4, 7, 8)),
    "NaN for good": Case(spoilt=tuple(range(4, 99)), hybrid_async="NaN or Inf", local_sgd="NaN or Inf", compared=False),
}
TOGETHER = {
    "two": Case(meet, workers=2, compared=False),
    "one that joins": Case(meet, joins=True, compared=False),
    "one that is started again": Case(die_once, workers=2, compared=False),
    "gone on with by two": Case(meet, workers=2, has_schedule=True, goes_on="saved", compared=False),
}
CASES: dict[str, Case] = MISSING | OUTSIDE | STATE | TOGETHER


def settings(run: Run) -> dict[str, Any]:
    """The method's own options, in the words of PyTorch and DeepSpeed."""
    return LOCAL if run.method == "local_sgd" else {"updates_per_step": 1}
