"""A script with transformers' ``Trainer`` that trains asynchronously; comments mark what differs from other scripts.

    deepspeed --num_gpus 4 recipes/hf_trainer/train.py --deepspeed recipes/hf_trainer/ds_config.json --text FILE

A small GPT-2 learns the bytes of a text file, so nothing is downloaded.
"""

import argparse
from pathlib import Path

# These two lines come before transformers is imported.
import fairseq_async.deepspeed_plugin as deepspeed_async

deepspeed_async.attach()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

LENGTH = 128  # bytes of a sample


class Bytes(Dataset[dict[str, Tensor]]):
    """A text in samples of ``LENGTH`` bytes."""

    def __init__(self, text: bytes) -> None:
        self.samples = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH]
        self.samples = self.samples.view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index].long()
        return {"input_ids": sample, "labels": sample}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 on the bytes of a text.")
    parser.add_argument("--text", type=Path, required=True, help="the last tenth is for validation")
    parser.add_argument("--deepspeed", required=True, help="DeepSpeed's JSON, with the section async_training")
    parser.add_argument("--out", default="runs/hf_trainer")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--local_rank", type=int, default=0, help="set by DeepSpeed's launcher")
    return parser.parse_args()


def main() -> None:
    args = parse()
    arguments = TrainingArguments(
        output_dir=args.out,
        deepspeed=args.deepspeed,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        warmup_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=10,
        report_to="none",
    )
    text = args.text.read_bytes()
    border = len(text) * 9 // 10
    shape = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=args.width, n_layer=2, n_head=4)
    torch.manual_seed(arguments.seed)  # every worker makes the same model; the server takes worker 0's
    trainer = Trainer(
        model=GPT2LMHeadModel(shape),
        args=arguments,
        train_dataset=Bytes(text[:border]),  # the whole text: each worker draws its own part
        eval_dataset=Bytes(text[border:]),
    )
    trainer.train()
    trainer.save_model()  # only worker 0 saves
    if trainer.is_world_process_zero():  # in worker 0
        print(f"validation loss {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
