"""Scripts of users as real processes: the README's under torchrun, and the Trainer of transformers."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.environment import SERVER, TOKEN, WORKER, WORKERS
from fairseq_async.server.process import ServerProcess
from tests.helpers.commands import HELPERS, ROOT, Processes, command

QUIET = {"PYTHONPATH": f"{HELPERS / 'without_fairseq'}:{ROOT}", "TRANSFORMERS_VERBOSITY": "error"}


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


class Team:
    """Workers that a launcher of ours would start, with the server beside them."""

    def __init__(self, processes: Processes, folder: Path, options: dict[str, Any], *flags: str) -> None:
        module = "local_sgd_main" if options["method"] == "local_sgd" else "gradient_main"
        server = ServerProcess(f"fairseq_async.server.{module}", 2, folder / "run", folder / "server.log")
        self.outputs: list[str] = []
        try:
            own = json.dumps(options | {"run_dir": str(folder / "run")})
            line = [command("python"), HELPERS / "torch_job.py", "--out", folder / "out", "--options", own, *flags]
            known = QUIET | {SERVER: server.address, TOKEN: server.token, WORKERS: "2"}
            started = [processes.start(line, **known, **{WORKER: str(worker)}) for worker in range(2)]
            for process in started:
                self.outputs.append(process.communicate(timeout=120)[0])
            self.codes = [process.returncode for process in started]
            server.join(20)
            self.server = server.poll()
        finally:
            server.stop()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_trainer_of_transformers_is_a_worker_and_goes_on_from_its_checkpoint(
    processes: Processes, tmp_path: Path
) -> None:
    """Two workers of DiLoCo. What worker 0 has evaluated and saved are the server's parameters at that time; in the
    end it has the best of these."""
    from safetensors.torch import load_file

    options: dict[str, Any] = {"method": "local_sgd", "outer": "diloco", "local_steps": 3}
    team = Team(processes, tmp_path, options)
    assert team.codes == [0, 0] and team.server == 0, team.outputs
    out = tmp_path / "out"
    evaluations = json.loads((out / "worker-0.json").read_text())["evaluations"]
    assert [line["step"] for line in evaluations] == [6, 12]
    assert json.loads((out / "worker-1.json").read_text())["evaluations"] == []
    ended = [torch.load(out / f"worker-{worker}.pt", weights_only=True) for worker in range(2)]
    for step in (6, 12):
        saved = load_file(out / f"checkpoint-{step}" / "model.safetensors")
        state = torch.load(out / f"checkpoint-{step}" / "async_server.pt", weights_only=True)
        names = [row[0] for row in state["layout"]]
        flat = torch.cat([saved[name].flatten() for name in names])
        assert torch.equal(flat, state["server"]["parameters"])
    best = min(evaluations, key=lambda line: line["eval_loss"])["step"]
    assert same(load_file(out / f"checkpoint-{best}" / "model.safetensors"), ended[0])
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert [event["local_steps"] for event in events] == [3] * 8  # twelve steps of each

    again = Team(processes, tmp_path, options, "--resume")
    assert again.codes == [0, 0], again.outputs
    resumed = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()][8:]
    assert [event["base_version"] for event in resumed[:2]] == [2, 2] and len(resumed) == 4


def test_the_trainers_schedule_is_the_servers_in_hybrid(processes: Processes, tmp_path: Path) -> None:
    team = Team(processes, tmp_path, {"method": "hybrid_async", "updates_per_step": 2})
    assert team.codes == [0, 0] and team.server == 0, team.outputs
    described = json.loads((tmp_path / "run" / "run.json").read_text())["method"]["framework"]
    assert described["optimizer"] == "AdamW"
    rates = [row[0] for row in described["learning_rates"]]
    assert rates == pytest.approx([5e-3 * (1 - step / 12) for step in range(13)])
    decay = [group["options"]["weight_decay"] for group in described["parameter_groups"]]
    assert len(decay) == 2 and len(described["parameter_groups"][1]["tensors"]) > 2  # biases and norms apart
