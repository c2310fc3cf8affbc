"""fairseq-train with a task of its own, which validates amid an epoch and at its end."""

import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.data import FairseqDataset
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel, register_model, register_model_architecture
from fairseq.tasks import LegacyFairseqTask, register_task
from fairseq_cli import train as fairseq_train
from torch import Tensor, nn

import fairseq_async.fairseq_plugin  # noqa: F401  # the package may have been imported before fairseq
from tests.helpers.contract.net import BATCH, DECAY, HALF, RATE, STEPS, Net, Run, flags_of, rows

_net: list[Net] = []  # the model of the present job
COMMON = (
    f"--task contract --arch contract --criterion contract --batch-size {BATCH} --required-batch-size-multiple 1 "
    f"--lr {RATE} --seed 3 "
    f"--weight-decay {DECAY} --validate-interval-updates 3 --num-workers 0 --no-epoch-checkpoints"
).split()


class Rows(FairseqDataset):
    def __init__(self) -> None:
        self.rows = rows()

    def __getitem__(self, index: int) -> tuple[int, dict[str, Tensor]]:
        return index, self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def collater(self, samples: list[tuple[int, dict[str, Tensor]]]) -> dict[str, Any]:
        if not samples:  # of a step for which a worker has none
            return {}
        inputs = {name: torch.stack([row[name] for _, row in samples]) for name in ("inputs", "labels")}
        return {"id": torch.tensor([n for n, _ in samples]), "ntokens": len(samples), "net_input": inputs}

    def num_tokens(self, index: int) -> int:
        return 1

    def size(self, index: int) -> int:
        return 1


@register_task("contract")
class Task(LegacyFairseqTask):
    target_dictionary = None

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        parser.add_argument("data")

    def load_dataset(self, split: str, **kwargs: object) -> None:
        self.datasets[split] = Rows()

    def max_positions(self) -> None:
        return None


@register_task("contract_by_hand")
class TaskByHand(Task):
    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        (net,) = _net
        optimizer.set_lr(net.run.case.rate(net.batches - 1))  # type: ignore[misc]
        optimizer.step()


@register_model("contract")
class Model(BaseFairseqModel):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    @classmethod
    def build_model(cls, args: Namespace, task: Task) -> "Model":
        return cls(_net[0])

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        output: dict[str, Tensor] = self.net(**inputs)
        return output


register_model_architecture("contract", "contract")(lambda args: None)


@register_criterion("contract")
class Criterion(FairseqCriterion):
    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, Any]:
        loss = model(**sample["net_input"])["loss"]
        return loss, 1, {"loss": loss.data, "ntokens": BATCH, "nsentences": BATCH, "sample_size": 1}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        metrics.log_scalar("loss", sum(float(output["loss"]) for output in logging_outputs))


def train(net: Net, run: Run) -> None:
    _net[:] = [net]
    run.path.mkdir(exist_ok=True)
    flags = ["--optimizer", *(["adam"] if run.method == "plain" else [run.method, *flags_of(run)])]
    flags += ["--max-update", run.steps if run.method == "plain" else STEPS, "--save-dir", run.path]
    flags += ["--save-interval-updates", HALF] if run.case.saves else ["--no-save"]
    flags += ["--task", "contract_by_hand"] * bool(run.case.rate)
    if run.case.has_schedule:
        flags += f"--lr-scheduler polynomial_decay --total-num-update {STEPS + 4}".split()
    if run.case.goes_on or run.case.brings_state:
        flags += ["--restore-file", run.before / f"checkpoint_1_{HALF}.pt"]
        flags += ["--reset-dataloader"] * (run.case.workers > 1)  # the workers have other parts of the data than before
    sys.argv = ["fairseq-train", str(run.path), *COMMON, *map(str, flags)]
    fairseq_train.cli_main()
