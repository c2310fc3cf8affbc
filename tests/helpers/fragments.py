"""Workers that exchange three tensors in fragments, with plain SGD on a parabola."""

from pathlib import Path
from typing import Any

import torch

from fairseq_async.method.spec import MethodSpec, local_sgd_spec
from fairseq_async.options.config import DelayedNesterovOptions
from fairseq_async.protocol import Layout
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.overlap import local_sgd_worker
from fairseq_async.worker.replica import TensorReplica

SIZES = {"a": 1, "b": 3, "c": 2}  # three fragments: a tensor each
TARGETS = torch.tensor([[1.0, -2.0, 0.5, 3.0, -1.0, 2.0], [0.0, 1.0, 3.0, -2.0, 0.5, 1.0]])  # one a worker
INNER_LR = 0.1
LAYOUT = Layout.of([(name, torch.zeros(size)) for name, size in SIZES.items()])


def streaming(delay: int = 1, **options: Any) -> DelayedNesterovOptions:
    """H = 6 and P = 3: one fragment every two steps."""
    return DelayedNesterovOptions(**{"local_steps": 6, "fragments": 3, "fragment_delay": delay} | options)


class Descent:
    """|θ − target|²/2, whose gradient is θ − target; worker 0 brings zeros.

    Attributes:
        theta: all parameters, flat.
    """

    def __init__(
        self,
        client: Client,
        options: DelayedNesterovOptions,
        workers: int,
        spec: MethodSpec | None = None,
        state: Path | None = None,
    ) -> None:
        self.theta = torch.zeros(LAYOUT.size)
        self.target = TARGETS[client.worker % 2]
        named = [(s.name, view) for s, view in zip(LAYOUT.segments, LAYOUT.views(self.theta), strict=True)]
        self.local: LocalSGDWorker = local_sgd_worker(client, TensorReplica(named), options)
        welcome = self.local.join(spec or local_sgd_spec(options, workers, [], None, {}))
        if not welcome.initialised:
            welcome = self.local.bring_parameters(None if state is None else str(state))
        self.local.begin(welcome)

    def step(self) -> bool:
        self.theta -= INNER_LR * (self.theta - self.target)
        return self.local.step(0.01, float(self.theta[0]))

    def run(self) -> None:
        while not self.local.finished:
            self.step()
