"""Trains the net of each case as one worker of each method, and plainly: a fork for each, with a server in a thread.

``python -m tests.helpers.contract.job FRONT_END OUT`` leaves parameters, output and exit code of each in OUT.
"""

import importlib
import os
import sys
from pathlib import Path

import torch

from fairseq_async.environment import SERVER, TOKEN, WORKER, WORKERS
from scripts.faults.thread_server import ThreadServer
from tests.helpers.contract.net import CASES, Net

AT_A_TIME = 3  # each waits for its server's thread for much of its time
METHODS = ("plain", "hybrid_async", "local_sgd")
BUILDS = {  # the module that is the server's program
    "fairseq_train": "fairseq_async.fairseq_plugin.server",
    "deepspeed_engine": "fairseq_async.deepspeed_plugin.server",
}


def train(front_end: str, case: str, method: str, path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if method != "plain":
        own = "fairseq_async.server.programs.local_sgd_main"
        program = own if method == "local_sgd" else BUILDS.get(front_end, "fairseq_async.server.programs.gradient_main")
        server = ThreadServer(1, path, build=importlib.import_module(program).build)
        os.environ |= {SERVER: server.address, TOKEN: server.token, WORKER: "0", WORKERS: "1"}
    net = importlib.import_module(f"tests.helpers.contract.{front_end}").train(Net(CASES[case]), method, path)
    torch.save(net.state_dict(), f"{path}.pt")


def main() -> None:
    front_end, out = sys.argv[1], Path(sys.argv[2])
    importlib.import_module(f"tests.helpers.contract.{front_end}")
    running: dict[int, Path] = {}
    for case in CASES:
        for method in METHODS:
            while len(running) >= AT_A_TIME:
                note_end(running)
            path = out / f"{case}.{method}"
            child = os.fork()
            if child == 0:
                with open(f"{path}.log", "w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                return train(front_end, case, method, path)  # and ends, as a script would
            running[child] = path
    while running:
        note_end(running)


def note_end(running: dict[int, Path]) -> None:
    child, status = os.wait()
    Path(f"{running.pop(child)}.code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
