"""``python -m tests.helpers.steady_worker ADDRESS [VALUES]``: takes one step after another and prints their numbers.

It is the only worker, so that every one of its parameters is to be the number of the version.
"""

import os
import sys
import time

import torch

from fairseq_async.protocol import Layout
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.start.server_process import TOKEN
from scripts.faults.adder import Adder


def main(address: str, values: int) -> None:
    client = Client(address, os.environ[TOKEN], 0, patience=60.0, on_loss=print)
    adder = Adder(client, Layout.of([("weight", torch.zeros(values))]), worker_timeout=2.0)
    while True:
        adder.step()
        if not bool((adder.parameters == adder.version).all()):
            raise SystemExit(f"version {adder.version} holds {adder.parameters.unique().tolist()}")
        print(adder.sequence, flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 32)
