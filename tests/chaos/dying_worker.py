"""``python -m tests.chaos.dying_worker ADDRESS WORKER``: applies one update, then stops in the middle of the next."""

import os
import sys
import time

import torch

from fairseq_async.exchange.messages import _LENGTH
from fairseq_async.server import ServerClient
from fairseq_async.server.process import TOKEN
from tests.chaos.runs import Adder


def main(address: str, worker: int) -> None:
    adder = Adder(ServerClient(address, os.environ[TOKEN], worker, 30.0))
    adder.step()
    slot = adder.client.slot
    half = slot.numel() // 2
    slot[:half] = float("nan")
    if adder.client.remote:
        connection = adder.client._channel.connection
        body = f'{{"kind": "push", "sequence": {adder.sequence}, "payload": {4 * slot.numel()}}}'.encode()
        connection.sendall(_LENGTH.pack(len(body)) + body + torch.full((half,), float("nan")).numpy().tobytes())
    print("in the middle", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
