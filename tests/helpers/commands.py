"""The real commands on tiny tasks: their flags, and processes that are bounded in time and cleaned up in any case."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fairseq_async"
HELPERS = Path(__file__).parent
NAN_USER_DIR = HELPERS / "spoiler"  # fairseq user directories
FP16_USER_DIR = HELPERS / "fp16_on_cpu"
# It halves the time in which a fairseq process starts, and most of these tests' time is that.
FAIRSEQ = {"PYTHONPATH": f"{HELPERS / 'for_translation_alone'}:{ROOT}"}
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{HELPERS / 'without_fairseq'}:{ROOT}"}
# The variables of the front ends that do not need DEEPSPEED's.
FRONT_ENDS: dict[str, dict[str, str]] = {
    "fairseq_train": {},
    **dict.fromkeys(("torch_loop", "accelerate_loop"), {"PYTHONPATH": str(ROOT)}),
}
DEEPSPEED_JOB = HELPERS / "deepspeed_job.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
MODEL = (
    "--task translation --arch transformer --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 "
    "--decoder-embed-dim 32 --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --encoder-attention-heads 2 "
    "--decoder-attention-heads 2 --share-decoder-input-output-embed --dropout 0.1 "
    "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 200 --clip-norm 1.0 "
    "--lr 2e-3 --lr-scheduler inverse_sqrt --warmup-updates 20 --seed 3 --num-workers 0 "
    "--log-format json --log-interval 5"
).split()
HYBRID = ["--optimizer", "hybrid_async"]


def command(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, f"{name} is not installed"
    return found


class Processes:
    """Starts commands, each in a group of its own, which is killed at the end of a ``with`` block."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def start(self, arguments: Sequence[object], **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | ONE_THREAD | FAIRSEQ | environment,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, arguments: Sequence[object], seconds: float = 120, **environment: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(arguments, **environment)
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output

    def end(self) -> None:
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def launch_command(
    data: Path, workers: int, save_dir: Path, *flags: object, launcher: Sequence[object] = ()
) -> list[object]:
    ours = [command("fairseq-async"), "launch", "--workers", workers, *launcher, "--"]
    return [*ours, "fairseq-train", data, *MODEL, *HYBRID, "--save-dir", save_dir, *flags]


def plain_command(data: Path, save_dir: Path, *flags: object) -> list[object]:
    return [command("fairseq-train"), data, *MODEL, "--save-dir", save_dir, *flags]


def synchronous(processes: Processes, data: Path, save_dir: Path, workers: int, *flags: object) -> None:
    """fairseq's own data parallelism over Gloo; its processes may abort at exit, after all is saved."""
    common = ["--distributed-world-size", workers, "--distributed-no-spawn", "--distributed-backend", "gloo"]
    common += ["--ddp-backend", "legacy_ddp", "--distributed-init-method", f"file://{save_dir}.rendezvous"]
    ranks = [
        processes.start(plain_command(data, save_dir, *common, *flags, "--distributed-rank", rank))
        for rank in range(workers)
    ]
    outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    assert "done training" in outputs[0], outputs[0]


def train_alone(
    processes: Processes,
    data: Path,
    folder: Path,
    jobs: Mapping[str, Sequence[object]],
    seconds: float = 120,
    of_their_own: Mapping[str, str] | None = None,
) -> dict[str, tuple[int, str]]:
    """As the fixture ``alone``, in ``folder``; ``of_their_own`` has the data of jobs that take other data."""
    written = []
    for name, flags in jobs.items():
        line = [(of_their_own or {}).get(name, data), *MODEL, "--save-dir", folder / name, *flags]
        written.append({"name": name, "ranks": 1, "spoil": "", "flags": [str(flag) for flag in line]})
    (folder / "jobs.json").write_text(json.dumps(written))
    script = [sys.executable, HELPERS / "fairseq_ranks.py", folder / "jobs.json", 0]
    code, output = processes.run(script, seconds)
    assert code == 0, output
    logs = {name: (folder / f"{name}-0.log").read_text() for name in jobs}
    return {name: (int(log.split()[-1]), log) for name, log in logs.items()}
