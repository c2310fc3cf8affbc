"""The real ``transformers.Trainer``, with workers that DeepSpeed's launcher has started."""

import json
import shutil
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file

from fairseq_async.environment import SLOWDOWN
from fairseq_async.options.addresses import free_port
from tests.helpers.commands import DEEPSPEED, HELPERS, ROOT, Processes, command
from tests.helpers.run_files import events

BASE = json.loads((ROOT / "recipes/hf_trainer/ds_config.json").read_text())
WITH_FLAGS = "--use_deepspeed --deepspeed_config_file {out}/config.json"  # of accelerate launch
WITH_A_CONFIGURATION = "--config_file {out}/accelerate.json"
EPOCHS, SAMPLES, BATCH = 4, 96, 4


def run(
    out: Path,
    workers: int,
    section: dict[str, Any],
    *flags: str,
    base: dict[str, Any] = BASE,
    launch: str = "",
    slowdown: str = "",
) -> tuple[int, str]:
    """Exit code and output; ``launch`` are the flags of ``accelerate launch``, in the place of DeepSpeed's launcher."""
    config = out / "config.json"
    config.write_text(json.dumps(base | {"async_training": section | {"run_dir": str(out / "run")}}))
    launcher = [command("deepspeed"), "--num_accelerators", workers, "--master_port", free_port()]
    if launch:
        settings = {"deepspeed_config_file": str(config), "zero3_init_flag": False}
        lines = {"distributed_type": "DEEPSPEED", "compute_environment": "LOCAL_MACHINE", "deepspeed_config": settings}
        (out / "accelerate.json").write_text(json.dumps(lines))
        of_launch = launch.format(out=out).split()
        launcher = [command("accelerate"), "launch", "--num_processes", workers, "--main_process_port", free_port()]
        launcher += of_launch
    with Processes() as processes:
        job = [*launcher, HELPERS / "hf_trainer_job.py", "launched" if launch else config, out, *flags]
        return processes.run(job, 250, **DEEPSPEED, **{SLOWDOWN: slowdown}, LOCAL_WORLD_SIZE="1")


