"""A user's script for the Trainer of transformers: a tiny GPT-2 learns to count. Leaves what it came to in OUT.

Usage: hf_callback_job.py OUT OPTIONS [CHECKPOINT]; without a method in OPTIONS, the Trainer trains alone.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.modules["torchaudio"] = None  # type: ignore[assignment]  # transformers would import it; it may not fit this torch

import torch  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from fairseq_async.torch import MuonAdamW, muon_groups  # noqa: E402
from fairseq_async.torch.hf_trainer import AsyncCallback  # noqa: E402
from tests.helpers.counting import Counting, tiny_model  # noqa: E402


class Stop(TrainerCallback):
    """Stops at the first evaluation, as EarlyStoppingCallback does at a later one."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


class Dies(TrainerCallback):
    """Dies after five steps, once; leaves what they were of, without the batch that was read ahead."""

    def __init__(self, out: Path, data: Counting) -> None:
        self.left, self.data = out / "drawn.json", data

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5 and not self.left.exists():
            drawn = self.data.drawn[: 5 * args.train_batch_size * args.gradient_accumulation_steps]
            self.left.write_text(json.dumps(drawn))
            os._exit(1)


class OutOfMemory(TrainerCallback):
    """Fails as a GPU does whose memory is too small."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA out of memory.")


def train(out: Path, options: dict[str, Any], checkpoint: str | None) -> Trainer:
    """Twelve steps, with an evaluation and a checkpoint after six and twelve."""
    others: list[TrainerCallback] = [Stop()] if options.pop("stops", False) else []
    finds, epochs = options.pop("finds_batch_size", False), options.pop("epochs", 0)
    samples, accumulation = options.pop("samples", 256), options.pop("accumulation", 1)
    dies = options.pop("dies", False)
    others += [OutOfMemory()] if finds else []
    muon = options.pop("muon", False)
    callback = AsyncCallback(**options) if "method" in options else None
    worker, workers = (0, 1) if callback is None else (callback.worker, callback.workers)
    torch.manual_seed(worker)
    model = tiny_model()
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=-1 if epochs else 12,
        num_train_epochs=epochs or 1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        learning_rate=5e-3,
        weight_decay=0.1,
        eval_strategy="steps",
        eval_steps=6,
        save_steps=6,
        logging_steps=1,
        load_best_model_at_end=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        auto_find_batch_size=finds,
    )
    data = Counting(range(worker, samples - worker, workers))
    others += [Dies(out, data)] if dies else []
    optimizer: MuonAdamW | None = None
    if muon:
        # what AdamW divides by is above the rounding of gradients that are 0 (those of the keys' biases)
        own: dict[str, Any] = {"lr": 5e-3, "weight_decay": 1.0, "eps": 1e-6, "adjust_lr_fn": "match_rms_adamw"}
        optimizer = MuonAdamW(muon_groups(model.named_parameters()), **own)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=Counting(range(16)),
        callbacks=[*([callback] if callback else []), *others],
        optimizers=(optimizer, None),
    )
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), out / f"began-{worker}.pt")
    trainer.train(resume_from_checkpoint=checkpoint)
    torch.save(model.state_dict(), out / f"worker-{worker}.pt")
    if dies:
        (out / "drawn again.json").write_text(json.dumps(data.drawn))
    (out / f"worker-{worker}.json").write_text(json.dumps(trainer.state.log_history))
    return trainer


if __name__ == "__main__":
    train(Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:] or [None])
