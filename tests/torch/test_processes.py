"""A user's script as real processes under torchrun: the README's."""

import json
import os
import re
from pathlib import Path

import torch

from tests.helpers.commands import HELPERS, ROOT, Processes, command

QUIET = {"PYTHONPATH": f"{HELPERS / 'without_fairseq'}:{ROOT}"}


def script_of_the_readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- pytorch example -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found
    return found[1]


def torchrun(processes: Processes, folder: Path, script: str) -> tuple[int, str]:
    (folder / "train.py").write_text(script)
    here = Path.cwd()
    os.chdir(folder)
    try:
        return processes.run([command("torchrun"), "--standalone", "--nproc-per-node", 2, "train.py"], **QUIET)
    finally:
        os.chdir(here)


def test_the_readmes_example_trains_under_torchrun(processes: Processes, tmp_path: Path) -> None:
    """Its result is what it was made to learn; nothing of the run is left but its logs."""
    code, output = torchrun(processes, tmp_path, script_of_the_readme())
    assert code == 0, output
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.testing.assert_close(model["weight"], torch.ones(1, 8), atol=0.3, rtol=0)
    events = [json.loads(line) for line in (tmp_path / "async_training" / "events.jsonl").open()]
    assert {event["worker"] for event in events} == {0, 1}
    assert sum(event["local_steps"] for event in events if event["status"] == "applied") == 400
    left = {path.name for path in (tmp_path / "async_training").rglob("*") if path.is_file()}
    assert left == {"events.jsonl", "run.json", "server.log"}


def test_a_mistake_or_a_crash_under_torchrun_ends_quickly_and_leaves_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    """The second run begins while the first one's directory is still there."""
    code, output = torchrun(processes, tmp_path, script_of_the_readme().replace('"diloco"', '"diloko"'))
    assert code != 0 and output.count("fairseq-async: error: AsyncLocalSGD: outer: Input should be") == 2
    assert "fairseq_async/torch" not in output and not (tmp_path / "async_training").exists()
    crash = script_of_the_readme().replace("inputs = torch.randn(16, 8)", "inputs = torch.randn(16, 9)")
    code, output = torchrun(processes, tmp_path, crash)
    assert code != 0 and "shapes cannot be multiplied" in output
    assert not (tmp_path / "async_training" / ".token").exists()
