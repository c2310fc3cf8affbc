"""A tiny GPT-2 that learns to count, for the Trainer of transformers; import it where that may be imported."""

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences of eight numbers, each one above the number before; ``drawn`` has what was drawn."""

    def __init__(self, starts: range) -> None:
        self.starts, self.drawn = starts, list[int]()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.drawn.append(index)
        tokens = (self.starts[index] + torch.arange(8)) % 32
        return {"input_ids": tokens, "labels": tokens}


def tiny_model() -> GPT2LMHeadModel:
    shape = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
