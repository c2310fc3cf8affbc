"""The Trainer of transformers."""

import sys
from pathlib import Path
from typing import Any

sys.modules["torchaudio"] = None  # type: ignore[assignment]  # transformers would import it; it may not fit this torch

from torch import nn  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from fairseq_async.pytorch.hf_trainer import AsyncCallback  # noqa: E402
from tests.helpers.contract.net import BATCH, DECAY, LOCAL, RATE, STEPS, Net, rows  # noqa: E402


def train(net: Net, method: str, path: Path) -> nn.Module:
    given: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "use_cpu": True}
    given |= {"learning_rate": RATE, "weight_decay": DECAY, "lr_scheduler_type": "constant"}
    given |= {"save_strategy": "no", "report_to": "none", "max_grad_norm": 0.0}
    own: dict[str, Any] = LOCAL if method == "local_sgd" else {"updates_per_step": 1}
    callbacks = [] if method == "plain" else [AsyncCallback(method, run_dir=str(path), **own)]
    data: Any = rows()
    Trainer(net, TrainingArguments(f"{path}.out", **given), train_dataset=data, callbacks=callbacks).train()  # type: ignore[arg-type]
    return net
