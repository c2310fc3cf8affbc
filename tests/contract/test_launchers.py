"""Launchers: what one starts joins, is started again when it is killed, ends with the others, and can be exported.

Where a launcher and a front end are not here, another test has them together: ``fairseq-async launch`` with fairseq
(``launch/test_launcher.py``) and DeepSpeed (``launch/test_scripts.py``),
``deepspeed`` (``deepspeed_plugin/test_ends.py``), ``accelerate launch`` (``deepspeed_plugin/test_hf_trainer.py``),
several ranks in a worker (``pytorch/test_islands.py``, ``fairseq_plugin/test_islands.py``,
``deepspeed_plugin/test_asynchronous.py``).
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fairseq_async.export import export
from tests.helpers.commands import DEEPSPEED, FRONT_ENDS, HELPERS, Processes, command
from tests.helpers.contract.net import CASES, Net, Run
from tests.helpers.run_files import events

LAUNCH = ["fairseq-async", "launch", "--workers", 2, "--", sys.executable]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1]  # which starts all workers again
AGAIN = "one that is started again"


@pytest.mark.parametrize(
    ("front_end", "launcher", "case"),
    [
        ("torch_loop", LAUNCH, AGAIN),
        ("hf_trainer", LAUNCH, AGAIN),
        ("deepspeed_engine", TORCHRUN, AGAIN),
        ("fairseq_train", TORCHRUN, AGAIN),
        ("torch_loop", ["python"], "saved"),
    ],
    ids=["PyTorch", "Trainer", "DeepSpeed under torchrun", "fairseq under torchrun", "PyTorch, one process"],
)
def test_what_is_launched_joins_is_started_again_and_ends_with_the_same_model(
    processes: Processes, tmp_path: Path, front_end: str, launcher: list[object], case: str
) -> None:
    run = Run(CASES[case], "local_sgd", tmp_path / "run")
    name, *flags = launcher
    job = [HELPERS / "contract" / "launched.py", front_end, case, run.method, run.path]
    code, output = processes.run([command(str(name)), *flags, *job], 300, **FRONT_ENDS.get(front_end, DEEPSPEED))
    logs = [Path(f"{run.path}-{worker}.log").read_text() for worker in range(run.case.workers)]
    assert code == 0, output + "".join(logs)
    assert run.mark(f"died-{run.case.workers - 1}").exists() == (case == AGAIN)
    assert {event["worker"] for event in events(run.path)} == set(range(run.case.workers))
    ended = [plain(torch.load(f"{run.path}-{worker}.pt", weights_only=True)["model"]) for worker in range(len(logs))]
    export(run.path, tmp_path / "exported.safetensors")
    exported, start = plain(load_file(tmp_path / "exported.safetensors")), plain(Net(run).state_dict())
    for parameters in ended:
        assert all(torch.equal(exported[key], parameters[key]) for key in start)
    assert not all(torch.equal(ended[0][key], start[key]) for key in start)


def plain(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the name that the model of fairseq has for the net."""
    return {key.removeprefix("net."): value for key, value in parameters.items()}
