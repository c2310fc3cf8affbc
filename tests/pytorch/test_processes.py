"""A user's script as real processes under torchrun: the README's."""

import os
from pathlib import Path

import pytest
import torch

from fairseq_async.errors import ConfigurationError
from fairseq_async.options.config import ServerOptions
from fairseq_async.worker.start import context
from tests.helpers.commands import HELPERS, ROOT, Processes, command
from tests.helpers.documents import script_of_the_readme
from tests.helpers.run_files import events, snapshot_versions

ON_THE_CPU_IN_FP32 = """
import torch
from fairseq_async.torch import AsyncLocalSGD

where = {"dtype": torch.float32, "device": "cpu"}
model = torch.nn.Linear(8, 1, **where)
torch.nn.init.constant_(model.weight, 0.5)
torch.nn.init.zeros_(model.bias)
inputs = torch.linspace(-1, 1, 8, **where)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
CHANGE
with AsyncLocalSGD(model, optimizer, local_steps=2, total_steps=8, OPTIONS) as worker:
    while not worker.finished:
        optimizer.zero_grad()
        (model(inputs) - 1).square().sum().backward()
        optimizer.step()
    with worker.server_parameters():
        torch.save(model.weight.detach().clone(), "NAME.pt")
"""
QUIET = {"PYTHONPATH": f"{HELPERS / 'without_fairseq'}:{ROOT}"}


def run(processes: Processes, folder: Path, script: str, *launcher: object) -> tuple[int, str]:
    (folder / "train.py").write_text(script)
    here = Path.cwd()
    os.chdir(folder)
    try:
        return processes.run([*launcher, "train.py"], **QUIET)
    finally:
        os.chdir(here)


@pytest.mark.usefixtures("executed")
def test_the_readmes_example_trains_under_torchrun(processes: Processes, tmp_path: Path) -> None:
    """Its result is what it was made to learn; nothing of the run is left but its logs."""
    torchrun = [command("torchrun"), "--standalone", "--nproc-per-node", 2]
    code, output = run(processes, tmp_path, script_of_the_readme(), *torchrun)
    assert code == 0, output
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.testing.assert_close(model["weight"], torch.ones(1, 8), atol=0.1, rtol=0)
    updates = events(tmp_path / "async_training")
    assert {event["worker"] for event in updates} == {0, 1}
    assert sum(event["local_steps"] for event in updates if event["status"] == "applied") == 400
    left = {path.name for path in (tmp_path / "async_training").rglob("*") if path.is_file()}
    assert left == {"events.jsonl", "run.json", "server.log", "final.safetensors"}


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


LEFT = """
with make() as worker:
    loop(worker)
"""
BLOCKS = {  # how the script ends, its steps, and whether that is one line
    "by hand": ("worker = make().__enter__()\nloop(worker)", 5, True),
    "by hand to the end of the run": ("worker = make().__enter__()\nloop(worker)", 8, False),
    "by hand, and left": ("worker = make().__enter__()\nloop(worker)\nworker.leave()", 5, False),
    "by sys.exit": (LEFT + "    sys.exit()", 5, True),
    "by sys.exit at the end of the run": (LEFT + "    sys.exit(0)", 8, False),
    "in a generator that is closed": ("def run():" + LEFT.replace("\n", "\n    ") + "    yield\nnext(run())", 5, False),
}


@pytest.mark.parametrize(
    ("method", "case"), [("HybridAsync", "by hand"), *(("AsyncLocalSGD", case) for case in BLOCKS)]
)
def test_a_script_that_ends_well_within_the_block_is_one_line(
    processes: Processes, tmp_path: Path, method: str, case: str
) -> None:
    """Unless nothing is lost by it."""
    end, steps, is_said = BLOCKS[case]
    given = "local_steps=2, " if method == "AsyncLocalSGD" else "updates_per_step=1, "
    start, _, loop = ON_THE_CPU_IN_FP32.partition("CHANGE")
    loop = loop.partition("worker:\n    while not worker.finished:")[2].partition("    with ")[0]
    script = (
        "import sys"
        + start.replace("AsyncLocalSGD", method)
        + f"def make(): return {method}(model, optimizer, {given}total_steps=8)\n"
        + f"def loop(worker):\n    for _ in range({steps}):{loop}\n{end}\n"
    )
    code, output = run(processes, tmp_path, script, command("python"))
    errors = [line for line in output.splitlines() if "error: " in line]
    assert code == (2 if is_said else 0) and "Traceback" not in output and len(errors) == is_said, output
    assert all(f"within the block of {method}, whose end it has not reached" in line for line in errors)


def test_a_script_that_is_interrupted_is_gone_on_with_by_the_launcher(processes: Processes, tmp_path: Path) -> None:
    """Ctrl-C after 60 of 200 local steps; the server, a child of the script's, keeps them."""
    stop = "if worker.progress >= 60 and 'FAIRSEQ_ASYNC_WORKER' not in os.environ: raise KeyboardInterrupt"
    step = "        optimizer.step()\n"
    script = "import os\n" + script_of_the_readme().replace(step, f"{step}        {stop}\n")
    code, output = run(processes, tmp_path, script, command("python"))
    assert code != 0 and output.splitlines()[-1].startswith("KeyboardInterrupt"), output
    kept = snapshot_versions(tmp_path / "async_training")[-1]
    launcher = [command("fairseq-async"), "launch", "--workers", 1, "--resume", "--", "python"]
    code, output = run(processes, tmp_path, script, *launcher)
    assert code == 0 and f"the run goes on from version-{kept:012d}.pt, at version {kept}" in output, output
    applied = [event for event in events(tmp_path / "async_training") if event["status"] == "applied"]
    assert sum(event["local_steps"] for event in applied) == 200
    assert [event["version_after"] for event in applied] == list(range(1, len(applied) + 1))
    assert not list(tmp_path.glob(".fairseq-async-*"))


def test_a_server_that_torchrun_starts_again_goes_on_from_a_snapshot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its worker 0 is started again with all others, by the same command; a first start begins anew."""
    started = []

    def start(*_: object, resumes: bool, **__: object) -> None:
        started.append(resumes)
        raise ConfigurationError("that is all")

    monkeypatch.setattr(context, "ServerProcess", start)
    for restarts in ("0", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        found = context.WorkerContext(worker=0, workers=1, local_rank=0)
        with pytest.raises(ConfigurationError, match="that is all"):
            found.connect("a.module", ServerOptions(), tmp_path, print)
    assert started == [False, True]


@pytest.mark.parametrize("options", ["overlap=True", "compress='e3m0,pull=e3m0'"])
def test_a_scripts_default_type_and_device_change_nothing(processes: Processes, tmp_path: Path, options: str) -> None:
    """A default device without memory stands for a GPU. The server is forked from the script, and has its defaults."""
    found = []
    for name, change in {
        "none": "",
        "type": "torch.set_default_dtype(torch.float64)",
        "device": "torch.set_default_device('meta')",
    }.items():
        script = ON_THE_CPU_IN_FP32.replace("CHANGE", change).replace("OPTIONS", options).replace("NAME", name)
        code, output = run(processes, tmp_path, script, command("python"))
        assert code == 0, output
        found.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    for parameters in found:
        assert parameters.dtype == torch.float32 and not torch.equal(parameters, torch.full((1, 8), 0.5))
        # time decides how many steps a worker takes until it is answered
        assert torch.equal(parameters, found[0]) or options == "overlap=True"
