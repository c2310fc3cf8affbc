"""The recipe's language models as a training problem for the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fairseq_async.errors import ConfigurationError
from recipes.c4_lm import text, tokens
from recipes.c4_lm.models import SEQUENCE, SIZES, ModelSpec, build, load_model
from recipes.c4_lm.sources import by_source
from recipes.steps import RecipeError


class C4:
    """The problem of predicting the next token of C4, or of any text in the same format.

    Args:
        data: directory of shards.
        out: directory for the tokens, which a later run reuses.
        validation: number of validation sequences that are scored; 0 for all.
        init: checkpoint directory with the initial parameters.
        sources: number of sources into which the training text is sorted by topic, so that as many equal shards are one
            source each; 0 does not sort.
    """

    def __init__(
        self,
        seed: int,
        device: torch.device,
        data: Path,
        model: str = "tiny",
        vocab: int | None = None,
        out: str = "runs/c4_tokens",
        sequence: int = SEQUENCE,
        validation: int = 64,
        init: Path | None = None,
        sources: int = 0,
    ) -> None:
        if model not in SIZES:
            raise ConfigurationError(f'"problem": "model": {model}; there are {", ".join(SIZES)}')
        try:
            prepared = tokens.prepare(text.find(data), vocab or SIZES[model].vocab, Path(out))
            spec = ModelSpec(model, prepared.meta["vocab_size"], prepared.meta["tokenizer"], max(sequence, SEQUENCE))
            network = build(spec) if init is None else load_model(init)[0]
        except RecipeError as error:
            raise ConfigurationError(str(error)) from error
        self.model = network.to(device)  # type: ignore[arg-type]
        self.train = prepared.dataset(text.TRAIN, sequence)
        if sources:
            self.train.tokens = by_source(self.train.tokens, self.train.vocab_size, sources, seed)
        held_out = prepared.dataset(text.VALIDATION, sequence)
        self.samples, self.device = len(self.train), device
        count = min(validation or len(held_out), len(held_out))
        self.held_out = [held_out[index]["input_ids"] for index in range(count)]

    def batch(self, indices: Sequence[int]) -> Tensor:
        return torch.stack([self.train[index]["input_ids"] for index in indices]).to(self.device)

    def loss(self, batch: Tensor) -> tuple[Tensor, float]:
        logits = self.model(input_ids=batch).logits.float()  # as transformers computes its loss
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()), float(batch[:, 1:].numel())

    @torch.no_grad()
    def evaluate(self) -> float:
        total = count = 0.0
        for start in range(0, len(self.held_out), 16):
            batch = torch.stack(self.held_out[start : start + 16]).to(self.device)
            loss, tokens_ = self.loss(batch)
            total, count = total + float(loss) * tokens_, count + tokens_
        return total / count
