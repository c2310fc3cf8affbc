"""The package without fairseq, which is an extra: ``pip install .[deepspeed]``."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.commands import DEEPSPEED, ONE_THREAD, PACKAGE, ROOT

# what is of fairseq alone, and what is of Ray, which is another extra
OF_FAIRSEQ = (
    "fairseq_async.fairseq_plugin",
    "fairseq_async.launch.fairseq_server",
    "fairseq_async.simulation.problems.translation",
)
OF_RAY = ("fairseq_async.launch.ray",)
IMPORT_ALL = """
import importlib, json, sys
import fairseq_async.deepspeed_plugin
fairseq_async.deepspeed_plugin.attach()  # hides a torchaudio that transformers could not load
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
assert "fairseq" not in sys.modules
"""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_module_but_fairseqs_own_is_imported_where_there_is_no_fairseq() -> None:
    names = [module_of(path) for path in sorted(PACKAGE.rglob("*.py"))]
    kept = [name for name in names if not name.startswith(OF_FAIRSEQ + OF_RAY)]
    line = [sys.executable, "-c", IMPORT_ALL, json.dumps(kept)]
    environment = os.environ | ONE_THREAD | DEEPSPEED
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert "fairseq_async.deepspeed_plugin.server" in kept and len(kept) > 80
