"""A hybrid worker without a model round it."""

import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.protocol import Assignment, Welcome
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.hybrid import HybridWorker


class HybridJob:
    """A worker with the parameters of the tests' layout, which are 1 at the server's start; its learning rate is 1."""

    def __init__(self, client: Client) -> None:
        self.weight, self.bias = Parameter(torch.zeros(2, 2)), Parameter(torch.zeros(2))
        self.worker = HybridWorker(client, [("weight", self.weight), ("bias", self.bias)])
        assignment = Assignment(learning_rate=1.0)
        self.worker.begin(Welcome(True, "", publishes=True, slots=1, assignment=assignment))

    def backward(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight.grad, self.bias.grad = weight, bias

    def parameters(self) -> list[float]:
        return [*self.weight.detach().flatten().tolist(), *self.bias.detach().tolist()]
