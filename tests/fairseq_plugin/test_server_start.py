"""The server's process imports of fairseq what it needs, and no more."""

import json
import subprocess
import sys

_PROGRAM = """
import json, sys
from fairseq_async.launch.fairseq_server import leave_out_inits
leave_out_inits("fairseq", "fairseq_async.fairseq_plugin")
from fairseq_async.fairseq_plugin.server import OPTIMIZER_REGISTRY, build
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY
left = [name for name in ("fairseq.tasks", "fairseq.models", "fairseq.criterions", "sklearn") if name in sys.modules]
from fairseq import search
print(json.dumps([left, sorted(OPTIMIZER_REGISTRY), sorted(LR_SCHEDULER_REGISTRY), search.BeamSearch.__name__]))
"""
_WHOLE = """
import json
import fairseq
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY
print(json.dumps([sorted(OPTIMIZER_REGISTRY), sorted(LR_SCHEDULER_REGISTRY)]))
"""


def said(program: str) -> list[list[str]]:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    found: list[list[str]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_the_server_imports_no_tasks_or_models_and_has_all_optimizers_and_schedules() -> None:
    left, *registered, another = said(_PROGRAM)
    assert left == [] and another == "BeamSearch", "another module of fairseq can still be imported"
    optimizers, schedules = said(_WHOLE)
    assert registered == [sorted([*optimizers, "muon"]), schedules], "muon is the package's"
