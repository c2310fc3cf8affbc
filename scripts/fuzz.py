"""Fuzzes the server's wire format: the server must stay up, keep its state and not grow in memory.

python scripts/fuzz.py --minutes 10 --keep
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fairseq_async.worker.connection.client import Client  # noqa: E402
from fairseq_async.worker.connection.lasting_connection import LastingConnection  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.faults.adder import Adder  # noqa: E402
from scripts.faults.fuzzer import Fuzzer, read_corpus, write_corpus  # noqa: E402
from scripts.faults.thread_server import ThreadServer  # noqa: E402

_ROUND = 5.0  # seconds between two checks
_WARM_UP = 3  # rounds in which memory may still grow
_GROWTH = 8 << 20  # bytes by which the process may grow


def main(
    minutes: Annotated[float, typer.Option(min=0.1)] = 10,
    seed: Annotated[int | None, typer.Option(help="Of the noise; another each time by default.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep one message of each kind in tests/server/corpus.")] = False,
) -> None:
    """Print the number of messages and their results; end with code 1 when the server has changed, grown or died."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory, open(Path(directory) / "refusals.log", "w") as refusals:
        sys.stderr = refusals  # for the server, which is in a thread
        server = ThreadServer(2, Path(directory), "127.0.0.2")
        adder = Adder(Client(LastingConnection(server.address, server.token, 0, 30.0)))
        fuzzer = Fuzzer(server, random.Random(seed), corpus=read_corpus())
        sizes, end = [], time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            before = fuzzer.state()
            fuzzer.run(min(_ROUND, max(0.1, end - time.monotonic())))
            adder.client.schedule_event("begin_epoch", 1)
            if fuzzer.state() != before:
                raise SystemExit("the server's state has changed")
            if adder.step().version != adder.sequence:
                raise SystemExit("the server does not count right any more")
            sizes.append(_resident())
        server.stop()
        sys.stderr = sys.__stderr__
    for outcome, count in fuzzer.tried.most_common():
        print(f"{count:>10,}  {outcome}")
    growth = sizes[-1] - sizes[min(_WARM_UP, len(sizes) - 1)]
    print(f"{sum(fuzzer.tried.values()):,} messages, {len(fuzzer.tried)} outcomes; grown by {growth / 2**20:.1f} MiB")
    if keep:
        write_corpus(fuzzer.found)
    if growth > _GROWTH:
        raise SystemExit("the process has grown")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    run_main(main)
