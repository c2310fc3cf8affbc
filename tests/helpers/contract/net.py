"""A model whose training batches do what a case says, whichever front end trains it, and which notes what they find."""

import copy
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.run_files import snapshot_versions
from tests.helpers.waiting import wait_until

STEPS, ROWS, BATCH = 12, 32, 4  # the second epoch begins amid the run
HALF, WARM = 6, 5  # steps before a checkpoint, and those of a plain loop before the run
DEATH = 4  # steps before a worker or the server is killed
RATE, DECAY = 0.02, 0.3  # a parameter that is not left alone decays
METHODS = ("hybrid_async", "local_sgd")
LOCAL = {"outer": "sgd", "outer_lr": 1.0, "local_steps": 3}  # the server takes the only worker's steps as they are


@dataclass(frozen=True)
class Case:
    """What happens before the training batch of a number, and the error that ends each method; "" for none.

    Attributes:
        compared: whether one worker is compared with the plain loop.
        frozen: whether the last layer is, when the run begins.
        goes_on: the case from whose checkpoint, after half of the steps, the run goes on.
        steps_schedule: how often the script steps its scheduler after the step of a number, once by default; beside an
            engine or a Trainer, which do so too.
        rate: the one that the script sets by hand before the step of a number.
        joins: whether worker 1 was not announced.
        by_number: each batch is that of its number, whatever the sampler draws; a plain loop has those of all workers.
        options: in the words of PyTorch and DeepSpeed.
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
    steps_schedule: Callable[[int], int] | None = None
    rate: Callable[[int], float] | None = None
    brings_state: bool = False
    spoilt: tuple[int, ...] = ()  # batches whose loss is NaN
    joins: bool = False
    micro_batches: int = 1  # of a step, in DeepSpeed
    stage: int = 0  # of ZeRO
    half: str = ""  # DeepSpeed's key of half precision
    by_number: bool = False
    kills_server: bool = False
    methods: tuple[str, ...] = METHODS
    options: dict[str, Any] = field(default_factory=dict)


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

    def rows(self, worker: int | None = None) -> list[dict[str, Tensor]]:
        """The worker's own part."""
        return rows()[self.worker if worker is None else worker :: self.case.workers + self.case.joins]

    def batch(self, number: int) -> dict[str, Tensor]:
        """That of a loop without a sampler."""
        part = list[dict[str, Tensor]]()
        for worker in range(self.case.workers) if self.method == "plain" else [self.worker]:
            data = self.rows(worker)
            part += data[BATCH * number % len(data) :][:BATCH]
        return {name: torch.stack([row[name] for row in part]) for name in part[0]}

    @property
    def died_at(self) -> int:
        """The number of the batch before which this worker has died, and at which it goes on."""
        died = self.mark(f"died-{self.worker}")
        return int(died.read_text()) if died.exists() else 0

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
        self.norm = nn.BatchNorm1d(5) if "buffers" in run.case.options else nn.Identity()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
        self.layers[2].requires_grad_(not run.case.frozen)
        self.start = copy.deepcopy(self.state_dict())
        self.run, self.batches, self.trace = run, HALF if run.case.goes_on else run.died_at, list[Tensor]()
        self.head, self.without_gradient, self.factor = 0, False, 1.0
        if run.method == "plain":  # which leaves out what a run leaves out
            for each in filter(lambda parameter: parameter.requires_grad, self.parameters()):
                each.register_post_accumulate_grad_hook(self.leave_out)

    def leave_out(self, parameter: Tensor) -> None:
        if self.factor != 1.0:
            parameter.grad = None

    def flat(self) -> Tensor:
        """The parameters, and behind them the statistics."""
        statistics = [each for each in self.buffers() if each.is_floating_point()]
        return torch.cat([each.detach().flatten() for each in (*self.parameters(), *statistics)])

    @torch.no_grad()
    def loss_with(self, parameters: Tensor) -> float:
        """That of all rows, with the parameters of a trace."""
        nn.utils.vector_to_parameters(parameters, self.parameters())
        whole = {name: torch.stack([row[name] for row in rows()]) for name in ("inputs", "labels")}
        return float(self.eval()(**whole)["loss"])

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.trace.append(self.flat())
            self.factor = nan if self.batches in self.run.case.spoilt else 1.0
            self.run.case.before(self, self.batches)
            if self.run.case.by_number:
                inputs, labels = self.run.batch(self.batches).values()
            self.batches += 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.without_gradient):
            inputs = self.norm(inputs)
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


