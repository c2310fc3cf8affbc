"""Training problems cut into single batches, to check claims about the number of batches in a step."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.errors import ConfigurationError, fail  # noqa: E402
from fairseq_async.simulation.problems import problem as problems  # noqa: E402
from fairseq_async.worker.shards import SEEDS  # noqa: E402
from recipes.multi30k_en_de.presets import PRESETS, Size  # noqa: E402
from recipes.steps import RecipeError  # noqa: E402


class Name(str, Enum):
    """The name of a problem."""

    BYTES = "bytes"
    C4 = "c4"
    MULTI30K = "multi30k"


_PRESET = PRESETS[Size.SMALL]
_LOSS = {"criterion": "label_smoothed_cross_entropy", "label-smoothing": 0.1, "dropout": _PRESET.dropout}
_FLAGS = _PRESET.model() | _LOSS
_SEQUENCE = 64
_SETTINGS: dict[Name, dict[str, Any]] = {
    Name.BYTES: {"type": "scripts.bench.byte_model:Bytes"},
    Name.C4: {"type": "c4_lm", "model": "tiny", "vocab": 2000, "sequence": _SEQUENCE, "out": "runs/c4_tokens"},
    Name.MULTI30K: {"type": "fairseq_translation", "validation": 10},
}


def _settings(name: Name, tokens: int) -> dict[str, Any]:
    if name is not Name.MULTI30K:
        return _SETTINGS[name]
    flags = _FLAGS | {"max-tokens": tokens}
    words = (f"--{flag}" if value is True else f"--{flag} {shlex.quote(str(value))}" for flag, value in flags.items())
    return _SETTINGS[name] | {"flags": " ".join(words)}


class Batches:
    """A problem whose runs all start from the same parameters, and whose batch ``number`` is the same in every run.

    Args:
        seed: seed of parameters and batches.
        tokens: number of tokens in a single batch, rounded down to whole sequences of 64; for Multi30k the largest
            number. The default is 256, and 512 for Multi30k. More tokens give less noise.
    """

    def __init__(self, name: Name, data: Path | None, seed: int, tokens: int | None = None) -> None:
        tokens = tokens or (512 if name is Name.MULTI30K else 256)
        settings = _settings(name, tokens) | ({} if data is None else {"data": str(data.resolve())})
        try:
            if data is None and name is not Name.BYTES:
                raise ConfigurationError(f"--data: {name.value} has none of its own; name a directory with its data")
            self.problem = problems.build(settings, Path.cwd(), seed, torch.device("cpu"))
        except ConfigurationError as error:
            fail(error)
        except (OSError, RecipeError) as error:
            fail(ConfigurationError(str(error) if isinstance(error, RecipeError) else f"--data {data}: {error}"))
        self.samples, self.seed = 1 if name is Name.MULTI30K else max(1, tokens // _SEQUENCE), seed
        self._start = {key: value.clone() for key, value in self.problem.model.state_dict().items()}

    def fresh(self) -> nn.Module:
        """Resets the model to the initial parameters of every run, and returns it."""
        self.problem.model.load_state_dict(self._start)
        self.problem.model.zero_grad()
        torch.manual_seed(self.seed)  # dropout
        return self.problem.model

    def loss(self, *numbers: int) -> Tensor:
        """Returns the mean loss per token in these single batches."""
        indices = [index for number in numbers for index in self._indices(number)]
        return self.problem.loss(self.problem.batch(indices))[0]

    def _indices(self, number: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed * 10_000_019 + number) % SEEDS)
        found: list[int] = torch.randint(self.problem.samples, (self.samples,), generator=generator).tolist()
        return found

    def gradients(self, numbers: Sequence[int]) -> list[list[Tensor]]:
        """Returns the gradients of each of these single batches, one tensor per parameter."""
        parameters = list(self.problem.model.parameters())
        return [list(torch.autograd.grad(self.loss(number), parameters)) for number in numbers]

    def score(self) -> float:
        """Returns the loss on text that is not trained on, in nats per byte, piece or target token."""
        return self.problem.evaluate()
