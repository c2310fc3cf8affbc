"""A tiny translation task, and ways to run the real commands on it: bounded in time, cleaned up whatever happens."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.chaos.hosts import Cable, Host, other_host

settings.register_profile("patient", deadline=None)  # a first call imports, and machines are busy
settings.load_profile("patient")
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in a background job, and so in what we start
torch.serialization.add_safe_globals([Namespace])  # plain fairseq's own checkpoints hold one

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fairseq_async"
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{ROOT / 'tests' / 'without_fairseq'}:{ROOT}"}
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


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 pairs of a language whose sentences are reversed and in capitals, binarised by fairseq."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = [f"w{i}" for i in range(60)]
    for split, count in (("train", 600), ("valid", 40)):
        sentences = [[rng.choice(words) for _ in range(rng.randint(3, 9))] for _ in range(count)]
        (folder / f"{split}.a").write_text("".join(" ".join(s) + "\n" for s in sentences))
        (folder / f"{split}.b").write_text("".join(" ".join(s[::-1]).upper() + "\n" for s in sentences))
    prefixes = ["--trainpref", f"{folder}/train", "--validpref", f"{folder}/valid", "--testpref", f"{folder}/valid"]
    subprocess.run(
        [command("fairseq-preprocess"), "-s", "a", "-t", "b", *prefixes, "--destdir", f"{folder}/bin"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return folder / "bin"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


class Processes:
    """Starts commands, each in a group of its own, which is killed at the end of the test."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, arguments: Sequence[object], **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | ONE_THREAD | environment,
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


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.end()


@pytest.fixture
def host() -> Iterator[Host]:
    """Another machine: a network namespace, or an address of this one where none can be made."""
    with other_host(Cable()) as host:
        yield host


@pytest.fixture
def launch(processes: Processes, data: Path) -> Callable[..., tuple[int, str]]:
    """``launch(workers, save_dir, *flags)``: runs ``fairseq-async launch`` to its end."""

    def run(workers: int, save_dir: Path, *flags: object, launcher: Sequence[object] = ()) -> tuple[int, str]:
        return processes.run(launch_command(data, workers, save_dir, *flags, launcher=launcher))

    return run


def launch_command(
    data: Path, workers: int, save_dir: Path, *flags: object, launcher: Sequence[object] = ()
) -> list[object]:
    ours = [command("fairseq-async"), "launch", "--workers", workers, *launcher, "--"]
    return [*ours, "fairseq-train", data, *MODEL, *HYBRID, "--save-dir", save_dir, *flags]


def plain_command(data: Path, save_dir: Path, *flags: object) -> list[object]:
    return [command("fairseq-train"), data, *MODEL, "--save-dir", save_dir, *flags]


@pytest.fixture
def alone(processes: Processes, data: Path, tmp_path: Path) -> Callable[..., dict[str, tuple[int, str]]]:
    """``alone(name=[flag, …], …)``: ``fairseq-train`` without a launcher, one after the other in one process.

    Each saves in ``tmp_path / name``, or where it says with ``--save-dir``; returns exit codes and outputs.
    """

    def run(**jobs: Sequence[object]) -> dict[str, tuple[int, str]]:
        written = []
        for name, flags in jobs.items():
            line = [data, *MODEL, "--save-dir", tmp_path / name, *flags]
            written.append({"name": name, "ranks": 1, "spoil": "", "flags": [str(flag) for flag in line]})
        (tmp_path / "jobs.json").write_text(json.dumps(written))
        script = [sys.executable, Path(__file__).parent / "fairseq_ranks.py", tmp_path / "jobs.json", 0]
        code, output = processes.run(script, PYTHONPATH=str(PACKAGE.parent))
        assert code == 0, output
        logs = {name: (tmp_path / f"{name}-0.log").read_text() for name in jobs}
        return {name: (int(log.split()[-1]), log) for name, log in logs.items()}

    return run


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> Callable[..., str]:
    """``refused(flag, …)``: what ``fairseq-train``, as one of two workers under torchrun, says before it starts."""
    from fairseq_cli import train

    import fairseq_async.fairseq_plugin  # noqa: F401  # the package may have been imported before fairseq

    def run(*flags: object) -> str:
        line = [data, *MODEL, "--user-dir", PACKAGE, "--save-dir", tmp_path, *flags]
        torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in torchrun.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *map(str, line)])
        for name in ("main", "Trainer", "convert_namespace_to_omegaconf"):
            monkeypatch.setattr(train, name, getattr(train, name))
        with pytest.raises(SystemExit) as end:
            train.cli_main()
        lines = capfd.readouterr().err.splitlines()
        said = [text for text in lines if text.startswith("fairseq-async: error:")]
        assert end.value.code == 2 and len(said) == 1, lines[-1]
        return said[0]

    return run


def load(path: Path) -> dict[str, Any]:
    """A checkpoint, with ``weights_only`` on."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def relative_differences(left: Path, right: Path) -> dict[str, float]:
    """|a - b| / |a| of each tensor of two checkpoints' models."""
    a, b = load(left)["model"], load(right)["model"]
    assert a.keys() == b.keys()
    return {n: float((a[n] - b[n]).double().norm() / a[n].double().norm().clamp_min(1e-30)) for n in a}