def begin(net: Net, number: int) -> None:
    """Worker 0 finds the parameters with which the run begins, for no other steps before."""
    if net.run.worker:
        net.run.wait("at-work-0")
    else:
        net.run.mark("at-work-0").touch()


def meet(net: Net, number: int) -> None:
    """Both workers are in the run before it ends."""
    begin(net, number)
    own = number - (HALF if net.run.case.goes_on else 0)
    if own == 1 and net.run.worker:
        net.run.mark("at-work-1").touch()
    if own == 2:
        net.run.wait(f"at-work-{1 - net.run.worker}")


def die(net: Net, number: int) -> None:
    """The last worker is killed amid the run."""
    dies = net.run.method != "plain" and net.run.worker == net.run.case.workers - 1
    if dies and number == DEATH and not net.run.died_at:
        net.run.mark(f"died-{net.run.worker}").write_text(str(number))
        os.kill(os.getpid(), signal.SIGKILL)


def die_and_be_waited_for(net: Net, number: int) -> None:
    begin(net, number)
    die(net, number)
    if net.run.died_at:
        net.run.mark("back").touch()
    elif not net.run.worker and number == DEATH:
        net.run.wait("back")


def kill_server(net: Net, number: int) -> None:
    """As soon as its last answer is in a snapshot."""
    if not net.run.worker and number == DEATH and net.run.method != "plain":
        version = DEATH if net.run.method == "hybrid_async" else DEATH // LOCAL["local_steps"]
        wait_until(lambda: snapshot_versions(net.run.path)[-1:] == [version], 60)
        os.kill(int(net.run.mark("server").read_text()), signal.SIGKILL)


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
    "a schedule stepped twice": Case(has_schedule=True, steps_schedule=lambda number: 2),
    "a schedule stepped per epoch": Case(has_schedule=True, steps_schedule=lambda number: number % 4 == 3),
    "a rate set by hand": Case(rate=lambda number: RATE * factor(number), hybrid_async='param_groups[0]["lr"] of the'),
    "saved": Case(has_schedule=True, saves=True),
    "gone on with": Case(has_schedule=True, goes_on="saved", compared=False),
    "brought": Case(has_schedule=True, brings_state=True),
    "NaN": Case(spoilt=(4, 7, 8)),
    "NaN for good": Case(spoilt=tuple(range(4, 99)), hybrid_async="NaN or Inf", local_sgd="NaN or Inf", compared=False),
}
TOGETHER = {
    "two": Case(meet, workers=2, compared=False),
    "one that joins": Case(meet, joins=True, compared=False),
    "one that is started again": Case(die_and_be_waited_for, workers=2, compared=False),
    "gone on with by two": Case(meet, workers=2, has_schedule=True, goes_on="saved", compared=False),
}
NUMBERED = partial(Case, by_number=True)
BARRIER = partial(NUMBERED, workers=2, methods=("hybrid_async",))
SOON = {"snapshot_seconds": 1e-3}
DEATHS = {
    "its worker is killed": NUMBERED(die),
    "its server is killed": NUMBERED(kill_server, kills_server=True, options=SOON),
    "two behind the barrier": BARRIER(options={"barrier": True}),
    "of two behind the barrier one is killed": BARRIER(die, options={"barrier": True}),
    "of two behind the barrier the server is killed": BARRIER(
        kill_server, kills_server=True, options={"barrier": True} | SOON
    ),
}
COMPRESSED = {"compressed": NUMBERED(options={"compress": "int8,pull=int8"})}
STATISTICS = {
    f"statistics, {whose}": Case(options={"buffers": whose}, methods=("local_sgd",))
    for whose in ("own", "average", "worker 0")
}
TOGETHER |= {
    f"{name} of two": replace(case, before=meet, workers=2, compared=False) for name, case in STATISTICS.items()
}
CASES: dict[str, Case] = MISSING | OUTSIDE | STATE | STATISTICS | TOGETHER | DEATHS | COMPRESSED


def settings(run: Run) -> dict[str, Any]:
    """The method's own options, in the words of PyTorch and DeepSpeed."""
    own = {} if "barrier" in run.case.options else {"updates_per_step": 1}
    return (LOCAL if run.method == "local_sgd" else own) | run.case.options


def flags_of(run: Run) -> list[str]:
    """The same as fairseq's."""
    given = {f"--{name.replace('_', '-')}": value for name, value in settings(run).items()}
    return [word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])]
