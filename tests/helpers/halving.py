"""SGD whose learning rate halves with each end of an epoch; as a module, a server with a slow disk."""

import os
import time
from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.programs.program import serve
from fairseq_async.server.service import Service
from scripts.faults.sgd_server import sgd_spec, updates_per_step
from tests.helpers.in_process import Connection, slot

LAYOUT = Layout.of([("w", torch.zeros(3))])


def halving_spec(updates_per_step: int = 2, **changes: Any) -> MethodSpec:
    """``changes`` are those of :func:`~scripts.faults.sgd_server.sgd_spec`."""
    return sgd_spec(updates_per_step, **changes)


class Halving(HybridAccumulation):
    """The rule is the schedule too, as that of fairseq is."""

    def __init__(self, parameters: Tensor, updates_per_step: int) -> None:
        super().__init__(torch.optim.SGD([parameters], lr=1.0, momentum=0.5), updates_per_step)
        self.ends, self.steps = 0, 0.0

    @property
    def learning_rate(self) -> float:
        return 0.5**self.ends

    def begin_epoch(self, epoch: int) -> None:
        """The rate follows the ends."""

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        self.ends += 1

    def apply(self, parameters: Tensor, update: Update) -> float:
        self.optimizer.param_groups[0]["lr"] = self.learning_rate
        return super().apply(parameters, update)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ends": self.ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.ends = state["ends"]


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Halving, EpochPlan]:
    rule = Halving(parameters, updates_per_step(spec))
    return rule, EpochPlan(rule, spec.max_epoch)


def hello(connection: Connection, described: dict[str, Any], remote: bool = False, **changes: Any) -> bool:
    message = {"kind": "hello", "spec": halving_spec(**changes).to_json(), "layout": described, "remote": remote}
    return connection.send(message)


def begun(service: Service, **changes: Any) -> Connection:
    """Worker 0, which has begun the run with zeros."""
    connection = Connection(service)
    connection.introduce(0)
    hello(connection, layout(), **changes)
    slot(service, 0).zero_()
    connection.send({"kind": "initialise", "restored": False})
    return connection


def layout() -> dict[str, Any]:
    """``LAYOUT`` as it is in a message."""
    rows = [{"name": s.name, "shape": list(s.shape), "dtype": s.dtype} for s in LAYOUT.segments]
    return {"segments": rows}


def slow_fsync(descriptor: int) -> None:
    time.sleep(1.0)
    FSYNC(descriptor)


FSYNC = os.fsync

if __name__ == "__main__":
    os.fsync = slow_fsync
    serve(build)
