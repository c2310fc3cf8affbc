"""A language model of bytes, small enough to train a hundred times over on one core, for claims about batch sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.c4_lm import corpus_made_up, text  # noqa: E402
from recipes.steps import once  # noqa: E402

SEQUENCE, SEQUENCES = 64, 4  # of a single batch
WIDTH, LAYERS = 64, 2
_VALIDATION = 48  # single batches


class ByteModel(nn.Module):
    """A decoder: 2 layers, width 64, 115,000 parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQUENCE))
        nn.init.normal_(self.bytes.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [sequences, SEQUENCE + 1]. Mean cross-entropy in nats per byte."""
        hidden = self.layers(self.bytes(ids[:, :-1].long()) + self.places.weight, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy((hidden @ self.bytes.weight.T).flatten(0, 1), ids[:, 1:].long().flatten())


class Bytes:
    """Training and validation text; batch ``number`` is the same in every run of one seed."""

    def __init__(self, data: Path | None, out: Path) -> None:
        corpus = text.find(data or once(out / "text", corpus_made_up.make_corpus))
        self.train, self.validation = (self._bytes(corpus.documents(split)) for split in text.SPLITS)

    @staticmethod
    def _bytes(documents: Iterator[str]) -> Tensor:
        return torch.frombuffer(bytearray("\0".join(documents).encode()), dtype=torch.uint8)

    def batch(self, number: int, seed: int) -> Tensor:
        """[SEQUENCES, SEQUENCE + 1]"""
        generator = torch.Generator().manual_seed(seed * 10_000_019 + number)
        return self._cut(self.train, torch.randint(len(self.train) - SEQUENCE - 1, (SEQUENCES,), generator=generator))

    def score(self, model: ByteModel) -> float:
        """Validation loss in nats per byte; always over the same text."""
        starts = torch.linspace(0, len(self.validation) - SEQUENCE - 2, _VALIDATION * SEQUENCES).long()
        with torch.no_grad():
            return float(torch.stack([model(self._cut(self.validation, part)) for part in starts.split(64)]).mean())

    @staticmethod
    def _cut(source: Tensor, starts: Tensor) -> Tensor:
        return source[starts.unsqueeze(1) + torch.arange(SEQUENCE + 1)]


def gradients(model: ByteModel, text: Bytes, numbers: Sequence[int], seed: int) -> list[list[Tensor]]:
    """Of each of these single batches: one tensor a parameter."""
    parameters = list(model.parameters())
    return [list(torch.autograd.grad(model(text.batch(number, seed)), parameters)) for number in numbers]
