"""Small runs whose every number is decided beforehand, so that two of them can be compared bit by bit."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Rule
from fairseq_async.server import Layout, ServerClient
from fairseq_async.server.plan import Passes, Plan
from fairseq_async.worker import outer
from tests.sgd_server import Constant

LAYOUT = Layout.of([("weight", torch.zeros(8, 4)), ("bias", torch.zeros(5))])
_COMMON = {"last_version": None, "max_epoch": 0, "barrier": 0, "snapshot_seconds": 1e6}
ADDER: dict[str, Any] = _COMMON | {"updates_per_step": 1}  # for tests.sgd_server
HYBRID: dict[str, Any] = _COMMON | {"method": "hybrid", "updates_per_step": 3}
LOCAL: dict[str, Any] = _COMMON | {
    "method": "local_sgd",
    "outer": "delayed_nesterov",
    "workers": 2,
    "local_steps": 5,
    "total_steps": 0,
    "dynamic_local_steps": True,
    "shards": [],
    "seed": 1,
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "delay": 2,
    "c": 0.0,
}


def build(method: dict[str, Any], layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]:
    """Adam behind an accumulator, or delayed Nesterov."""
    if method["method"] == "local_sgd":
        return outer.build(method, layout, parameters)
    rule = HybridAccumulation(torch.optim.Adam([parameters], lr=0.1), method["updates_per_step"], clip_norm=2.0)
    return rule, Passes(Constant(), 0)


class Worker:
    """Pushes noise that is its own and its update's, always the same."""

    def __init__(self, client: ServerClient, method: dict[str, Any]) -> None:
        self.client, self.local = client, method["method"] == "local_sgd"
        self.parameters = torch.empty(LAYOUT.size)
        self.sequence = self.version = 0
        welcome = client.join(LAYOUT, method)
        if not welcome["initialised"]:
            client.slot.copy_(torch.linspace(-1, 1, LAYOUT.size))
            client.initialise(None)
        self.pull()

    def pull(self) -> None:
        self.version = self.client.pull(self.parameters.copy_)

    def push(self) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(1000 * self.client.worker + self.sequence)
        delta = torch.randn(LAYOUT.size, generator=noise) + 0.1 * self.parameters
        answer = self.client.push(
            lambda slot: slot.copy_(delta),
            sequence=self.sequence,
            base_version=self.version,
            weight=float(self.sequence % 3 + 1),
            report={"local_steps": 5, "step_seconds": 0.1 * (1 + self.client.worker), "position": self.sequence},
            wait=self.local,
        )
        self.sequence += 1
        return answer


class Adder:
    """Adds 1 to every parameter with each of its updates, so that the parameters count what was applied."""

    def __init__(self, client: ServerClient, layout: Layout = LAYOUT, **method: Any) -> None:
        self.client, self.parameters = client, torch.zeros(layout.size)
        welcome = client.join(layout, ADDER | method)
        if not welcome["initialised"]:
            client.slot.zero_()
            client.initialise(None)
        self.sequence = client.join(layout, ADDER | method)["sequence"]
        self.version = client.pull(self.parameters.copy_)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self, wait: bool = False) -> dict[str, Any]:
        message = {"sequence": self.sequence, "base_version": self.version, "weight": 1.0, "report": {}, "wait": wait}
        answer = self.client.push(lambda slot: slot.fill_(-1.0), **message)
        self.sequence += 1
        self.version = self.client.pull(self.parameters.copy_)
        return answer


def train(workers: Sequence[Worker], rounds: int) -> None:
    """In turn: what a server does depends on the order."""
    for _ in range(rounds):
        for worker in workers:
            worker.push()
            worker.pull()


def digest(value: Any) -> str:
    """Of tensors, numbers and whatever holds them, to the bit."""
    found = hashlib.sha256()
    for part in _parts(value):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> list[bytes]:
    if isinstance(value, Tensor):
        return [
            str(value.dtype).encode(),
            str(tuple(value.shape)).encode(),
            value.detach().contiguous().numpy().tobytes(),
        ]
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=repr) for part in (repr(key).encode(), *_parts(value[key]))]
    if isinstance(value, list | tuple):
        return [part for each in value for part in _parts(each)]
    return [repr(value).encode()]


def read_snapshot(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
