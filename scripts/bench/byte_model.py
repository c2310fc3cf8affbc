"""A language model of bytes, small enough to train a hundred times over on one core."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.c4_lm import corpus_made_up, text  # noqa: E402
from recipes.steps import once  # noqa: E402

SEQUENCE = 64
WIDTH, LAYERS = 64, 2
_VALIDATION, _AT_ONCE = 192, 64  # sequences


class ByteModel(nn.Module):
    """A decoder: 2 layers, width 64, 88,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQUENCE))
        nn.init.normal_(self.bytes.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats per byte; ``ids`` has the shape [sequences, SEQUENCE + 1]."""
        hidden = self.layers(self.bytes(ids[:, :-1].long()) + self.positions.weight, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy((hidden @ self.bytes.weight.T).flatten(0, 1), ids[:, 1:].long().flatten())


class Bytes:
    """The simulator's problem of predicting the next byte of a text; a sample is a start position.

    Args:
        data: directory of shards in a format of the C4 recipe; None for the recipe's made-up text.
    """

    def __init__(self, seed: int, device: torch.device, data: Path | None = None) -> None:
        self.model = ByteModel().to(device)
        corpus = text.find(data or once(Path("runs/bench/text"), corpus_made_up.make_corpus))
        self.train, self.validation = (self._bytes(corpus.documents(split)).to(device) for split in text.SPLITS)
        self.samples = len(self.train) - SEQUENCE - 1

    @staticmethod
    def _bytes(documents: Iterator[str]) -> Tensor:
        return torch.frombuffer(bytearray("\0".join(documents).encode()), dtype=torch.uint8)

    def batch(self, indices: Sequence[int]) -> Tensor:
        return self._cut(self.train, torch.tensor(indices))

    def loss(self, batch: Tensor) -> tuple[Tensor, float]:
        return self.model(batch), float(batch[:, 1:].numel())

    @torch.no_grad()
    def evaluate(self) -> float:
        starts = torch.linspace(0, len(self.validation) - SEQUENCE - 2, _VALIDATION).long()
        losses = [self.model(self._cut(self.validation, part)) for part in starts.split(_AT_ONCE)]
        return float(torch.stack(losses).mean())

    @staticmethod
    def _cut(source: Tensor, starts: Tensor) -> Tensor:
        return source[starts.unsqueeze(1) + torch.arange(SEQUENCE + 1)]
