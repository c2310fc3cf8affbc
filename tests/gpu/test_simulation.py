"""A simulation on a GPU: the same events as on the CPU, also where codecs are used and after a resumption."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.simulations import Log, tiny_trial

LOCAL = {"method": "local_sgd", "outer": "nesterov", "local_steps": 2}
METHODS: list[dict[str, Any]] = [
    {"method": "hybrid_async"},
    {"method": "hybrid_async", "compress": "dqsgd:block=4,pull=int8"},
    LOCAL | {"outer": "heloco", "delay_compensation": 0.1},
    LOCAL | {"compress": "topk:chunk=8,keep=4,pull=e3m0"},
    LOCAL | {"compress": "e3m0:block=4,pull=int8", "fragments": 2},
    {"method": "gs_sgd", "columns": 64, "keep": 3},
    {"method": "adascale"},
    {"method": "adasum"},
]


@pytest.mark.usefixtures("recipe_rules")
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_simulation_on_a_gpu_is_that_on_the_cpu(tmp_path: Path, method: dict[str, Any]) -> None:
    cluster, logs, ends = {"workers": 2, "seconds_per_step": [1.0, 1.5]}, [], []
    for device in ("cpu", "cuda"):
        log, other = Log(), Log()
        first = tiny_trial(tmp_path, method, log, cluster=cluster, device=device)
        for _ in range(5):
            first.advance()
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = tiny_trial(tmp_path, method, other, cluster=cluster, device=device)
        second.load_state_dict(torch.load(tmp_path / "state.pt", map_location=device, weights_only=True))
        while second.advance():
            pass
        logs.append([(time, receipt.worker, receipt.staleness) for time, receipt, _ in log.events + other.events])
        ends.append(second.parameters.cpu())
    assert logs[0] == logs[1]
    torch.testing.assert_close(ends[1], ends[0], rtol=0.05, atol=0.01)
