"""Samples by number, and models that note of which samples their steps were."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

SAMPLES, UNUSED = 48, -100
BATCH, SAVED_AT, RATE = 2, 3, 0.05
CLIP = 0.5  # below the norm of each gradient


class Sines(Dataset[dict[str, Tensor]]):
    """Samples by number, each of three labels, of which some are not used."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 3, 5, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.inputs[index].sum(1).mul(2).round().long()
        labels[: index % 3] = UNUSED
        return {"number": torch.tensor(index), "inputs": self.inputs[index], "labels": labels}


class EndlessSines(IterableDataset[dict[str, Tensor]]):
    """The same samples again and again."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        data = Sines()
        return (data[number % SAMPLES] for number in count())


class Net(nn.Sequential):
    """A model whose loss is the mean over the labels of its batch, or of its step if it is given their number."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.samples: list[list[int]] = [[]]
        self.losses: list[list[float]] = [[]]

    def total(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of all labels that are used."""
        used = labels != UNUSED
        return ((super().forward(inputs).squeeze(-1) - labels) ** 2)[used].sum()

    def forward(self, number: Tensor, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return self.noted(number, self.total(inputs, labels) / (labels != UNUSED).sum())

    def noted(self, number: Tensor, loss: Tensor) -> dict[str, Tensor]:
        self.samples[-1] += number.tolist()
        self.losses[-1].append(float(loss))
        return {"loss": loss}


class NetOfTokens(Net):
    def forward(self, number: Tensor, inputs: Tensor, labels: Tensor, **of_step: Any) -> dict[str, Tensor]:
        return self.noted(number, self.total(inputs, labels) / of_step["num_items_in_batch"])


class NetOfMeans(Net):
    """As many scripts have it: it takes the number of the step's labels, and does not read it."""

    def forward(self, number: Tensor, inputs: Tensor, labels: Tensor, **of_step: Any) -> dict[str, Tensor]:
        return super().forward(number, inputs, labels)
