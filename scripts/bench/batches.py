"""Problems cut into single batches, for claims about how many of them a step should have."""

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
from fairseq_async.simulation import problem as problems  # noqa: E402
from recipes.multi30k_en_de.presets import PRESETS, Size  # noqa: E402
from recipes.steps import RecipeError  # noqa: E402


class Name(str, Enum):
    """Which problem."""

    BYTES = "bytes"
    C4 = "c4"
    MULTI30K = "multi30k"


_PRESET = PRESETS[Size.SMALL]
_LOSS = {"criterion": "label_smoothed_cross_entropy", "label-smoothing": 0.1, "dropout": _PRESET.dropout}
_FLAGS = _PRESET.model() | _LOSS | {"max-tokens": 512}
_SETTINGS: dict[Name, dict[str, Any]] = {
    Name.BYTES: {"type": "scripts.bench.byte_model:Bytes"},
    Name.C4: {"type": "c4_lm", "model": "tiny", "vocab": 2000, "sequence": 64, "out": "runs/c4_tokens"},
    Name.MULTI30K: {
        "type": "fairseq_translation",
        "flags": " ".join(
            f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}" for name, value in _FLAGS.items()
        ),
        "validation": 10,
    },
}
_SAMPLES = {Name.BYTES: 4, Name.C4: 4, Name.MULTI30K: 1}


class Batches:
    """A problem whose every run begins with the same parameters, and whose batch ``number`` is the same in every run.

    Args:
        seed: of parameters and batches.
        samples: in a single batch; by default 4 sequences of 64, or the 512 tokens that are one sample of Multi30k.
    """

    def __init__(self, name: Name, data: Path | None, seed: int, samples: int | None = None) -> None:
        settings = _SETTINGS[name] | ({} if data is None else {"data": str(data.resolve())})
        try:
            if data is None and name is not Name.BYTES:
                raise ConfigurationError(f"--data: {name.value} has none of its own; name a directory with its data")
            self.problem = problems.build(settings, Path.cwd(), seed, torch.device("cpu"))
        except ConfigurationError as error:
            fail(error)
        except (OSError, RecipeError) as error:
            fail(ConfigurationError(str(error) if isinstance(error, RecipeError) else f"--data {data}: {error}"))
        self.samples, self.seed = samples or _SAMPLES[name], seed
        self._start = {key: value.clone() for key, value in self.problem.model.state_dict().items()}

    def fresh(self) -> nn.Module:
        """The model as it was at first."""
        self.problem.model.load_state_dict(self._start)
        self.problem.model.zero_grad()
        torch.manual_seed(self.seed)  # dropout
        return self.problem.model

    def loss(self, number: int) -> Tensor:
        """The mean loss of a token in this single batch."""
        generator = torch.Generator().manual_seed(self.seed * 10_000_019 + number)
        indices = torch.randint(self.problem.samples, (self.samples,), generator=generator).tolist()
        return self.problem.loss(self.problem.batch(indices))[0]

    def gradients(self, numbers: Sequence[int]) -> list[list[Tensor]]:
        """Of each of these single batches: one tensor a parameter."""
        parameters = list(self.problem.model.parameters())
        return [list(torch.autograd.grad(self.loss(number), parameters)) for number in numbers]

    def score(self) -> float:
        """Loss on text that is not trained on, in nats per byte, piece or target token."""
        return self.problem.evaluate()
