"""The language models: the size behind each name, and how a trained model is saved in plain files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from recipes.c4_lm.llama import LlamaConfig, LlamaForCausalLM
from recipes.c4_lm.tokens import BOS, EOS
from recipes.steps import RecipeError, write_whole

SEQUENCE = 256


@dataclass(frozen=True)
class Size:
    """The size of a decoder.

    `feed_forward` is the inner width of its feed-forward network; `tied` says whether one matrix is both embeddings;
    `vocab` is the number of pieces that the recipe learns by default.
    """

    layers: int
    hidden: int
    heads: int
    head: int
    feed_forward: int
    tied: bool
    vocab: int = 32_000


# 20m, 60m and 150m: layers, width and heads of Liu et al. (2024, arXiv 2401.09135), sequences of 256 of 32,000 pieces.
# The rest is chosen so that the names give the number of parameters. Llama's feed-forward network has three matrices
# where the Transformer's has two, so an inner width of 8/3 of the width (in eights) makes it as large as the usual 4.
# With heads of 64 and one matrix for both embeddings that gives 59.0M and 149.9M; heads of 896/16 would give 57.6M and
# 144.4M, a second matrix 87.7M and 178.6M. The smallest is 21.1M with two matrices, 12.9M with one.
# tiny is for CPUs, and for a text of a few megabytes: most of its parameters are its vocabulary.
SIZES = {
    "tiny": Size(layers=2, hidden=128, heads=4, head=32, feed_forward=344, tied=True, vocab=8_000),
    "20m": Size(layers=6, hidden=256, heads=4, head=64, feed_forward=688, tied=False),
    "60m": Size(layers=3, hidden=896, heads=16, head=64, feed_forward=2392, tied=True),
    "150m": Size(layers=12, hidden=896, heads=16, head=64, feed_forward=2392, tied=True),
}


@dataclass(frozen=True)
class ModelSpec:
    """What a checkpoint's tensors do not say: the model's name, its vocabulary, and the length of its sequences."""

    model: str
    vocab_size: int
    tokenizer: str  # sha256 of the sentencepiece model
    sequence_length: int = SEQUENCE


def build(spec: ModelSpec) -> LlamaForCausalLM:
    """Return the model with fresh parameters, drawn from torch's global random generator."""
    size = SIZES[spec.model]
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.sequence_length,
        num_hidden_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.head,
        intermediate_size=size.feed_forward,
        tie_word_embeddings=size.tied,
        attention_dropout=0.0,
        use_cache=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def save_model(model: torch.nn.Module, spec: ModelSpec, directory: Path) -> None:
    """Write `model.pt`, a plain state dict, and `model.json`; each is there whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / "model.json", json.dumps(asdict(spec), indent=2) + "\n")
    partial = directory / "model.pt.partial"
    torch.save(own_state(model), partial)
    partial.rename(directory / "model.pt")


def own_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the state dict with copied tensors on the CPU.

    An engine's parameters are views, and torch.save would save all that they view. A matrix with two names stays one.
    """
    state, copies = model.state_dict(), dict[int, Tensor]()
    for value in state.values():
        copies.setdefault(value.data_ptr(), value.detach().cpu().clone())
    return {name: copies[value.data_ptr()] for name, value in state.items()}


def load_model(directory: Path) -> tuple[LlamaForCausalLM, ModelSpec]:
    """Read a model that `save_model` has written."""
    spec = load_spec(directory / "model.json")
    model = build(spec)
    path = directory / "model.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    except (OSError, EOFError, RuntimeError, UnpicklingError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(
            f"{path} does not hold a {spec.model} model of {spec.vocab_size:,} tokens: {reason}"
        ) from None
    return model, spec


def load_spec(path: Path) -> ModelSpec:
    """Read the `model.json` of a checkpoint."""
    try:
        spec = ModelSpec(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RecipeError(f"{path.parent} is no checkpoint of this recipe: there is no {path.name} in it") from None
    except (OSError, ValueError, TypeError) as error:
        raise RecipeError(f"{path} does not describe a model: {error}") from None
    if spec.model not in SIZES:
        raise RecipeError(f"{path}: no model is called {spec.model!r}; there are {', '.join(SIZES)}")
    return spec
