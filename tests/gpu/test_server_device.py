"""A server whose parameters are on the workers' GPU, in real processes: as one on the CPU, and killed."""

import gc
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.algorithms.pieces import pieces
from fairseq_async.algorithms.threads import PIECE
from fairseq_async.exchange.gpu_memory import IPC
from fairseq_async.protocol import Layout, Push, Report
from fairseq_async.records.state_files import moved
from fairseq_async.reporting.audit import audit
from fairseq_async.server.plan import EpochPlan
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.connection.server_connection import JoinDetails
from scripts.faults.sgd_server import Constant, sgd_spec
from scripts.faults.thread_server import ThreadServer
from tests.helpers.commands import HELPERS, ROOT, Processes, command
from tests.helpers.launched import count
from tests.helpers.run_files import snapshot_versions
from tests.helpers.waiting import wait_until

STEPS = 200
SCRIPT = """
import time
import torch
from fairseq_async.torch import AsyncLocalSGD, HybridAsync

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
with METHOD as worker:
    torch.manual_seed(worker.worker)
    while not worker.finished:
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs.cuda()), inputs.sum(1, keepdim=True).sin().cuda())
        loss.backward()
        optimizer.step()
        time.sleep(PAUSE)
if worker.worker == 0:
    torch.save(torch.cat([each.detach().flatten().cpu() for each in model.parameters()]), "parameters.pt")
"""
HYBRID = f"HybridAsync(model, optimizer, total_steps={STEPS}, barrier=True, server_device=DEVICE)"
LOCAL = f"AsyncLocalSGD(model, optimizer, total_steps={STEPS}, local_steps=5, server_device=DEVICE, OUTER)"


def start(
    processes: Processes, patch: pytest.MonkeyPatch, folder: Path, method: str, workers: int = 2, pause: float = 0.0
) -> "subprocess.Popen[str]":
    folder.mkdir()
    patch.chdir(folder)
    script = SCRIPT.replace("METHOD", method).replace("PAUSE", str(pause))
    (folder / "train.py").write_text(script)
    launcher = [command("fairseq-async"), "launch", "--workers", workers, "--", "python", "train.py"]
    return processes.start(launcher, PYTHONPATH=f"{HELPERS / 'without_fairseq'}:{ROOT}")


@pytest.mark.parametrize(
    ("method", "workers"),
    [
        (HYBRID, 2),
        (HYBRID.replace("barrier=True", "updates_per_step=1, look_ahead=1.0"), 1),
        (LOCAL.replace("OUTER", "outer='diloco'"), 2),
        (LOCAL.replace("OUTER", "outer='nesterov', compress={'push': 'int8'}"), 1),
    ],
)
def test_parameters_are_those_of_a_server_on_the_cpu(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, workers: int
) -> None:
    ends = []
    for device in ("cpu", "cuda"):
        job = start(processes, monkeypatch, tmp_path / device, method.replace("DEVICE", repr(device)), workers)
        output, _ = job.communicate(timeout=180)
        assert job.returncode == 0, output
        assert "out of reach" not in output, "the worker does not share the server's memory"
        ends.append(torch.load(tmp_path / device / "parameters.pt", weights_only=True))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)


def _pid_of(folder: Path, word: bytes) -> int:
    """Of the process in this folder whose script this is, or which has this option."""
    for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            is_it = word in words and (word.startswith(b"--") or words[1] == word)
            if is_it and Path(f"/proc/{pid}/cwd").readlink() == folder:
                return pid
        except OSError:
            continue
    raise AssertionError(f"no process with {word!r}")


@pytest.mark.parametrize("word", [b"--listener", b"train.py"], ids=["server", "worker"])
def test_a_process_that_is_killed_costs_no_more_than_on_the_cpu(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: bytes
) -> None:
    method = HYBRID.replace("barrier=True", "snapshot_seconds=0.5").replace("DEVICE", "'cuda'")
    free = torch.cuda.mem_get_info()[0]
    job = start(processes, monkeypatch, tmp_path / "run", method, pause=0.02)
    run_dir = tmp_path / "run" / "async_training"
    wait_until(lambda: run_dir.exists() and count(run_dir, 0) > 20 and snapshot_versions(run_dir), 120)
    os.kill(_pid_of(tmp_path / "run", word), signal.SIGKILL)
    output, _ = job.communicate(timeout=180)
    assert job.returncode == 0, output
    assert audit(run_dir).applied > 20
    wait_until(lambda: torch.cuda.mem_get_info()[0] > free - (64 << 20), 30)  # nothing is left there


@pytest.mark.parametrize(("look_ahead", "vectors"), [(0.0, 5), (None, 6)])
def test_the_server_takes_the_memory_that_the_documents_name(
    tmp_path: Path, look_ahead: float | None, vectors: int
) -> None:
    layout = Layout.of([("weight", torch.zeros(50_000_000))])  # torch rounds up to 2 MiB

    def build(spec: object, layout: Layout, parameters: Tensor) -> tuple[HybridAccumulation, EpochPlan]:
        optimizer = torch.optim.Adam([parameters], fused=True)
        return HybridAccumulation(optimizer, 1, clip_norm=1.0), EpochPlan(Constant(), 0)

    gc.collect()  # what the server before had
    before = torch.cuda.memory_allocated()
    server = ThreadServer(1, tmp_path, build=build)
    client = Client(LastingConnection(server.address, server.token, 0, patience=20.0))
    try:
        spec = sgd_spec(workers=1, server_device="cuda", look_ahead=look_ahead)
        client.join(layout, spec, JoinDetails(gpu=IPC.name(torch.device("cuda", 0))))
        client.slot.fill_(1.0)
        client.initialise(None)
        for sequence in range(3):
            client.push(lambda slot: slot.fill_(0.5), Push(sequence, sequence, 1.0, Report(local_steps=1)))
        taken = torch.cuda.memory_allocated() - before
    finally:
        client.connection.close()
        server.stop()
    assert taken == pytest.approx(4 * layout.size * (vectors + 1), rel=0.02)


def test_a_state_goes_on_in_a_server_on_the_other_device() -> None:
    """The one on the GPU steps whole vectors, the other one pieces."""
    generator = torch.Generator().manual_seed(1)
    size = 3 * PIECE + 5
    flats = [torch.zeros(size), torch.zeros(size, device="cuda")]
    rules = [HybridAccumulation(torch.optim.Adam(pieces(flat)), 1, elementwise=True) for flat in flats]
    assert [len(rule.optimizer.param_groups[0]["params"]) for rule in rules] == [4, 1]
    for number in range(4):
        if number == 2:
            for rule, state in zip(
                rules, [moved(rule.state_dict(), torch.device("cpu")) for rule in reversed(rules)], strict=True
            ):
                rule.load_state_dict(state)
        delta = torch.randn(size, generator=generator)
        for rule, flat in zip(rules, flats, strict=True):
            rule.apply(flat, Update(0, number, number, 1.0, delta.to(flat.device)))
    assert len(rules[1].optimizer.param_groups[0]["params"]) == 1
    torch.testing.assert_close(flats[1].cpu(), flats[0], rtol=1e-5, atol=1e-6)
