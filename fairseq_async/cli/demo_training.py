"""The training of ``fairseq-async demo``: a small character model learns the source code of this package."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from fairseq_async.pytorch.hybrid import HybridAsync

CONTEXT, BATCH, WIDTH = 64, 16, 64


class CharacterModel(nn.Module):
    """A causal Transformer over bytes, with 120,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        for table in (self.bytes, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: Tensor) -> Tensor:
        """Returns the mean loss in nats of each next byte of ``text``, of shape (batch, CONTEXT + 1)."""
        hidden = self.bytes(text[:, :-1]) + self.positions.weight
        scores = self.layers(hidden, mask=self.mask, is_causal=True) @ self.bytes.weight.T
        return nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def train(run_dir: str, steps: int, barrier: bool) -> None:
    """Is one worker of the run in this directory; with the barrier, training is synchronous."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with HybridAsync(model, optimizer, total_steps=steps, run_dir=run_dir, barrier=barrier) as worker:
        random = torch.Generator().manual_seed(worker.worker)  # each worker draws its own text
        while not worker.finished:
            starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=random)
            optimizer.zero_grad()
            loss = model(data[starts + torch.arange(CONTEXT + 1)])
            loss.backward()
            worker.loss = loss.item()
            optimizer.step()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), barrier=sys.argv[3] == "synchronous")
