"""The samples of each step, with the ``Trainer``'s own samplers and a user's: those of plain torchrun."""

import json
from pathlib import Path
from typing import Any

import pytest

from fairseq_async.environment import SERVER, TOKEN, WORKER, WORKERS
from fairseq_async.options.addresses import free_port
from fairseq_async.worker.start.server_process import ServerProcess
from tests.helpers.commands import HELPERS, ROOT, Processes, command

DIVIDED = ("by the arguments", "lazy", "prepared", "printed world size", "batch_rebalance", "group_by_length")
ATTACHED = ("lazy", "batch_rebalance", "group_by_length")
NOT_DIVIDED = "error: get_train_dataloader does not divide the data"
WHOLE = {  # what is said where a script leaves the data undivided, also if it has read the numbers
    "undivided": NOT_DIVIDED,
    "printed in the method": NOT_DIVIDED,
    "printed": "error: workers 0 and 1 began with the same batches",
    "printed by one": "callback.workers before training, unlike others",
}


def train(front_end: str, out: Path, cases: tuple[str, ...]) -> dict[tuple[str, int], dict[str, Any]]:
    """What each of two processes has left of each case: its exit code, and its steps if it has ended well."""
    environments: list[dict[str, Any]] = [{}, {}]
    servers, processes = [], Processes()
    try:
        for case in cases:
            shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            if front_end == "callback":
                module, log = "fairseq_async.server.programs.local_sgd_main", out / f"{case}.log"
                servers.append(ServerProcess(module, 2, out / case, log, ends_with_workers=True))
                shared = {SERVER: servers[-1].address, TOKEN: servers[-1].token, WORKERS: "2"}
            for rank, environment in enumerate(environments):
                own = {WORKER: str(rank)} if front_end == "callback" else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                environment[case] = shared | own | {"OWN_RANK": str(rank)}
        job = [command("python"), HELPERS / "hf_sampler_job.py", front_end, out]
        path = f"{HELPERS / 'without_fairseq'}:{ROOT}"
        started = [
            processes.start([*job, json.dumps(each)], PYTHONPATH=path, DS_ACCELERATOR="cpu") for each in environments
        ]
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        processes.end()
        for server in servers:
            server.stop()
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for case in cases:
        for rank in (0, 1):
            left, code = out / f"{case}-{rank}.json", int((out / f"{case}-{rank}.code").read_text())
            found[case, rank] = {"code": code, "output": outputs[rank]}
            found[case, rank] |= json.loads(left.read_text()) if left.exists() else {}
    return found


def test_workers_draw_the_samples_that_plain_ranks_draw(tmp_path_factory: pytest.TempPathFactory) -> None:
    """And have their steps, rates and epochs; a loader that every worker draws whole is one line of error."""
    plain = train("plain", tmp_path_factory.mktemp("plain"), DIVIDED)
    callback = train("callback", tmp_path_factory.mktemp("callback"), (*DIVIDED, *WHOLE))
    attach = train("attach", tmp_path_factory.mktemp("attach"), ATTACHED)
    compared = [(callback, case, rank) for case in DIVIDED for rank in (0, 1)]
    for ours, case, rank in compared + [(attach, case, rank) for case in ATTACHED for rank in (0, 1)]:
        for key in ("code", "steps", "max_steps", "epoch", *["rates"] * (rank == 0)):  # worker 0 logs
            assert ours[case, rank][key] == plain[case, rank][key], (case, rank, key)
    for case, said in WHOLE.items():
        assert 2 in (callback[case, 0]["code"], callback[case, 1]["code"]), case
        assert said in callback[case, 0]["output"] + callback[case, 1]["output"]
