"""A Trainer alone, alone with the rounding of an exchange, and as the only worker of local SGD: all parameters of each.

Usage: hf_rounding_job.py OUT
"""

import sys
from pathlib import Path
from typing import Any

sys.modules["torchaudio"] = None  # type: ignore[assignment]  # transformers would import it; it may not fit this torch

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from fairseq_async.pytorch.hf_trainer import AsyncCallback  # noqa: E402
from tests.helpers.counting import Counting, tiny_model  # noqa: E402

STEPS, LOCAL_STEPS = 9, 3
KINDS: dict[str, dict[str, Any]] = {"autocast": {"bf16": True}, "Adafactor": {"optim": "adafactor"}}


class Trace(TrainerCallback):  # type: ignore[misc]
    """Notes the parameters after each step. If it rounds, every third step is θ ← θ_start − (θ_start − θ): what an
    exchange computes where the server takes the steps of its only worker as they are; θ, within a rounding."""

    def __init__(self, rounds: bool) -> None:
        self.rounds, self.start, self.found = rounds, list[Tensor](), list[Tensor]()

    def on_train_begin(self, *_: Any, model: Any, **others: Any) -> None:
        self.start = [each.detach().clone() for each in model.parameters()]

    @torch.no_grad()
    def on_optimizer_step(self, *_: Any, model: Any, **others: Any) -> None:
        if self.rounds and len(self.found) % LOCAL_STEPS == LOCAL_STEPS - 1:
            for start, parameter in zip(self.start, model.parameters(), strict=True):
                start.copy_(parameter.copy_(start - (start - parameter)))
        self.found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))


def train(out: Path, kind: str, *callbacks: TrainerCallback, rounds: bool = False) -> Tensor:
    torch.manual_seed(0)
    trace = Trace(rounds)
    given = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "save_strategy": "no"}
    arguments = TrainingArguments(str(out), **given, **KINDS[kind], use_cpu=True, report_to=[], disable_tqdm=True)
    data = Counting(range(64))
    Trainer(tiny_model(), arguments, train_dataset=data, callbacks=[*callbacks, trace]).train()
    return torch.stack(trace.found)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {(kind, name): train(folder, kind, rounds=name == "rounded") for kind in KINDS for name in ("", "rounded")}
    for kind in KINDS:
        as_it_is = {"outer": "sgd", "outer_lr": 1.0, "local_steps": LOCAL_STEPS}
        callback = AsyncCallback("local_sgd", run_dir=str(folder / kind), **as_it_is)
        found[kind, "run"] = train(folder, kind, callback)
    torch.save(found, folder / "found.pt")
