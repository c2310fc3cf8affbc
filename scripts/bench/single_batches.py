"""An experiment's model and data in single batches, for claims about how many of them may make a step."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.simulation import experiment as experiments  # noqa: E402
from fairseq_async.simulation import problem as problems  # noqa: E402
from fairseq_async.worker.shards import ShardOrder  # noqa: E402


class SingleBatches:
    """Fresh parameters, the batches and what is drawn in a pass, as by dropout, follow from the seed."""

    def __init__(self, path: Path, seed: int) -> None:
        experiment = experiments.read(path)
        settings, directory = experiment.head.problem, path.resolve().parent
        self.problem = problems.build(settings, directory, seed, torch.device("cpu"))
        self.size, self.seed = experiment.head.batch_size, seed
        self._order = ShardOrder([self.problem.samples], seed)
        self._start = copy.deepcopy(self.problem.model.state_dict())

    def fresh(self) -> nn.Module:
        """The one model, as it was in the beginning."""
        self.problem.model.load_state_dict(self._start)
        return self.problem.model

    def loss(self, number: int) -> Tensor:
        """Of single batch ``number``, in nats a token."""
        torch.manual_seed(self.seed * 10_000_019 + number)
        indices = self._order.indices(0, number * self.size, self.size)
        return self.problem.loss(self.problem.batch(indices))[0]

    def gradients(self, numbers: Sequence[int]) -> list[list[Tensor]]:
        """Of each of these: one tensor a parameter."""
        parameters = list(self.problem.model.parameters())
        return [list(torch.autograd.grad(self.loss(number), parameters)) for number in numbers]

    def score(self) -> float:
        """Validation loss in nats a token."""
        return self.problem.evaluate()
