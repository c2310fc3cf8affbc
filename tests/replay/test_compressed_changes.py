"""Replays of runs whose workers take compressed changes of the parameters: one that is missed spoils all after it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.protocol import Layout
from fairseq_async.replay.replay import Recording, Replay
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.hybrid import HybridWorker
from scripts.faults.sgd_server import build, sgd_spec
from scripts.faults.thread_server import ThreadServer
from tests.helpers.replayed import HalvingRun, HalvingWorker
from tests.helpers.run_files import events

LAYOUT = Layout.of([("w", torch.zeros(6))])


def record(run_dir: Path, host: str, updates_per_step: int, again: int) -> Tensor:
    """Workers push in an order of their own; after every ``again``-th update, its sender takes the parameters once
    more, as after a validation. Returns the last parameters."""
    spec = sgd_spec(updates_per_step, compress={"pull": {"codec": "e3m0", "block": 4}}, record=True)
    with ThreadServer(2, run_dir, host) as server:
        workers = []
        for number in (0, 1):
            client, weight = (
                Client(LastingConnection(server.address, server.token, number)),
                Parameter(torch.linspace(-3, 4, 6)),
            )
            workers.append((HybridWorker(client, [("w", weight)]), weight))
            welcome = workers[-1][0].join(spec)
            workers[-1][0].begin(welcome if welcome.initialised else workers[-1][0].bring_parameters(None))
        for step, number in enumerate([0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 1, 0, 1, 0]):
            worker, weight = workers[number]
            weight.grad = weight.detach() / 2
            worker.step(1.0, None)
            if step % again == again - 1:
                worker.start()
        return server.service.described.coordinator.server.parameters.clone()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
@pytest.mark.parametrize(("updates_per_step", "again"), [(1, 99), (2, 99), (3, 99), (1, 3), (3, 2)])
def test_each_worker_starts_from_what_it_had_taken(
    tmp_path: Path, host: str, updates_per_step: int, again: int
) -> None:
    """Several gradients from one start, and parameters that were taken twice before an update."""
    last = record(tmp_path, host, updates_per_step, again)
    replay = Replay(
        Recording.read(tmp_path),
        HalvingRun({worker: HalvingWorker(LAYOUT, has_position=False) for worker in (0, 1)}, build),
    )
    assert len(list(replay.steps())) == 18 // updates_per_step and torch.equal(replay.parameters, last)
    assert len({event["start_payload"] for event in events(tmp_path)} - {None}) >= 6
