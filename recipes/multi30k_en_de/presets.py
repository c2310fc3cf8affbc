"""The models of the recipe and the schedules they are trained with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Size(str, Enum):
    """The name of a preset."""

    SMALL = "small"
    BASE = "base"
    PUBLISHED = "published"


@dataclass(frozen=True)
class Preset:
    """A Transformer's size and its training schedule; `average` is the number of checkpoints to average."""

    layers: int
    dim: int
    ffn: int
    dropout: float
    lr: float = 2e-3
    warmup: int = 400
    max_tokens: int = 1024
    epochs: int | None = 9
    max_update: int | None = None
    average: int = 5

    def settings(self) -> dict[str, object]:
        """Return the flags of fairseq-train, without those that say when to end and how large a batch is."""
        return self.model() | {
            "dropout": self.dropout,
            "criterion": "label_smoothed_cross_entropy",
            "label-smoothing": 0.1,
            "adam-betas": "(0.9, 0.98)",
            "lr": self.lr,
            "lr-scheduler": "inverse_sqrt",
            "warmup-updates": self.warmup,
            "clip-norm": 1.0,
            "keep-last-epochs": self.average,
            "num-workers": 0,
        }

    def model(self) -> dict[str, object]:
        """Return the flags of the model's shape, which encoder and decoder share."""
        shape = {"layers": self.layers, "embed-dim": self.dim, "ffn-embed-dim": self.ffn, "attention-heads": 4}
        sides = {f"{side}-{name}": value for side in ("encoder", "decoder") for name, value in shape.items()}
        return {"arch": "transformer", "share-all-embeddings": True} | sides


PRESETS = {
    Size.SMALL: Preset(layers=3, dim=128, ffn=256, dropout=0.2),
    Size.BASE: Preset(layers=3, dim=256, ffn=512, dropout=0.2),
    # Wu et al. (2021), "Good for Misconceived Reasons", https://arxiv.org/abs/2105.14462: BLEU 41.02 on test 2016.
    Size.PUBLISHED: Preset(
        layers=4,
        dim=128,
        ffn=256,
        dropout=0.3,
        lr=5e-3,
        warmup=2000,
        max_tokens=4096,
        epochs=None,
        max_update=8000,
        average=10,
    ),
}
