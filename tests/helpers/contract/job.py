"""Trains the net of each case with each method, and plainly: a fork for each worker, and one for its server.

``python -m tests.helpers.contract.job FRONT_END OUT`` leaves parameters, output and exit code of each worker in OUT.
"""

import gc
import importlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from fairseq_async.environment import JOINS, SERVER, TOKEN, WORKER, WORKERS
from scripts.faults.thread_server import ThreadServer
from tests.helpers.contract.net import CASES, Net, Run

AT_A_TIME = 3  # each waits for its server's thread for much of its time
BUILDS = {  # the module that is the server's program
    "fairseq_train": "fairseq_async.fairseq_plugin.server",
    "deepspeed_engine": "fairseq_async.deepspeed_plugin.server",
    "deepspeed_scripts": "fairseq_async.deepspeed_plugin.server",
}


def work(front_end: str, run: Run) -> None:
    """One worker, which ends as a script would."""
    log = os.open(f"{run.path}-{run.worker}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.manual_seed(0)
    net = Net(run)
    importlib.import_module(f"tests.helpers.contract.{front_end}").train(net, run)
    divided = run.case.stage == 3  # then parameters have no elements between two passes
    trace = torch.empty(0) if divided else torch.stack([*net.trace, net.flat()])
    torch.save({"model": net.state_dict(), "trace": trace}, f"{run.path}-{run.worker}.pt")
    sys.exit()


def start(front_end: str, run: Run) -> int:
    child = os.fork()
    if child == 0:
        if run.method != "plain":
            os.environ[WORKER] = JOINS if run.worker and run.case.joins else str(run.worker)
        work(front_end, run)
    return child


def serve(program: ModuleType, run: Run, token: str | None = None, port: int = 0) -> tuple[int, str, str]:
    """Starts the server in a process of its own, which ends with this one; its process, address and token.

    A worker that is forked from a process with the server's thread could inherit a lock that the thread holds.
    """
    (reads, writes), (waits, held) = os.pipe(), os.pipe()
    process, kills = os.fork(), run.case.kills_server
    if process == 0:
        os.close(held)
        server = ThreadServer(run.case.workers, run.path, build=program.build, token=token, port=port, recovers=kills)
        os.write(writes, f"{server.address} {server.token}".encode())
        os.read(waits, 1)
        os._exit(0)
    os.close(writes)
    address, token = os.read(reads, 1000).decode().split()
    run.mark("server").write_text(str(process))
    return process, address, token


def train(front_end: str, first: Run) -> None:
    """The server and all workers of a run, of which one that is killed is started again."""
    torch.set_num_threads(1)
    case, path = first.case, first.path
    server, workers = 0, 1 if first.method == "plain" else case.workers + case.joins
    if first.method != "plain":
        own = "fairseq_async.server.programs.local_sgd_main"
        hybrid = BUILDS.get(front_end, "fairseq_async.server.programs.gradient_main")
        program = importlib.import_module(own if first.method == "local_sgd" else hybrid)
        server, address, token = serve(program, first)
        os.environ |= {SERVER: address, TOKEN: token, WORKERS: str(case.workers)}
    runs = [replace(first, worker=worker) for worker in range(workers)]
    running = {start(front_end, run): run for run in runs}
    while running:
        child, status = os.wait()
        if child == server:  # which a worker has killed
            server, *_ = serve(program, first, token, int(address.rpartition(":")[2]))
            continue
        run, code = running.pop(child), os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            running[start(front_end, run)] = run
        else:
            Path(f"{path}-{run.worker}.code").write_text(str(code))
    os._exit(0)


def main() -> None:
    front_end, out = sys.argv[1], Path(sys.argv[2])
    cases = getattr(importlib.import_module(f"tests.helpers.contract.{front_end}"), "CASES", CASES)
    gc.freeze()  # else each fork copies what its collections touch
    running: dict[int, Run] = {}
    waiting = [
        Run(case, method, out / f"{name}.{method}")
        for name, case in cases.items()
        for method in (*["plain"] * case.compared, *case.methods)
    ]
    while waiting or running:
        busy = {each.path for each in (*waiting, *running.values())}
        free = [run for run in waiting if run.before not in busy]
        if not free or len(running) == AT_A_TIME:
            running.pop(os.wait()[0])
            continue
        run = free[0]
        waiting.remove(run)
        child = os.fork()
        if child == 0:
            train(front_end, run)
        running[child] = run


if __name__ == "__main__":
    main()
