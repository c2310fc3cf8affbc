"""Workers on two machines: two network namespaces, or two loopback addresses where a machine makes none."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fairseq_async.exchange.authentication import new_token, write_token
from tests.conftest import DEEPSPEED, MODEL, PACKAGE, ROOT, Processes, command, free_port

ADDRESSES = ["10.213.77.1", "10.213.77.2"]


@dataclass(frozen=True)
class Machines:
    """What to write before a command for it to run on each, and the address of the first."""

    prefixes: list[list[str]]
    address: str


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Two namespaces with an address each and a cable between them; where none can be made, two loopback addresses."""
    names = [f"fairseq-async-{os.getpid()}-{index}" for index in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except (OSError, subprocess.CalledProcessError):  # no ip, or not allowed
            yield Machines([[], []], "127.0.0.2")
            return
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield Machines([["ip", "netns", "exec", name] for name in names], ADDRESSES[0])
    finally:
        for name in names if shutil.which("ip") else []:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_torchrun_over_two_machines(machines: Machines, processes: Processes, data: Path, tmp_path: Path) -> None:
    """Worker 1 has neither the server's memory nor its loopback address."""
    server = f"{machines.address}:{free_port()}"
    token = tmp_path / "token"
    write_token(token, new_token())
    method = ["--optimizer", "local_sgd", "--local-steps", 5, "--max-update", 60, "--server", server]
    method += ["--token-file", token]
    job = [command("fairseq-train"), data, *MODEL, "--user-dir", PACKAGE, "--distributed-world-size", 1, *method]
    store = ["--master-addr", machines.address, "--master-port", free_port()]
    nodes = []
    for rank, prefix in enumerate(machines.prefixes):
        launcher = [command("torchrun"), "--nnodes", 2, "--node-rank", rank, "--nproc-per-node", 1, *store]
        nodes.append(processes.start([*prefix, *launcher, *job, "--save-dir", tmp_path / "run"]))
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "".join(output[-2000:] for output in outputs)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert {event["worker"] for event in events} == {0, 1}
    assert sum(event["local_steps"] for event in events) == 120


def test_deepspeeds_hostfile_over_two_machines(machines: Machines, processes: Processes, tmp_path: Path) -> None:
    """Started by hand on each, since there is no ssh between them."""
    (tmp_path / "hosts").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    write_token(tmp_path / "token", new_token())
    section = {"local_steps": 5, "total_steps": 20, "server": f"{machines.address}:{free_port()}"}
    change = {"async_training": section | {"token_file": str(tmp_path / "token")}}
    config = ROOT / "deepspeed_config" / "delayed_nesterov.json"
    job = [ROOT / "tests" / "deepspeed_job.py", "--out", tmp_path, "--deepspeed", "--deepspeed_config", config]
    store = ["--master_addr", machines.address, "--master_port", free_port()]
    nodes = []
    for rank, prefix in enumerate(machines.prefixes):
        launcher = [command("deepspeed"), "--hostfile", tmp_path / "hosts", "--no_ssh", "--node_rank", rank, *store]
        line = [*prefix, *launcher, *job, "--change", json.dumps(change)]
        nodes.append(processes.start(line, **DEEPSPEED))
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "".join(output[-2000:] for output in outputs)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert {event["worker"] for event in events} == {0, 1}
    assert sum(event["local_steps"] for event in events) == 40
