"""A finished model is not lost with a worker 0 that dies before it has saved: all front ends."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fairseq_async.export import export
from tests.helpers.commands import DEEPSPEED, HELPERS, HYBRID, MODEL, Processes, command
from tests.helpers.run_files import snapshot_versions

LAUNCH = ["fairseq-async", "launch", "--workers", 2]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", 2]
SECONDS = 240
JOB = HELPERS / "saving_job.py"
STATISTICS, COUNT = {"norm.running_mean", "norm.running_var"}, {"norm.num_batches_tracked"}


def run(processes: Processes, launcher: Sequence[object], *job: object) -> tuple[int, str]:
    name, *flags = launcher
    script = ["--", "python"] if name == "fairseq-async" else []
    return processes.run([command(str(name)), *flags, *script, JOB, *job], SECONDS, **DEEPSPEED)


def is_saved(run_dir: Path) -> bool:
    """Whether worker 0, started again, took no step, and has saved the run's last parameters."""
    saved, final = torch.load(f"{run_dir}.pt", weights_only=True), load_file(run_dir / "final.safetensors")
    same = all(torch.equal(saved[name], final[name]) for name in final)
    own = saved.keys() - final.keys()  # buffers that are not exchanged
    return same and own in (COUNT, STATISTICS | COUNT) and Path(f"{run_dir}.steps").read_text() == "0"


@pytest.mark.parametrize(
    ("front_end", "launcher"),
    [
        ("plain", LAUNCH),
        ("plain", [*TORCHRUN, "--max-restarts", 1]),
        ("hf_trainer", LAUNCH),
        ("deepspeed", LAUNCH),
    ],
    ids=["PyTorch", "PyTorch under torchrun", "Trainer", "DeepSpeed"],
)
def test_a_worker_0_that_dies_after_the_end_is_started_again_and_saves_the_finished_model(
    processes: Processes, tmp_path: Path, front_end: str, launcher: Sequence[object]
) -> None:
    code, output = run(processes, launcher, front_end, tmp_path / "run")
    assert code == 0, output
    assert (tmp_path / "run.once").exists() and is_saved(tmp_path / "run")
    assert not snapshot_versions(tmp_path / "run"), "they are there until worker 0 has ended in order"
    state = tmp_path / "run" / "checkpoint" / "last" / "async_server.pt"
    if front_end == "deepspeed":
        parameters = torch.load(state, weights_only=True)["server"]["parameters"]
        assert torch.equal(
            torch.cat([v.flatten() for v in load_file(tmp_path / "run" / "final.safetensors").values()]), parameters
        )


def test_a_fairseq_worker_0_that_dies_after_the_end_writes_the_checkpoint_when_it_is_started_again(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    flags = ["--save-dir", tmp_path / "run", "--user-dir", HELPERS / "dies_at_the_end", "--max-epoch", 1]
    line = [command("fairseq-async"), *LAUNCH[1:], "--", "fairseq-train", data, *MODEL, *HYBRID, *flags]
    code, output = processes.run(line, SECONDS, ONCE=str(tmp_path / "once"))
    assert code == 0 and "worker 0 was killed by SIGKILL; start 1 of 3 again" in output, output
    saved = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)
    final = load_file(tmp_path / "run" / "final.safetensors")
    assert final and all(torch.equal(saved["model"][name], final[name]) for name in final)
    assert not snapshot_versions(tmp_path / "run")


def test_a_worker_0_that_fails_for_good_ends_the_run_with_a_line_that_says_where_the_model_is(
    processes: Processes, tmp_path: Path
) -> None:
    """Neither the launcher nor torchrun starts it again; the user does."""
    torchruns, launched = tmp_path / "torchrun", tmp_path / "launch"
    code, output = run(processes, TORCHRUN, "plain", torchruns, "exit")
    assert code != 0 and snapshot_versions(torchruns)[-1] == 8, output
    code, output = run(processes, [*LAUNCH, "--max-restarts", 0], "plain", launched, "raise")
    assert code == 1 and "error: worker 0 ended with code 1: OSError: no room for the model" in output, output
    (line,) = [line for line in output.splitlines() if "kept in" in line]
    assert f"kept in {launched}/final.safetensors; fairseq-async export {launched} OUT" in line
    export(launched, tmp_path / "exported.safetensors")
    for run_dir in (torchruns, launched):
        code, output = run(processes, [*LAUNCH, "--resume"], "plain", run_dir)
        assert code == 0 and is_saved(run_dir), output
        assert not snapshot_versions(run_dir)
    exported, final = load_file(tmp_path / "exported.safetensors"), load_file(launched / "final.safetensors")
    assert all(torch.equal(exported[name], final[name]) for name in final)
    export(launched, tmp_path / "later.safetensors")  # what stays of a run that is saved
    assert (tmp_path / "later.safetensors").read_bytes() == (tmp_path / "exported.safetensors").read_bytes()
