"""Workers on two machines, which are two network namespaces here."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MODEL, PACKAGE, Processes, command

ADDRESSES = ["10.213.77.1", "10.213.77.2"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two namespaces with an address each and a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    names = [f"fairseq-async-{os.getpid()}-{index}" for index in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr}")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_torchrun_over_two_machines(machines: list[str], processes: Processes, data: Path, tmp_path: Path) -> None:
    """Worker 1 has neither the server's memory nor its loopback address."""
    method = ["--optimizer", "local_sgd", "--local-steps", 5, "--max-update", 60, "--server", f"{ADDRESSES[0]}:29400"]
    job = [command("fairseq-train"), data, *MODEL, "--user-dir", PACKAGE, "--distributed-world-size", 1, *method]
    nodes = []
    for rank, machine in enumerate(machines):
        launcher = [command("torchrun"), "--nnodes", 2, "--node-rank", rank, "--nproc-per-node", 1]
        launcher += ["--master-addr", ADDRESSES[0], "--master-port", 29500]
        nodes.append(processes.start(["ip", "netns", "exec", machine, *launcher, *job, "--save-dir", tmp_path / "run"]))
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "".join(output[-2000:] for output in outputs)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert {event["worker"] for event in events} == {0, 1}
    assert sum(event["local_steps"] for event in events) == 120
