"""An adapter of a small GPT-2 as a training problem for the simulator: English bytes before, German ones afterwards."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH, HELD_OUT = 64, 256  # bytes of a sample; samples
BASE_STEPS, BASE_BATCH, BASE_RATE = 1000, 16, 2e-3
SHAPE: dict[str, Any] = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 128, "n_layer": 2, "n_head": 4}
DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Adapter:
    """LoRA on the matrices of the layers; the base model is trained once, and the same for all seeds.

    Args:
        base: directory of the base model; made where it is not there.
        before: text of the base model, may be compressed by gzip.
        text: text of the adapter; its first samples are for validation.
        rank: r of LoRA.
    """

    def __init__(self, seed: int, device: torch.device, base: str, before: str, text: str, rank: int = 8) -> None:
        torch.manual_seed(0)
        if not Path(base, "config.json").exists():
            _train_base(_samples(before)).save_pretrained(base)
        model = GPT2LMHeadModel.from_pretrained(base, dtype=torch.float32)
        torch.manual_seed(seed)
        targets = ["c_attn", "c_proj", "c_fc"]
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, fan_in_fan_out=True)
        self.model, self.device = get_peft_model(model, config).to(device), device
        every = _samples(text)
        self.held_out, self.train = every[:HELD_OUT], every[HELD_OUT:]
        self.samples = len(self.train)

    def batch(self, indices: Sequence[int]) -> Tensor:
        return self.train[list(indices)].to(self.device)

    def loss(self, batch: Tensor) -> tuple[Tensor, float]:
        return self.model(input_ids=batch, labels=batch).loss, float(batch[:, 1:].numel())

    @torch.no_grad()
    def evaluate(self) -> float:
        return float(self.model(input_ids=self.held_out.to(self.device), labels=self.held_out.to(self.device)).loss)


def _samples(file: str) -> Tensor:
    opened = gzip.open(file) if file.endswith(".gz") else open(file, "rb")
    with opened as source:
        text = torch.frombuffer(bytearray(source.read()), dtype=torch.uint8).long()
    return text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)


def _train_base(samples: Tensor) -> GPT2LMHeadModel:
    model = GPT2LMHeadModel(GPT2Config(**SHAPE, **DROPOUT, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, BASE_STEPS)
    for _ in range(BASE_STEPS):
        batch = samples[torch.randint(len(samples), (BASE_BATCH,))]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
    return model
