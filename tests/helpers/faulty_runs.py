"""Small runs whose every number is decided beforehand, so that two of them can be compared bit by bit."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Rule
from fairseq_async.method.spec import MethodSpec, ServerSettings, local_sgd_spec
from fairseq_async.options.compression import parse
from fairseq_async.options.config import DelayedNesterovOptions
from fairseq_async.protocol import Layout, Push, PushReply, Report
from fairseq_async.server.plan import EpochPlan, Plan
from fairseq_async.server.programs import local_sgd_main as outer
from fairseq_async.worker.connection.client import Client
from scripts.faults.adder import LAYOUT, adder_spec
from scripts.faults.sgd_server import Constant, updates_per_step

HYBRID = adder_spec(updates_per_step=3)
_OPTIONS = DelayedNesterovOptions(local_steps=5, dynamic_local_steps=True, delay=2, c=0.0, total_steps=0, seed=1)
LOCAL = replace(local_sgd_spec(_OPTIONS, 2, [], None, {}), server=ServerSettings(snapshot_seconds=1e6), publishes=True)
_CODECS = parse("topk:chunk=8,keep=2,pull=int8:block=16")
HYBRID_COMPRESSED = replace(HYBRID, options=HYBRID.options | {"compress": _CODECS.model_dump()})
LOCAL_COMPRESSED = replace(LOCAL, options=LOCAL.options | {"compress": _CODECS.model_dump()})


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]:
    """Adam behind an accumulator, or delayed Nesterov."""
    if spec.method == "local_sgd":
        return outer.build(spec, layout, parameters)
    rule = HybridAccumulation(torch.optim.Adam([parameters], lr=0.1), updates_per_step(spec), clip_norm=2.0)
    return rule, EpochPlan(Constant(), 0)


class Worker:
    """Pushes noise that is its own and its update's, always the same.

    Attributes:
        total: the sum of its updates, in float64.
    """

    def __init__(self, client: Client, spec: MethodSpec) -> None:
        self.client, self.local = client, spec.method == "local_sgd"
        self.parameters = torch.empty(LAYOUT.size)
        self.sequence = self.version = 0
        self.total = torch.zeros(LAYOUT.size, dtype=torch.float64)
        if not client.join(LAYOUT, spec).initialised:
            client.slot.copy_(torch.linspace(-1, 1, LAYOUT.size))
            client.initialise(None)
        self.pull()

    def pull(self) -> None:
        """What the next update depends on, as it is given to those that go on from it."""
        self.version = self.client.pull(self.parameters.copy_, starts=True)

    def push(self) -> PushReply:
        noise = torch.Generator().manual_seed(1000 * self.client.worker + self.sequence)
        delta = torch.randn(LAYOUT.size, generator=noise) + 0.1 * self.parameters
        seconds = 0.1 * (1 + self.client.worker)
        report = Report(local_steps=5, step_seconds=seconds, position={"seen": self.sequence})
        weight = float(self.sequence % 3 + 1)
        push = Push(self.sequence, self.version, weight, report)
        answer = self.client.push(lambda slot: slot.copy_(delta), push)
        self.sequence += 1
        self.total += delta
        return answer

    def residual(self) -> Tensor:
        """What its updates had that was not sent; zeros where everything is."""
        compressor = self.client.compressor
        return (
            torch.zeros(LAYOUT.size)
            if compressor is None
            else compressor.state_dict()["parts"][0]["feedback"]["residual"]
        )


def train(workers: Sequence[Worker], rounds: int) -> None:
    """In turn: what a server does depends on the order."""
    for _ in range(rounds):
        for worker in workers:
            worker.push()
            worker.pull()
