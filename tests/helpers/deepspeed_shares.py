"""DeepSpeed scripts of two workers that accumulate, one case after the other: ``deepspeed_shares.py OUT``.

Each rank is a process that is forked after DeepSpeed is imported. It leaves the samples of each of its gradients and
the parameters that it came to, and in a log what it has printed.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fairseq_async.deepspeed_plugin as deepspeed_async
from fairseq_async.options.addresses import free_port
from tests.helpers.commands import HELPERS

SAMPLES, BATCH, AVERAGE, SAVED_AT = 48, 2, 4, 3
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
BF16 = {"bf16": {"enabled": True}}


class Case(NamedTuple):
    """A run: the shares that its server gives, its section, other keys, and how its script ends a step."""

    shares: str = "6,2"
    section: dict[str, Any] = {"total_steps": 6}
    config: dict[str, Any] = {}
    ends: str = "by engine"
    load: str = ""


CASES = {
    "whole": Case(),
    "resumed": Case(load="whole"),
    "bf16": Case(config=BF16),
    "island": Case(section={"total_steps": 6, "island_size": 2}),
    "pass": Case(section={}),
    "asked": Case(ends="as asked"),
    "not asked": Case(ends="by four"),
    "equal shares": Case("4,4", {}),
    "equal": Case("6,2", {"shares": "equal"}),
}


class Sines(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples by number."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.inputs[index], self.inputs[index].sum().sin()[None]


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def train(name: str, out: Path, rank: int) -> None:
    case, model = CASES[name], make_model()
    method = {"method": "hybrid_async", "barrier": True, "shares": "auto", "run_dir": str(out / name / "run")}
    ranks = case.section.get("island_size", 1)
    config = {"train_micro_batch_size_per_gpu": BATCH // ranks, "gradient_accumulation_steps": AVERAGE}
    config |= {"optimizer": SGD, "gradient_clipping": 0.0, "async_training": method | case.section} | case.config
    engine, _, loader, _ = deepspeed_async.initialize(model=model, training_data=Sines(), config=config)
    if case.load:
        engine.load_checkpoint(str(out / case.load / "saved"))
    kind = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    samples: list[list[int]] = [[]]
    for numbers, inputs, targets in cast(Iterable[tuple[Tensor, Tensor, Tensor]], loader):
        number = len(samples[-1]) // len(numbers) + 1
        if case.ends != "by engine":
            asked = engine.gradient_accumulation_steps() if case.ends == "as asked" else AVERAGE
            engine.set_gradient_accumulation_boundary(number == asked)
        engine.backward(nn.functional.mse_loss(engine(inputs.to(kind)).float(), targets))
        samples[-1] += numbers.tolist()
        before, is_last = engine.global_steps, engine.is_gradient_accumulation_boundary()
        if is_last or case.ends == "by engine":
            assert not is_last or case.ends == "by four" or engine.train_batch_size() == number * BATCH
            engine.step()
        assert is_last == (engine.global_steps > before)
        if is_last:
            samples.append([])
            if engine.global_steps == SAVED_AT and name == "whole":
                engine.save_checkpoint(str(out / name / "saved"))
    engine.end()
    ended = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.save({"samples": samples, "parameters": ended}, out / f"{name}-{rank}.pt")


def main() -> None:
    out = Path(sys.argv[1])
    for name, case in CASES.items():
        ranks = 2 * case.section.get("island_size", 1)
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        plugin = {"FAIRSEQ_ASYNC_PLUGINS": str(HELPERS / "fixed_shares.py"), "SHARES": case.shares}
        for rank in range(ranks):
            if os.fork() == 0:
                os.environ |= world | plugin | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                torch.set_num_threads(1)
                with (out / f"{name}.log").open("a") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                return train(name, out, rank)  # and ends, as a script would
        for _ in range(ranks):
            os.wait()


if __name__ == "__main__":
    main()
