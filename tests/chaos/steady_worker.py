"""``python -m tests.chaos.steady_worker ADDRESS``: takes one step after another, and says the number of each."""

import os
import sys
import time

from fairseq_async.server import ServerClient
from fairseq_async.server.process import TOKEN
from tests.chaos.runs import Adder


def main(address: str) -> None:
    client = ServerClient(address, os.environ[TOKEN], 0, patience=60.0, on_loss=print)
    adder = Adder(client, worker_timeout=2.0)
    while True:
        adder.step()
        print(adder.sequence, flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
