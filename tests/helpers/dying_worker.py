"""``python -m tests.helpers.dying_worker ADDRESS WORKER``: applies one update, then stops in the middle of the next."""

import os
import sys
import time

import torch

from fairseq_async.exchange.channel import _HEADER
from fairseq_async.protocol import Push, encode
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.start.server_process import TOKEN
from scripts.faults.adder import Adder


def main(address: str, worker: int) -> None:
    adder = Adder(Client(address, os.environ[TOKEN], worker, 30.0))
    adder.step()
    slot = adder.client.slot
    half = slot.numel() // 2
    slot[:half] = float("nan")
    if adder.client.remote:
        connection = adder.client._channel.connection
        body = encode(Push(adder.sequence, adder.version, 1.0))
        header = _HEADER.pack(len(body), 4 * slot.numel())
        connection.sendall(header + body + torch.full((half,), float("nan")).numpy().tobytes())
    print("in the middle", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
