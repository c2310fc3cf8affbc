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


def run(processes: Processes, folder: Path, script: str, *launcher: object) -> tuple[int, str]:
    (folder / "train.py").write_text(script)
    here = Path.cwd()
    os.chdir(folder)
    try:
        return processes.run([*launcher, "train.py"], **QUIET)
    finally:
        os.chdir(here)


def test_the_readmes_example_trains_under_torchrun(processes: Processes, tmp_path: Path) -> None:
    """Its result is what it was made to learn; nothing of the run is left but its logs."""
    torchrun = [command("torchrun"), "--standalone", "--nproc-per-node", 2]
    code, output = run(processes, tmp_path, script_of_the_readme(), *torchrun)
    assert code == 0, output
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.testing.assert_close(model["weight"], torch.ones(1, 8), atol=0.1, rtol=0)
    events = [json.loads(line) for line in (tmp_path / "async_training" / "events.jsonl").open()]
    assert {event["worker"] for event in events} == {0, 1}
    assert sum(event["local_steps"] for event in events if event["status"] == "applied") == 400
    left = {path.name for path in (tmp_path / "async_training").rglob("*") if path.is_file()}
    assert left == {"events.jsonl", "run.json", "server.log"}


def test_a_mistake_is_one_line_and_leaves_nothing(processes: Processes, tmp_path: Path) -> None:
    wrong = script_of_the_readme().replace('"diloco"', '"diloko"')
    code, output = run(processes, tmp_path, wrong, command("python"))
    assert code == 2 and len(output.splitlines()) == 1
    assert output.startswith("fairseq-async: error: AsyncLocalSGD: outer: Input should be 'diloco', 'nesterov'")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_crash_ends_the_run_with_its_own_traceback(processes: Processes, tmp_path: Path) -> None:
    """Its server ends with it; alone, as a script without a launcher."""
    crash = script_of_the_readme().replace("inputs = torch.randn(16, 8)", "inputs = torch.randn(16, 9)")
    code, output = run(processes, tmp_path, crash, command("python"))
    assert code == 1 and output.splitlines()[-1].startswith("RuntimeError: mat1 and mat2 shapes")
    assert not (tmp_path / "async_training" / ".token").exists()
