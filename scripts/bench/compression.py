"""Measures the bytes of each codec, what it loses, and the cost of encoding and decoding relative to a copy.

The values are normal, each times the square of another one, so that a few are far larger than the rest. AdaComp adapts
how much it sends. It therefore gets twelve such vectors in a row, with error feedback, and the last payload counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.algorithms import BF16, DQSGD, E3M0, AdaComp, AdaCompBins, Codec, ErrorFeedback, Int8, TopK  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

CODECS: dict[str, Codec] = {
    "bf16": BF16(),
    "int8": Int8(),
    "e3m0": E3M0(),
    "topk": TopK(),
    "adacomp": AdaComp(),
    "adacomp, scale=bin": AdaCompBins(32),
    "dqsgd": DQSGD(),
    "dqsgd:bits=5,block=64": DQSGD(5, 64),
    "dqsgd:bits=5,block=64,norm=max": DQSGD(5, 64, "max"),
}
MOST_BYTES = {"int8": 0.26, "e3m0": 0.131, "topk": 1 / 140}  # as a share of fp32's
MOST_COPIES = {"int8": 4.0, "e3m0": 4.0, "topk": 15.0, "adacomp": 15.0, "adacomp, scale=bin": 15.0}


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Returns the processor time of the fastest of ``repeats`` calls, after one more; other programs do not count."""
    call()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def vector(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * torch.randn(size, generator=generator).square()


def bytes_of(codec: Codec, size: int, rounds: int) -> list[int]:
    """Returns the bytes of each of ``rounds`` payloads in a row, with error feedback if the codec is biased."""
    feedback, found = ErrorFeedback(codec), []
    for seed in range(rounds):
        update = vector(size, seed)
        found.append(len(feedback.send(update, seed) if codec.biased else codec.encode(update, seed)))
        feedback.acknowledge()
    return found


def measured(name: str, codec: Codec, size: int, repeats: int, copy: float) -> dict[str, Any]:
    values = vector(size, seed=0)
    payload = codec.encode(values)
    sent = bytes_of(codec, size, 12 if isinstance(codec, AdaComp) else 1)[-1]
    lost = codec.decode(payload, size).double().sub_(values).square_().sum() / values.double().square_().sum()
    encoding = seconds(lambda: codec.encode(values), repeats) / copy
    decoding = seconds(lambda: codec.decode(payload, size), repeats) / copy
    return {
        "codec": name,
        "bytes": sent,
        "of fp32": sent / (4 * size),
        "times fewer": 4 * size / sent,
        "squared error, of the squares": float(lost),
        "encode, copies": encoding,
        "decode, copies": decoding,
    }


def main(
    size: Annotated[int, typer.Option(min=1000, help="Values.")] = 25_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Calls of which the fastest counts.")] = 5,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure the bytes and the cost of each codec."""
    values = vector(size, seed=0)
    room = torch.zeros_like(values)
    report = Report(f"Codecs: {size:,} values, beside a copy of them into memory that is there")
    copy, into_new = seconds(lambda: room.copy_(values), repeats), seconds(values.clone, repeats)
    report.table("copies", [{"into memory that is there, ms": 1000 * copy, "into new memory, ms": 1000 * into_new}])
    rows = [measured(name, codec, size, repeats, copy) for name, codec in CODECS.items()]
    report.table("codecs", rows)
    for row in rows:
        name = row["codec"]
        if name in MOST_BYTES:
            report.bound(f"{name}: bytes of fp32", row["of fp32"], MOST_BYTES[name])
        if name in MOST_COPIES:
            for what in ("encode", "decode"):
                report.bound(f"{name}: {what}, copies", row[f"{what}, copies"], MOST_COPIES[name])
    report.end(json)


if __name__ == "__main__":
    run_main(main)
