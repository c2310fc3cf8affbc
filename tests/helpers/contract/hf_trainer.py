"""The Trainer of transformers."""

import sys
from typing import Any

sys.modules["torchaudio"] = None  # type: ignore[assignment]  # transformers would import it; it may not fit this torch

import torch  # noqa: E402
from torch.optim.lr_scheduler import LambdaLR  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from fairseq_async.pytorch.hf_trainer import AsyncCallback  # noqa: E402
from tests.helpers.contract.net import (  # noqa: E402
    BATCH,
    DECAY,
    HALF,
    RATE,
    STEPS,
    WARM,
    Net,
    Run,
    factor,
    settings,
)


class ByHand(TrainerCallback):  # type: ignore[misc]
    """What a script does beside the Trainer's own steps."""

    def __init__(self, net: Net) -> None:
        self.net, self.case = net, net.run.case

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **others: Any) -> None:
        if self.case.rate:
            optimizer.param_groups[0]["lr"] = self.case.rate(self.net.batches - 1)
            optimizer.param_groups[1]["lr"] = self.case.rate(self.net.batches - 1)

    def on_step_end(self, *_: Any, lr_scheduler: Any, **others: Any) -> None:
        for _ in range(self.case.steps_schedule(self.net.batches - 1) if self.case.steps_schedule else 0):
            lr_scheduler.step()


def train(net: Net, run: Run) -> None:
    given: dict[str, Any] = {"per_device_train_batch_size": BATCH, "use_cpu": True, "report_to": "none"}
    given |= {"max_steps": run.steps if run.method == "plain" else STEPS, "max_grad_norm": 0.0, "save_steps": HALF}
    given |= {"learning_rate": RATE, "weight_decay": DECAY, "save_strategy": "steps" if run.case.saves else "no"}
    given |= {"lr_scheduler_type": "linear" if run.case.has_schedule else "constant"}
    before = f"{run.before}.out-0/checkpoint-{HALF}" if run.case.goes_on else None
    callback = (
        AsyncCallback(run.method, run_dir=str(run.path), resume_from_checkpoint=before, **settings(run))
        if run.method != "plain"
        else None
    )
    own: dict[str, Any] = {"callbacks": [*[callback] * bool(callback), ByHand(net)]}
    if run.case.brings_state:
        optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
        schedule = LambdaLR(optimizer, factor)
        for number in range(WARM):
            optimizer.zero_grad()
            net(**run.batch(number))["loss"].backward()
            optimizer.step()
            schedule.step()
        own["optimizers"] = (optimizer, schedule)
    data: Any = run.rows()
    arguments = TrainingArguments(f"{run.path}.out-{run.worker}", **given)
    trainer = Trainer(net, arguments, train_dataset=data, **own)
    torch.manual_seed(7)  # a script's own, by which the Trainer shuffles
    trainer.train(before)
