"""A simulation that is stopped, wherever that is, goes on as if it had not been."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_async.method import methods
from fairseq_async.method.spec import hybrid_spec, local_sgd_spec
from fairseq_async.options.config import HybridOptions, LocalSGDOptions
from fairseq_async.simulation.records import Records
from fairseq_async.simulation.trial import Trial
from scripts.faults.digest import digest
from tests.helpers.covering import covering
from tests.helpers.simulations import Log, tiny_experiment, trial_of

pytestmark = pytest.mark.usefixtures("recipe_rules")

LOCAL_SGD: dict[str, dict[str, Any]] = {
    "sparse updates": {"compress": "topk:chunk=3,keep=1"},
    "rounded starts": {"compress": "pull=int8:block=8"},
    "by speed": {"dynamic_local_steps": True},
    "weights": {"staleness_power": -0.5},
    "limit": {"staleness_limit": 1},
    "compensation": {"delay_compensation": 0.5},
    "fragments": {"local_steps": 4, "fragments": 2, "fragment_delay": 1},
    "ahead": {"start_ahead": True},
}
HYBRID: dict[str, dict[str, Any]] = {
    "rounded updates": {"compress": "dqsgd"},
    "rounded starts": {"compress": "pull=int8:block=8"},
    "shares": {"shares": "auto", "micro_batches": 2},
    "two in a step": {"updates_per_step": 2},
    "ahead": {"look_ahead": 1.5},
}
CHANGES = {"changes": {"compress": "pull=e3m0:block=8"}}
ROUNDS, BARRIER = {"grace": {"grace_period": 1.5}}, {"barrier": {"barrier": True}}


def local_sgd(given: dict[str, Any]) -> dict[str, Any]:
    method = {"method": "local_sgd", "outer": "delayed_nesterov", "local_steps": 2} | given
    local_sgd_spec(methods.parse(LocalSGDOptions, method, "test"), 3, [], None, {})
    return method


def hybrid(given: dict[str, Any]) -> dict[str, Any]:
    hybrid_spec(methods.parse(HybridOptions, given, "test"), 3, None, {}, 0)
    return {"method": "hybrid_async"} | given


DN = {"method": "local_sgd", "outer": "delayed_nesterov", "local_steps": 2}
METHODS: dict[str, dict[str, Any]] = {
    "hybrid": {"method": "hybrid_async"},
    "synchronous": {"method": "hybrid_async", "barrier": True},
    "DiLoCo": {"method": "local_sgd", "outer": "diloco", "local_steps": 2},
    "IsoLoCo": {"method": "local_sgd", "outer": "isoloco", "local_steps": 2},
    "per rate": {"method": "local_sgd", "outer": "per_step", "divide_by": "rate", "minimum": 0.1, "local_steps": 2},
    "grace": DN | {"grace_period": 1.5, "dynamic_local_steps": True, "staleness_power": -0.5},
    "HeLoCo": {"method": "local_sgd", "outer": "heloco", "local_steps": 2, "delay_compensation": 0.5},
    "quorum": {
        "method": "local_sgd",
        "outer": "direction_averaging",
        "local_steps": 2,
        "quorum": 2,
        "grace_period": 0.7,
    },
    "compensated": DN | {"delay_compensation": 0.5, "staleness_limit": 1},
    "fragments": DN | {"local_steps": 4, "fragments": 2, "fragment_delay": 1, "dynamic_local_steps": True},
    "compressed": DN | {"compress": "topk:chunk=3,keep=1", "staleness_limit": 1},
    "rounded": {"method": "hybrid_async", "compress": "dqsgd,pull=int8:block=8"},
    "rounded starts": DN | {"compress": "pull=int8", "delay_compensation": 0.5},
    "changes": DN | {"compress": "e3m0:block=8,pull=e3m0:block=8"},
    "adasum": {"method": "adasum", "local_steps": 2},
    "gs-SGD": {"method": "gs_sgd", "columns": 8, "keep": 3},
    "adascale": {"method": "adascale", "optimizer": {"type": "sgd", "lr": 0.1}},
}
METHODS |= {", ".join(names): method for names, method in covering(local_sgd, LOCAL_SGD, CHANGES | ROUNDS)}
METHODS |= {", ".join(names): method for names, method in covering(hybrid, HYBRID, CHANGES | BARRIER)}
EXCHANGE = {"seconds": 0.25, "server_seconds": 0.8}
CLUSTERS: dict[str, dict[str, Any]] = {
    # worker 1 comes, and comes back, while the server is busy; worker 2 stands still
    "busy": {
        "workers": 3,
        "seconds_per_step": [1.0, 1.3, {"distribution": "lognormal", "mean": 2.0}],
        "exchange": EXCHANGE,
        "absences": [
            {"worker": 1, "from": 0, "to": 1.6},
            {"worker": 1, "from": 3.1, "to": 4.2},
            {"worker": 2, "from": 1.0, "to": 2.5, "pause": True},
        ],
    },
    "dead behind the barrier": {
        "workers": 3,
        "seconds_per_step": [1.0, 1.0, 4.0],
        "absences": [{"worker": 1, "from": 3.5, "to": 20.0}],
    },
    "left": {
        "workers": 3,
        "seconds_per_step": [1.0, 1.0, 3.0],
        "exchange": EXCHANGE,
        "absences": [{"worker": 2, "from": 14.0}],
    },
}


def saved_and_loaded(trial: Trial, new: Callable[[], Trial]) -> Trial:
    """Another trial, in the state of this one as a file has it."""
    file = io.BytesIO()
    torch.save(trial.state_dict(), file)
    file.seek(0)
    other = new()
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS.keys())
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("every", [1, 5])
def test_a_run_that_is_stopped_again_and_again_writes_what_the_undisturbed_one_writes(
    tmp_path: Path, method: dict[str, Any], cluster: dict[str, Any], every: int
) -> None:
    """Receipts and reports whole, with the seconds that workers waited for a busy server; then all of the state."""
    logs, given = (Log(), Log()), tiny_experiment(tmp_path, method, cluster=cluster)
    straight, stopped = (trial_of(copy.deepcopy(given), log) for log in logs)
    happened = 0
    while straight.advance():
        assert stopped.advance()
        happened += 1
        if happened % every == 0:
            stopped = saved_and_loaded(stopped, lambda: trial_of(copy.deepcopy(given), logs[1]))
        assert logs[1].lines() == logs[0].lines(), f"after {happened} happenings"
    assert not stopped.advance() and len(logs[0].events) > 3
    assert digest(stopped.state_dict()) == digest(straight.state_dict())
    assert (stopped.steps, stopped.tokens, stopped.clock.now) == (straight.steps, straight.tokens, straight.clock.now)


def test_evaluations_after_the_state_on_disk_are_made_again(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "state.pt")
    (tmp_path / "curve.jsonl").write_text("".join(f'{{"steps": {steps}}}\n' for steps in (1, 2, 3)))
    records, layout = Records(tmp_path), SimpleNamespace(to_json=list)
    trial = SimpleNamespace(parameters=torch.zeros(1), load_state_dict=len, steps=2, sequences={}, now=0.0)
    trial.spec, trial.model = SimpleNamespace(workers=1, to_json=dict), SimpleNamespace(layout=layout)
    records.open(trial)  # type: ignore[arg-type]
    assert [row["steps"] for row in records.curve] == [1, 2]
