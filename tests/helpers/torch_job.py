"""A user's script for the Trainer of transformers: a tiny GPT-2 learns to count. Leaves what it came to in --out."""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from fairseq_async.torch.hf_trainer import AsyncCallback


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of eight numbers, each one above the number before."""

    def __init__(self, starts: range) -> None:
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (self.starts[index] + torch.arange(8)) % 32
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, required=True)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    callback = AsyncCallback(**args.options)
    torch.manual_seed(callback.worker)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    arguments = TrainingArguments(
        output_dir=str(args.out),
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        eval_strategy="steps",
        eval_steps=6,
        save_steps=6,
        load_best_model_at_end=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    data = Counting(range(callback.worker, 256, callback.workers))
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=Counting(range(16)), callbacks=[callback])
    trainer.train(resume_from_checkpoint=str(args.out / "checkpoint-6") if args.resume else None)
    log = [line for line in trainer.state.log_history if "eval_loss" in line]
    torch.save(model.state_dict(), args.out / f"worker-{callback.worker}.pt")
    (args.out / f"worker-{callback.worker}.json").write_text(json.dumps({"evaluations": log}))


if __name__ == "__main__":
    main()
