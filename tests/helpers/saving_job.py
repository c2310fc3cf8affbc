"""A user's script whose worker 0 dies once between the end of the training and its own save.

Usage: saving_job.py FRONT_END RUN [kill|raise|exit]. ``RUN.pt`` is what worker 0 saves, ``RUN.steps`` the steps that it
has taken before; ``RUN.once`` is there when it has died.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.modules["torchaudio"] = None  # type: ignore[assignment]  # transformers would import it; it may not fit this torch

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

INPUTS = torch.linspace(-1, 1, 8)
TRAINS = {"total_steps": 20, "run_dir": sys.argv[2]}
LOCAL: dict[str, Any] = TRAINS | {"local_steps": 5, "outer": "sgd", "buffers": "average"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(1), nn.Linear(8, 1)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {
            "loss": (self.linear(self.norm(inputs.view(-1, 1, 8)).view(-1, 8)) - labels.view(-1, 1)).square().mean()
        }


def plain(model: nn.Module) -> tuple[int, int]:
    """A loop with a context manager; returns the worker and its steps."""
    from fairseq_async.pytorch import AsyncLocalSGD

    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=0.05), 0
    with AsyncLocalSGD(model, optimizer, **LOCAL) as worker:
        while not worker.finished:
            optimizer.zero_grad()
            model(INPUTS, torch.ones(1))["loss"].backward()
            optimizer.step()
            steps += 1
    return worker.worker, steps


def trainer(model: nn.Module) -> tuple[int, int]:
    """The Trainer of transformers, which looks whether the run is finished after its first step."""
    from transformers import Trainer, TrainingArguments

    from fairseq_async.pytorch.hf_trainer import AsyncCallback

    callback = AsyncCallback("hybrid_async", **TRAINS)
    given: dict[str, Any] = {"max_steps": 20, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    data = [{"inputs": INPUTS, "labels": torch.ones(1)}] * 8
    own = Trainer(model, TrainingArguments(f"{sys.argv[2]}/out", **given), train_dataset=data, callbacks=[callback])  # type: ignore[arg-type]
    batches: list[int] = []
    model.register_forward_hook(lambda *_: batches.append(1))  # global_step is the run's
    own.train()
    return callback.worker, len(batches) - 1


def deepspeed(model: nn.Module) -> tuple[int, int]:
    from fairseq_async.deepspeed_plugin import initialize

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.05}}}
    parameters: Any = model.parameters()
    engine: Any = initialize(model=model, model_parameters=parameters, config=config | {"async_training": LOCAL})[0]
    engine.join_run()
    steps = 0
    while not engine.finished:
        engine.backward(engine(INPUTS, torch.ones(1))["loss"])
        engine.step()
        steps += 1
    if engine.worker == 0:
        die(steps)
        engine.save_checkpoint(f"{sys.argv[2]}/checkpoint", "last")
    return engine.worker, steps


def die(steps: int) -> None:
    once = Path(f"{sys.argv[2]}.once")
    if not once.exists():
        once.touch()
        if sys.argv[3:] == ["raise"]:
            raise OSError("no room for the model")
        if sys.argv[3:] == ["exit"]:
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    Path(f"{sys.argv[2]}.steps").write_text(str(steps))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model()
    worker, steps = {"plain": plain, "hf_trainer": trainer, "deepspeed": deepspeed}[sys.argv[1]](model)
    if worker == 0:
        die(steps)
        torch.save(model.state_dict(), f"{sys.argv[2]}.pt")
