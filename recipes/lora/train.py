"""Fine-tunes a causal language model by LoRA with transformers' ``Trainer`` and PEFT; the workers exchange the adapter.

    fairseq-async launch --workers 2 -- python recipes/lora/train.py --base DIRECTORY --text FILE

Comments mark what differs from a script for one process. With ``--deepspeed FILE`` DeepSpeed trains, and the JSON has
the method.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if "--deepspeed" in sys.argv:  # before transformers is imported
    import fairseq_async.deepspeed_plugin as deepspeed_async

    deepspeed_async.attach()

import torch  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments  # noqa: E402

if TYPE_CHECKING:
    from fairseq_async.torch.hf_trainer import AsyncCallback


class Text(Dataset[dict[str, Tensor]]):
    """Samples of so many tokens."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.samples = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index].long()
        return {"input_ids": sample, "labels": sample}


def tokens_of(file: Path, base: Path) -> Tensor:
    """Returns the tokens of a text: the tokenizer's of the base model, or bytes where it has none."""
    if not (base / "tokenizer_config.json").exists():
        return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    return torch.tensor(AutoTokenizer.from_pretrained(base)(file.read_text()).input_ids)


def make_model(args: argparse.Namespace) -> PeftModel:
    """Returns the base model with a new adapter, which is the server's as soon as training begins: worker 0's."""
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    if args.add_tokens:
        model.resize_token_embeddings(model.config.vocab_size + args.add_tokens)
    config = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=args.target.split(","),
        modules_to_save=args.whole.split(",") if args.whole else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an adapter of a causal language model on a text.")
    parser.add_argument("--base", type=Path, required=True, help="directory of the model, as save_pretrained writes it")
    parser.add_argument("--text", type=Path, required=True, help="the last tenth is for validation")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--method", choices=("local_sgd", "hybrid_async"), default="local_sgd")
    parser.add_argument("--options", type=json.loads, default={}, help='of the method, as JSON: {"local_steps": 50}')
    parser.add_argument("--deepspeed", help="DeepSpeed's JSON, whose section async_training has the method")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.add_argument("--target", default="c_attn", help="modules with an adapter, with commas between them")
    parser.add_argument("--whole", help="modules that are trained whole")
    parser.add_argument("--add-tokens", type=int, default=0, help="rows to be added to the embeddings")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=0, help="set by DeepSpeed's launcher")
    return parser.parse_args()


def make_callback(args: argparse.Namespace) -> AsyncCallback | None:
    """Returns what makes the Trainer a worker; DeepSpeed needs none."""
    if args.deepspeed:
        return None
    from fairseq_async.torch.hf_trainer import AsyncCallback

    return AsyncCallback(args.method, **{"run_dir": str(args.out / "run")} | args.options)


def main() -> None:
    args = parse()
    callback = make_callback(args)
    arguments = TrainingArguments(
        output_dir=str(args.out),
        deepspeed=args.deepspeed,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.lr,
        warmup_steps=10,
        save_steps=args.steps,
        logging_steps=10,
        report_to="none",
        seed=args.seed,
    )
    tokens = tokens_of(args.text, args.base)
    border = len(tokens) * 9 // 10
    if len(tokens) - border < args.length:
        raise SystemExit(f"--text {args.text}: its last tenth is shorter than a sample: give a longer one, or --length")
    torch.manual_seed(args.seed)
    trainer = Trainer(
        model=make_model(args),
        args=arguments,
        train_dataset=Text(tokens[:border], args.length),  # the whole text: each worker draws its own part
        eval_dataset=Text(tokens[border:], args.length),
        callbacks=[callback] if callback else [],
    )
    trainer.train()
    if callback.worker == 0 if callback else trainer.is_world_process_zero():
        trainer.save_model(str(args.out / "adapter"))
        print(f"validation loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
