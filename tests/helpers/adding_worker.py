"""``python -m tests.helpers.adding_worker WHAT ADDRESS NUMBER``: a worker whose parameters count the server's versions.

``steady``, worker 0 with NUMBER parameters, takes one step after another and prints their numbers. ``dying``, worker
NUMBER, applies one update and stops in the middle of the next.
"""

import os
import sys
import time

import torch

from fairseq_async.exchange.channel import _HEADER
from fairseq_async.protocol import Layout, Push, encode
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.start.server_process import TOKEN
from scripts.faults.adder import Adder


def steady(address: str, values: int) -> None:
    client = Client(LastingConnection(address, os.environ[TOKEN], 0, patience=60.0, on_loss=print))
    adder = Adder(client, Layout.of([("weight", torch.zeros(values))]), worker_timeout=2.0)
    while True:
        adder.step()
        if not bool((adder.parameters == adder.version).all()):
            raise SystemExit(f"version {adder.version} holds {adder.parameters.unique().tolist()}")
        print(adder.sequence, flush=True)
        time.sleep(0.05)


def dying(address: str, worker: int) -> None:
    adder = Adder(Client(LastingConnection(address, os.environ[TOKEN], worker, 30.0)))
    adder.step()
    slot = adder.client.slot
    half = slot.numel() // 2
    slot[:half] = float("nan")
    if adder.client.memory.remote:
        connection = adder.client.connection.channel.connection
        body = encode(Push(adder.sequence, adder.version, 1.0))
        header = _HEADER.pack(len(body), 4 * slot.numel())
        connection.sendall(header + body + torch.full((half,), float("nan")).numpy().tobytes())
    print("in the middle", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    {"steady": steady, "dying": dying}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
