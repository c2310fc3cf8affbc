"""A worker whose updates can be counted in the parameters, for :mod:`scripts.faults.sgd_server`."""

from typing import Any

import torch

from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, Push, PushReply
from fairseq_async.worker.connection.client import Client
from scripts.faults.sgd_server import sgd_spec

LAYOUT = Layout.of([("weight", torch.zeros(8, 4)), ("bias", torch.zeros(5))])


def adder_spec(**changes: Any) -> MethodSpec:
    """Returns a method with no snapshots after the first; ``changes`` are as for :func:`sgd_spec`."""
    return sgd_spec(**{"snapshot_seconds": 1e6} | changes)


class Adder:
    """A worker each of whose updates adds 1 to every parameter, so that the parameters count the applied updates."""

    def __init__(self, client: Client, layout: Layout = LAYOUT, **changes: Any) -> None:
        self.client, self.parameters = client, torch.zeros(layout.size)
        spec = adder_spec(**changes)
        if not client.join(layout, spec).initialised:
            client.slot.zero_()
            client.initialise(None)
        self.sequence = client.join(layout, spec).sequence
        self.version = client.pull(self.parameters.copy_)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> PushReply:
        push = Push(self.sequence, self.version, 1.0)
        answer = self.client.push(lambda slot: slot.fill_(-1.0), push)
        self.sequence += 1
        self.version = self.client.pull(self.parameters.copy_)
        return answer
