"""A user's script with the real ``transformers.Trainer``: a tiny GPT-2 learns to count. Leaves a summary in OUT."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import fairseq_async.deepspeed_plugin as deepspeed_async

deepspeed_async.attach()

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from tests.helpers.counting import Counting, tiny_model  # noqa: E402


class Stop(TrainerCallback):
    """Stops worker 0 after ten steps of the run, as a user's callback may."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= 10 and args.process_index == 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stops", action="store_true")
    parser.add_argument("--local_rank", type=int)
    args = parser.parse_args()
    out = args.out
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        deepspeed=None if args.config == "launched" else args.config,
        num_train_epochs=4,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        logging_steps=4,
        dataloader_pin_memory=False,
        report_to="none",
        seed=1,
    )
    torch.manual_seed(0)
    model = tiny_model()
    data, held_out = Counting(range(96)), Counting(range(16))
    callbacks: list[TrainerCallback] = [Stop()] if args.stops else []
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=held_out, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model(str(out / "final"))
    engine = trainer.model_wrapped
    summary = {
        "zero": trainer.is_world_process_zero(),
        "drawn": data.drawn,
        "step": trainer.state.global_step,
        "log": list(trainer.state.log_history),
        "best": trainer.state.best_metric,
        "evaluated": trainer.evaluate()["eval_loss"],
        "progress": engine.progress,
        "config": engine.config["optimizer"]["params"],
    }
    (out / f"worker-{engine.worker}.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main()
