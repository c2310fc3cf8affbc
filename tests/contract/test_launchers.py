"""Launchers: what one starts joins, is started again when it is killed, ends with the others, and can be exported.

Where a launcher and a front end are not here, another test has them together: ``fairseq-async launch`` with fairseq
(``launch/test_launcher.py``) and DeepSpeed (``launch/test_scripts.py``), and gone on with
(``pytorch/test_processes.py``); ``accelerate launch`` with DeepSpeed (``deepspeed_plugin/test_hf_trainer.py``);
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
from fairseq_async.options.addresses import free_port
from tests.helpers.commands import DEEPSPEED, FRONT_ENDS, HELPERS, Processes, command
from tests.helpers.contract.net import CASES, HALF, Net, Run
from tests.helpers.run_files import events

LAUNCH = ["fairseq-async", "launch", "--workers", 2, "--", sys.executable]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1]  # which starts all workers again
# With "--cpu" it would start one process.
ACCELERATE = ["accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--max_restarts", 1]
# It starts nothing again.
BY_DEEPSPEED = ["deepspeed", "--num_accelerators", 2, "--no_local_rank", "--master_port", free_port]
AGAIN = "one that is started again"


@pytest.mark.parametrize(
    ("front_end", "launcher"),
    [
        ("torch_loop", LAUNCH),
        ("hf_trainer", LAUNCH),
        ("deepspeed_engine", TORCHRUN),
        ("fairseq_train", TORCHRUN),
        ("accelerate_loop", ACCELERATE),
    ],
    ids=["PyTorch", "Trainer", "DeepSpeed under torchrun", "fairseq under torchrun", "accelerate"],
)
def test_what_is_launched_joins_is_started_again_and_ends_with_the_same_model(
    processes: Processes, tmp_path: Path, front_end: str, launcher: list[object]
) -> None:
    run = Run(CASES[AGAIN], "local_sgd", tmp_path / "run")
    check_launched(processes, run, front_end, launcher, AGAIN)
    assert run.mark(f"died-{run.case.workers - 1}").exists()


@pytest.mark.parametrize(
    ("front_end", "launcher"),
    [
        ("torch_loop", TORCHRUN),
        ("torch_loop", ACCELERATE),
        ("deepspeed_engine", BY_DEEPSPEED),
    ],
    ids=["torchrun", "accelerate", "deepspeed"],
)
def test_a_checkpoint_of_one_process_is_gone_on_with_by_two(
    processes: Processes, tmp_path: Path, front_end: str, launcher: list[object]
) -> None:
    one = Run(CASES["saved"], "local_sgd", tmp_path / "saved.local_sgd")
    two = Run(CASES["gone on with by two"], "local_sgd", tmp_path / "run")
    whole = check_launched(processes, one, front_end, ["python"], "saved")
    rest = check_launched(processes, two, front_end, launcher, "gone on with by two")
    assert torch.equal(rest[0], whole[HALF])


def check_launched(processes: Processes, run: Run, front_end: str, launcher: list[object], case: str) -> Tensor:
    """Launches the workers, and checks that all end with the model that is exported; returns what worker 0's batches
    found."""
    name, *flags = (each() if callable(each) else each for each in launcher)
    job = [HELPERS / "contract" / "launched.py", front_end, case, run.method, run.path]
    code, output = processes.run([command(str(name)), *flags, *job], 300, **FRONT_ENDS.get(front_end, DEEPSPEED))
    logs = [path.read_text() for path in run.path.parent.glob("*.log")]
    assert code == 0, output + "".join(logs)
    assert {event["worker"] for event in events(run.path)} == set(range(run.case.workers))
    saved = [torch.load(f"{run.path}-{worker}.pt", weights_only=True) for worker in range(run.case.workers)]
    exported_to = run.path.with_suffix(".safetensors")
    export(run.path, exported_to)
    exported, start = plain(load_file(exported_to)), plain(Net(run).state_dict())
    ended = [plain(each["model"]) for each in saved]
    for parameters in ended:
        assert all(torch.equal(exported[key], parameters[key]) for key in start)
    assert not all(torch.equal(ended[0][key], start[key]) for key in start)
    found: Tensor = saved[0]["trace"]
    return found


def plain(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the name that the model of fairseq has for the net."""
    return {key.removeprefix("net."): value for key, value in parameters.items()}
