"""Workers on two machines."""

import json
import subprocess
from pathlib import Path

import pytest

from fairseq_async.exchange.authentication import new_token, write_token
from fairseq_async.options.addresses import free_port
from scripts.faults.hosts import Cable, Host, other_host
from tests.helpers.commands import DEEPSPEED, DEEPSPEED_JOB, MODEL, PACKAGE, ROOT, Processes, command
from tests.helpers.run_files import events


def test_torchrun_over_two_machines(host: Host, processes: Processes, data: Path, tmp_path: Path) -> None:
    """Worker 1 has neither the server's memory nor its loopback address."""
    server = f"{host.near}:{free_port()}"
    token = tmp_path / "token"
    write_token(token, new_token())
    method = ["--optimizer", "local_sgd", "--local-steps", 5, "--max-update", 60, "--server", server]
    method += ["--token-file", token]
    job = [command("fairseq-train"), data, *MODEL, "--user-dir", PACKAGE, "--distributed-world-size", 1, *method]
    store = ["--master-addr", host.near, "--master-port", free_port()]
    nodes = []
    for rank, prefix in enumerate([(), host.prefix]):
        launcher = [command("torchrun"), "--nnodes", 2, "--node-rank", rank, "--nproc-per-node", 1, *store]
        nodes.append(processes.start([*prefix, *launcher, *job, "--save-dir", tmp_path / "run"]))
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "".join(output[-2000:] for output in outputs)
    updates = events(tmp_path / "run")
    assert {event["worker"] for event in updates} == {0, 1}
    assert sum(event["local_steps"] for event in updates) == 120


def test_deepspeeds_hostfile_over_two_machines(host: Host, processes: Processes, tmp_path: Path) -> None:
    """Started by hand on each, since there is no ssh between them."""
    (tmp_path / "hosts").write_text("".join(f"{address} slots=1\n" for address in (host.near, host.far)))
    write_token(tmp_path / "token", new_token())
    section = {"local_steps": 5, "total_steps": 20, "server": f"{host.near}:{free_port()}"}
    change = {"async_training": section | {"token_file": str(tmp_path / "token")}}
    config = ROOT / "deepspeed_config" / "delayed_nesterov.json"
    job = [DEEPSPEED_JOB, "--out", tmp_path, "--deepspeed", "--deepspeed_config", config]
    store = ["--master_addr", host.near, "--master_port", free_port()]
    nodes = []
    for rank, prefix in enumerate([(), host.prefix]):
        launcher = [command("deepspeed"), "--hostfile", tmp_path / "hosts", "--no_ssh", "--node_rank", rank, *store]
        line = [*prefix, *launcher, *job, "--change", json.dumps(change)]
        nodes.append(processes.start(line, **DEEPSPEED))
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "".join(output[-2000:] for output in outputs)
    updates = events(tmp_path / "run")
    assert {event["worker"] for event in updates} == {0, 1}
    assert sum(event["local_steps"] for event in updates) == 40


def test_a_machine_is_made_at_once_after_one_in_which_a_program_still_runs() -> None:
    with other_host(Cable()) as first:
        if not first.prefix:
            pytest.skip("no network namespace can be made here")
        left = subprocess.Popen([*first.prefix, "sleep", "60"])
    try:
        with other_host(Cable()) as second:
            assert second.prefix
    finally:
        left.kill()
        left.wait()
