"""Trains with the ``Trainer`` once for each case, and leaves the samples of each step and what was planned.

Usage: hf_sampler_job.py FRONT_END OUT JSON, which has the environment of each case; OUT/CASE-RANK.json is what is left.
The front end is "plain", under torchrun's variables, "callback" or "attach".
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.modules["torchaudio"] = None  # type: ignore[assignment]  # transformers would import it; it may not fit this torch

front_end, out, environments = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
if front_end == "attach":
    import fairseq_async.deepspeed_plugin as deepspeed_async

    deepspeed_async.attach()
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, Sampler  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

STRATEGIES = ("batch_rebalance", "group_by_length")
DATA = [{"input_ids": [index] + [1] * (index * 7 % 11)} for index in range(46)]


class Model(nn.Module):
    """One number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(input_ids[:, :1] / 46).square().mean()}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    return {"input_ids": torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])}


class Strided(Sampler[int]):
    """A user's, which asks for the numbers at each pass."""

    def __init__(self, arguments: TrainingArguments) -> None:
        self.arguments = arguments

    def __len__(self) -> int:
        return len(DATA) // self.arguments.world_size

    def __iter__(self) -> Any:
        return iter(range(self.arguments.process_index, len(DATA), self.arguments.world_size))


class Recording(Trainer):
    """Notes the samples of each step; its loader is that of the case."""

    case = ""

    def get_train_dataloader(self) -> DataLoader[Any]:
        if self.case in (*STRATEGIES, "printed", "printed by one", "printed world size"):
            return super().get_train_dataloader()
        if self.case == "printed in the method":
            print(self.args.world_size)
        sampler: Sampler[int] | None = None
        if self.case == "lazy":
            sampler = Strided(self.args)
        elif self.case == "by the arguments":
            sampler = DistributedSampler(DATA, self.args.world_size, self.args.process_index)
        loader = DataLoader(DATA, 4, shuffle=None if sampler else True, sampler=sampler, collate_fn=collate)
        return self.accelerator.prepare(loader) if self.case == "prepared" else loader

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        steps.append(inputs["input_ids"][:, 0].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


steps: list[list[int]] = []


def train(case: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    Recording.case = case
    rank = environment["OWN_RANK"]
    callbacks: list[Any] = []
    if front_end == "callback":
        from fairseq_async.pytorch.hf_trainer import AsyncCallback

        callbacks = [AsyncCallback("local_sgd", outer="diloco", local_steps=3, run_dir=str(out / case))]
        if case == "printed" or (case == "printed by one" and rank == "0"):
            print(callbacks[0].workers)  # as a script that divides the data by it
    config: dict[str, Any] | None = None
    if front_end == "attach":
        section = {"outer": "diloco", "local_steps": 3, "run_dir": str(out / case)}
        of_optimizer = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto") | {"torch_adam": True}
        config = {
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 0},
            "optimizer": {"type": "AdamW", "params": of_optimizer},
            "async_training": section,
        }
    arguments = TrainingArguments(
        deepspeed=config,
        output_dir=str(out / "trainer"),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        train_sampling_strategy=case if case in STRATEGIES else "random",
        save_strategy="no",
        logging_steps=1,
        remove_unused_columns=False,
        use_cpu=front_end != "attach",
        torch_compile_backend="eager" if case == "printed" else None,
        report_to=[],
        disable_tqdm=True,
    )
    if case.startswith("printed world size"):
        print(arguments.world_size)
    trainer = Recording(Model(), arguments, train_dataset=DATA, data_collator=collate, callbacks=callbacks)
    trainer.train()
    log = trainer.state.log_history
    rates = [line["learning_rate"] for line in log if "learning_rate" in line]
    left = {"steps": steps, "max_steps": trainer.state.max_steps, "rates": rates, "epoch": trainer.state.epoch}
    (out / f"{case}-{rank}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    for each, variables in environments.items():
        if (child := os.fork()) == 0:
            train(each, variables)
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (out / f"{each}-{variables['OWN_RANK']}.code").write_text(str(code))