def train(out: Path, workers: int, section: dict[str, Any], *flags: str, **others: Any) -> list[dict[str, Any]]:
    """What each worker has left."""
    code, output = run(out, workers, section, *flags, **others)
    assert code == 0 and "began with the same batch" not in output, output
    return [json.loads((out / f"worker-{worker}.json").read_text()) for worker in range(workers)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of local SGD with two workers: its folder, and what each has left."""
    out = tmp_path_factory.mktemp("trainer")
    section = {"outer": "diloco", "local_steps": 6, "total_steps": "auto"}  # whose workers wait: the steps are known
    return out, train(out, 2, section)


def test_the_run_has_the_trainers_steps_and_auto_values(two: tuple[Path, list[dict[str, Any]]]) -> None:
    out, workers = two
    steps = EPOCHS * SAMPLES // (2 * BATCH)
    assert [each["progress"] for each in workers] == [steps, steps]
    assert sum(event["local_steps"] for event in events(out / "run")) == 2 * steps
    for each in workers:
        auto = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
        assert each["config"] == auto | {"torch_adam": True}
        losses = [entry["loss"] for entry in each["log"] if "loss" in entry]
        assert losses[-1] < 0.8 * losses[0]


def test_workers_draw_each_sample_once_in_an_epoch_between_them(two: tuple[Path, list[dict[str, Any]]]) -> None:
    _, workers = two
    firsts = [each["drawn"][: SAMPLES // 2] for each in workers]
    assert sorted(firsts[0] + firsts[1]) == list(range(SAMPLES))


def test_worker_0_alone_validates_and_saves_the_servers_parameters(two: tuple[Path, list[dict[str, Any]]]) -> None:
    """The best checkpoint is in the model at the end, and what was saved of it scores as it did then."""
    out, (first, second) = two
    assert (first["zero"], second["zero"]) == (True, False)
    scores = [entry["eval_loss"] for entry in first["log"] if "eval_loss" in entry]
    assert len(scores) == EPOCHS and not any("eval_loss" in entry for entry in second["log"])
    assert first["best"] == min(scores) == pytest.approx(first["evaluated"], rel=1e-4)
    checkpoints = sorted((out / "trainer").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert len(checkpoints) == EPOCHS and all((path / "trainer_state.json").exists() for path in checkpoints)
    best = load_file(checkpoints[scores.index(min(scores))] / "model.safetensors")
    final = load_file(out / "final" / "model.safetensors")
    assert all((best[name] == final[name]).all() for name in final)


def test_a_training_that_is_resumed_goes_on_with_the_servers_state(two: tuple[Path, list[dict[str, Any]]]) -> None:
    """Also on worker 1, which has no checkpoints of its own."""
    out, before = two
    saved = sorted(each["step"] for each in before[0]["log"] if "eval_loss" in each)
    for step in saved[2:]:
        shutil.rmtree(out / "trainer" / f"checkpoint-{step}")
    after = train(out, 2, {"outer": "diloco", "local_steps": 6}, "--resume")
    steps = EPOCHS * SAMPLES // (2 * BATCH)
    assert [each["progress"] for each in after] == [each["step"] for each in after] == [steps, steps]
    for resumed, whole in zip(after, before, strict=True):
        assert len(resumed["drawn"]) < 0.7 * len(whole["drawn"])  # of half the steps
    assert after[0]["best"] == pytest.approx(after[0]["evaluated"], rel=1e-4)


def test_three_workers_of_hybrid_async_share_the_steps_of_the_server(tmp_path: Path) -> None:
    workers = train(tmp_path, 3, {"method": "hybrid_async", "barrier": True}, launch=WITH_A_CONFIGURATION)
    steps = EPOCHS * SAMPLES // (3 * BATCH)
    assert [each["progress"] for each in workers] == [steps] * 3
    assert sorted(event["worker"] for event in events(tmp_path / "run")) == sorted([0, 1, 2] * steps)
    assert {event["weight"] for event in events(tmp_path / "run")} == {BATCH * 8}, "the tokens of a step"
    first = workers[0]
    rates = [entry["learning_rate"] for entry in first["log"] if "learning_rate" in entry]
    assert 0.01 >= rates[0] > rates[-1] > 0  # of the server's schedule
    assert first["best"] == pytest.approx(first["evaluated"], rel=1e-4)


@pytest.mark.parametrize(
    ("slowdown", "section", "stops"),
    [
        ("30,5", {"local_steps": 2, "total_steps": 20}, False),
        ("30,5", {"method": "hybrid_async"}, False),
        ("5,30", {"method": "hybrid_async"}, True),
    ],
)
def test_the_trainer_follows_the_run_whichever_worker_is_slow(
    tmp_path: Path, slowdown: str, section: dict[str, Any], stops: bool
) -> None:
    """A fast worker takes more than its part of the steps, and worker 0 saves the finished model. Both are slow: on a
    busy machine, the one that starts first has taken few steps when the other comes."""
    workers = train(tmp_path, 2, section, *["--stops"] * stops, slowdown=slowdown)
    steps = section.get("total_steps", EPOCHS * SAMPLES // (2 * BATCH))
    slow, fast = (workers[slowdown.split(",").index(factor)] for factor in ("30", "5"))
    if not stops:  # after ten steps the worker that started first may be ahead
        assert len(fast["drawn"]) > 2 * len(slow["drawn"])
        assert [each["step"] for each in workers] == [steps, steps]
        ends = {each["progress"] for each in workers}  # of hybrid, the last of its steps may begin amid a whole one
        assert len(ends) == 1 and steps <= min(ends) < steps + 1
    else:
        assert 10 <= workers[0]["step"] < steps
    saved = tmp_path / "trainer" / f"checkpoint-{workers[0]['step']}"
    state = torch.load(next(saved.glob("global_step*")) / "async_server.pt", weights_only=True)
    assert state["server"]["version"] == max(event["version_after"] for event in events(tmp_path / "run")) or stops
    rates = {entry["step"]: entry["learning_rate"] for entry in workers[0]["log"] if "learning_rate" in entry}
    after = {step: 0.01 * (steps + 1 - step) / (steps - 2) for step in range(steps + 1)}  # and a warm-up of two steps
    for before, step in pairwise(rates):  # the rate of a line is that of the last step before it
        # a step that begins when others have completed the run has the schedule's last rate
        assert (after[step] + 1e-9 < rates[step] or step == steps) and rates[step] <= after[before] + 1e-9


def test_with_an_optimizer_alone_the_trainers_schedule_is_the_servers(tmp_path: Path) -> None:
    """And the log shows the server's rates."""
    without = {key: value for key, value in BASE.items() if key != "scheduler"}
    (worker,) = train(tmp_path, 1, {"method": "hybrid_async"}, base=without, launch=WITH_FLAGS)
    steps = EPOCHS * SAMPLES // BATCH
    rates = [entry["learning_rate"] for entry in worker["log"] if "learning_rate" in entry]
    described = json.loads((tmp_path / "run" / "run.json").read_text())["method"]["framework"]
    assert [row[0] for row in described["learning_rates"][::steps]] == [pytest.approx(0.01), 0.0]
    assert rates[0] > rates[-1] and rates[len(rates) // 2 - 1] == pytest.approx(0.005, rel=0.1)


@pytest.mark.parametrize(
    ("section", "without", "says"),
    [
        (
            {},
            {"optimizer", "scheduler"},
            'config.json: the Trainer keeps its learning-rate schedule from the run: add "optimizer": {"type": "AdamW"',
        ),
        ({"shares": "auto"}, set(), 'error: "shares" is auto: give "gradient_accumulation_steps" of at least 2'),
    ],
)
def test_what_stays_in_the_trainer_is_one_line_of_error(
    tmp_path: Path, section: dict[str, Any], without: set[str], says: str
) -> None:
    base = {key: value for key, value in BASE.items() if key not in without}
    code, output = run(tmp_path, 1, {"method": "hybrid_async"} | section, base=base)
    assert code != 0 and "Traceback" not in output and says in output


NOT_OURS = {
    "without DeepSpeed": (2, "error: attach was called, but this training is without DeepSpeed: give"),
    "flags alone": (2, "error: attach was called, but accelerate has no DeepSpeed configuration file, and no flag can"),
    "imported before": (2, 'error: "async_training": deepspeed.initialize was imported before attach was called'),
    "without our section": (0, 'the DeepSpeed configuration has no "async_training": this training is synchronous'),
    "by position": (0, "AsyncEngine"),
    "in a file": (0, "AsyncEngine"),
}


@pytest.mark.parametrize("case", NOT_OURS)
def test_training_without_our_engine_says_so(processes: Processes, tmp_path: Path, case: str) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    job = [command("python"), HELPERS / "hf_attached_job.py", case, tmp_path]
    code, output = processes.run(job, 100, **DEEPSPEED, **{name: str(value) for name, value in world.items()})
    assert (code, NOT_OURS[case][1] in output, "Traceback" in output) == (NOT_OURS[case][0], True, False), output


@pytest.mark.usefixtures("executed")
def test_a_scheduler_that_a_script_with_accelerate_keeps_steps_as_it_says(processes: Processes, tmp_path: Path) -> None:
    """DeepSpeed has no schedule then, and the script's own is not lost for that."""
    launcher = [command("fairseq-async"), "launch", "--workers", 1, "--", "python"]
    code, output = processes.run([*launcher, HELPERS / "hf_accelerate_job.py", tmp_path], 250, **DEEPSPEED)
    assert code == 0, output
    (line,) = [line for line in (tmp_path / "logs/worker-0.log").read_text().splitlines() if "rates:" in line]
    assert line == "rates: 0.01 0.005 0.0025 0.00125"


@pytest.mark.parametrize("asked", ["training_stop", "evaluate", "save", "log"])
@pytest.mark.parametrize("worker", [0, 1])
def test_worker_0_has_the_servers_parameters_for_what_it_evaluates_or_saves_and_all_have_them_at_the_end(
    monkeypatch: pytest.MonkeyPatch, asked: str, worker: int
) -> None:
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # transformers would import it; it may not fit this torch
    module = import_module("fairseq_async.deepspeed_plugin.huggingface")
    engine = MagicMock(worker=worker)
    monkeypatch.setattr(module, "_engines", [engine])
    names = ("training_stop", "evaluate", "save", "log")
    control = SimpleNamespace(**{f"should_{each}": each == asked for each in names})
    module._take_parameters(control)
    for_worker_0 = asked in ("evaluate", "save")
    assert vars(control)[f"should_{asked}"] is not (for_worker_0 and worker == 1)
    assert engine.pull.called is (asked == "training_stop" or (for_worker_0 and worker == 0))
