"""``AsyncCallback`` with the real ``Trainer`` of transformers, in processes that a launcher of ours would start."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from fairseq_async.export import Format, export
from tests.helpers.commands import HELPERS, Processes, command
from tests.helpers.hf_runs import PATH, train
from tests.helpers.stand_ins import Numbers

DILOCO: dict[str, Any] = {"method": "local_sgd", "outer": "diloco", "local_steps": 3}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """A run of two workers: its folder and its events."""
    folder = tmp_path_factory.mktemp("trainer")
    yield folder, train(folder, 2, DILOCO)


@pytest.mark.parametrize(("read", "ends"), [(True, False), (False, True)])
def test_a_loader_of_a_script_that_has_asked_for_its_place_before_may_have_a_divided_data_set(
    monkeypatch: pytest.MonkeyPatch, read: bool, ends: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # transformers would import it; it may not fit this torch
    kind: Any = import_module("fairseq_async.pytorch.trainer.divided").Division
    monkeypatch.setattr(kind, "_as_one_of", lambda *given: nullcontext())
    division = kind.__new__(kind)
    division._find, division._making, division._was_read = lambda trainer: (2, 0), False, read
    loader = DataLoader(data := Numbers(8), 2)  # all of it
    trainer = SimpleNamespace(args=SimpleNamespace(seed=1), train_dataset=data)
    with pytest.raises(SystemExit) if ends else nullcontext():
        assert division._make(lambda of: loader, trainer, checks=True) is loader


def logged(out: Path, worker: int, key: str) -> list[dict[str, Any]]:
    """The lines of the worker's log that have the key."""
    return [line for line in json.loads((out / f"worker-{worker}.json").read_text()) if key in line]


def samples(out: Path, worker: int) -> float:
    """How many the Trainer believes it has trained on, all workers together."""
    (last,) = logged(out, worker, "train_runtime")
    return float(last["train_samples_per_second"] * last["train_runtime"])


def test_every_worker_takes_the_trainers_steps(two: tuple[Path, list[dict[str, Any]]]) -> None:
    _, events = two
    assert sorted((event["worker"], event["sequence"]) for event in events) == [
        (worker, sequence) for worker in range(2) for sequence in range(4)
    ]
    assert {event["local_steps"] for event in events} == {3}


@pytest.mark.parametrize("slowdown", [("1", "6"), ("6", "1")])
def test_the_trainer_follows_the_run_whichever_worker_is_slow(tmp_path: Path, slowdown: tuple[str, str]) -> None:
    """A fast worker takes more than its twelve steps, and worker 0 saves the finished model as checkpoint-12."""
    events = train(tmp_path, 2, {"method": "local_sgd", "local_steps": 2}, slowdown=slowdown)
    steps = [sum(event["local_steps"] for event in events if event["worker"] == worker) for worker in (0, 1)]
    assert sum(steps) == 24 and steps[slowdown.index("1")] > 12
    state = torch.load(tmp_path / "out" / "checkpoint-12" / "async_server.pt", weights_only=True)
    assert state["server"]["version"] == max(event["version_after"] for event in events)
    trainer_state = json.loads((tmp_path / "out" / "checkpoint-12" / "trainer_state.json").read_text())
    rates = {line["step"]: line["learning_rate"] for line in trainer_state["log_history"] if "loss" in line}
    steps_before = [0, *rates][:-1]  # a slow worker 0 hears of the progress at its own steps only
    for before, (step, rate) in zip(steps_before, rates.items(), strict=True):
        # a step that begins when the others have completed the run's twelve has the schedule's last rate
        assert max(0.0, 5e-3 * (1 - step / 12) - 1e-9) <= rate <= 5e-3 * (1 - before / 12) + 1e-9
        assert rate > 5e-3 * (1 - step / 12) or step == 12


@pytest.mark.parametrize("method", ["local_sgd", "hybrid_async"])
def test_workers_with_parts_of_unequal_length_have_worker_0s_number_of_steps(tmp_path: Path, method: str) -> None:
    train(tmp_path, 2, {"method": method, "epochs": 2, "samples": 50})  # batches of 25 samples, and of 24
    described = json.loads((tmp_path / "run" / "run.json").read_text())["method"]
    length = described["options"].get("total_steps") or described["last_version"] or described["whole_steps"]
    assert length == 14 and (tmp_path / "out" / "checkpoint-14").exists()


def test_a_worker_0_that_stops_early_ends_the_run_for_all(tmp_path: Path) -> None:
    """It stops after six steps of twelve, two rounds; the other is in its third then, or waits at that one's end."""
    events = train(tmp_path, 2, DILOCO | {"stops": True})
    assert [sum(event["worker"] == worker for event in events) for worker in (0, 1)] in ([2, 2], [2, 3])


def test_what_worker_0_evaluates_and_saves_are_the_servers_parameters(two: tuple[Path, list[dict[str, Any]]]) -> None:
    """In the end it has the best of them, which the Trainer has loaded. The other worker does neither."""
    out = two[0] / "out"
    assert [line["step"] for line in logged(out, 0, "eval_loss")] == [6, 12] and logged(out, 1, "eval_loss") == []
    for step in (6, 12):
        saved = load_file(out / f"checkpoint-{step}" / "model.safetensors")
        state = torch.load(out / f"checkpoint-{step}" / "async_server.pt", weights_only=True)
        flat = torch.cat([saved[row[0]].flatten() for row in state["layout"]])
        assert torch.equal(flat, state["server"]["parameters"])
    best = min(logged(out, 0, "eval_loss"), key=lambda line: line["eval_loss"])["step"]
    ended = torch.load(out / "worker-0.pt", weights_only=True)
    for name, value in load_file(out / f"checkpoint-{best}" / "model.safetensors").items():
        assert torch.equal(ended[name], value)


def test_a_checkpoint_is_exported_as_a_directory_for_from_pretrained(
    two: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    checkpoint = two[0] / "out" / "checkpoint-12"
    assert export(checkpoint, tmp_path / "model") is Format.HF
    exported = load_file(tmp_path / "model" / "model.safetensors")
    saved = load_file(checkpoint / "model.safetensors")
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], saved[name]) for name in saved)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["n_embd"] == 16


def test_a_run_goes_on_from_the_trainers_checkpoint(two: tuple[Path, list[dict[str, Any]]]) -> None:
    """At the server's version of that time, with its momentum. Worker 1, which has no checkpoint, joins at step 6."""
    folder, before = two
    assert samples(folder / "out", 0) == pytest.approx(2 * 12 * 4, rel=0.01)
    events = train(folder, 2, DILOCO, str(folder / "out" / "checkpoint-6"))
    again = events[-4:]
    assert [event["base_version"] for event in again] == [2, 2, 3, 3]
    assert max(event["version_after"] for event in events) == max(event["version_after"] for event in before) == 4
    assert [samples(folder / "out", n) for n in (0, 1)] == pytest.approx([2 * 6 * 4] * 2, rel=0.01)
    of_0, of_1 = (logged(folder / "out", n, "train_loss")[0]["train_loss"] for n in (0, 1))
    assert of_1 == pytest.approx(of_0, rel=0.3), "both have the losses of six steps"


@pytest.mark.parametrize("options", [{"method": "hybrid_async"}, DILOCO | {"local_steps": 1, "accumulation": 2}])
def test_a_worker_that_is_started_again_goes_on_with_the_data_that_follow(
    tmp_path: Path, processes: Processes, options: dict[str, Any]
) -> None:
    """Twelve steps are of samples of one pass, none of which is trained twice."""
    own = json.dumps(options | {"dies": True, "run_dir": str(tmp_path / "run")})
    job = ["python", HELPERS / "hf_callback_job.py", tmp_path, own]
    line = [command("fairseq-async"), "launch", "--workers", 1, "--max-restarts", 1, "--", *job]
    code, output = processes.run(line, seconds=200, PYTHONPATH=PATH)
    assert code == 0 and "Traceback" not in output, output
    before, after = (json.loads((tmp_path / name).read_text()) for name in ("drawn.json", "drawn again.json"))
    batch = 4 * options.get("accumulation", 1)
    assert len(before) == 5 * batch and len(set(before + after[: 7 * batch])) == 12 * batch


def test_a_trainer_is_one_of_all_ranks_only_while_it_makes_the_loader_of_its_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its evaluation draws all of its data, in the way that the script has chosen."""
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # transformers would import it; it may not fit this torch
    divided: Any = import_module("fairseq_async.pytorch.trainer.divided")
    state, loading = SimpleNamespace(num_processes=1, process_index=0), SimpleNamespace(dispatch_batches=True)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=state, dataloader_config=loading))
    division = SimpleNamespace()
    with pytest.raises(KeyError), divided.Division._as_one_of(division, trainer, 6, 4):
        assert (vars(state), loading.dispatch_batches) == ({"num_processes": 6, "process_index": 4}, False)
        assert division._making
        raise KeyError
    assert (vars(state), loading.dispatch_batches) == ({"num_processes": 1, "process_index": 0}, True)
    assert not division._making


def test_a_loader_draws_all_data_if_its_set_is_the_whole_one_and_its_sampler_leaves_nothing_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another data set, of whatever length, may be this worker's own."""
    monkeypatch.setitem(sys.modules, "torchaudio", None)
    divided: Any = import_module("fairseq_async.pytorch.trainer.divided")
    data, load = list(range(8)), DataLoader[int]
    part: Any = DistributedSampler(data, num_replicas=2, rank=1)  # type: ignore[arg-type]
    others = [load(data, sampler=part), load(data[::2]), load(data[::-1]), SimpleNamespace(dataset=data)]  # type: ignore
    assert divided._draws_all(load(data), data)  # type: ignore[arg-type]
    assert not any(divided._draws_all(each, data) for each in others)


def test_a_torchaudio_that_cannot_be_loaded_is_hidden_from_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchaudio.py").write_text("raise OSError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torchaudio", "fairseq_async.pytorch.hf_trainer"):
        monkeypatch.setitem(sys.modules, name, None)  # what is there now comes back after the test
        del sys.modules[name]
    import_module("fairseq_async.pytorch.hf_trainer")
    assert sys.modules["torchaudio"] is None


def test_a_server_that_would_begin_anew_is_one_line_of_error(
    two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, processes: Processes
) -> None:
    own = json.dumps(DILOCO | {"run_dir": str(tmp_path / "run")})
    job = [command("python"), HELPERS / "hf_callback_job.py", tmp_path, own, two[0] / "out" / "checkpoint-6"]
    code, output = processes.run(job, PYTHONPATH=PATH)
    assert code == 2 and "Traceback" not in output
    missing = tmp_path / "checkpoint-6" / "async_server.pt"
    assert f"AsyncCallback: {missing}, the server's state, is not there: give resume_from_checkpoint= the" in output


def test_a_trainer_that_would_begin_once_more_with_a_smaller_batch_is_one_line_of_error(
    tmp_path: Path, processes: Processes
) -> None:
    own = json.dumps(DILOCO | {"run_dir": str(tmp_path / "run"), "finds_batch_size": True})
    code, output = processes.run([command("python"), HELPERS / "hf_callback_job.py", tmp_path, own], PYTHONPATH=PATH)
    assert code == 2 and "Traceback" not in output
    assert "error: auto_find_batch_size: there was not enough memory" in output


@pytest.fixture(scope="module")
def muon_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Where the Trainer begins and ends by itself, with Muon for the matrices of the layers."""
    out = tmp_path_factory.mktemp("alone")
    with Processes() as processes:
        line = [command("python"), HELPERS / "hf_callback_job.py", out, json.dumps({"muon": True})]
        processes.run(line, seconds=200, PYTHONPATH=PATH)
    began, ended = (torch.load(out / f"{each}-0.pt", weights_only=True) for each in ("began", "worker"))
    return began, ended


@pytest.mark.parametrize(
    "options", [{"method": "hybrid_async"}, {"method": "local_sgd", "outer": "sgd", "outer_lr": 1.0, "local_steps": 3}]
)
def test_one_worker_with_muon_is_the_trainer_alone(
    tmp_path: Path, options: dict[str, Any], muon_alone: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
) -> None:
    """Within the rounding of bfloat16, in which Muon iterates: worker and server clip and subtract in other orders.

    A bit that float32 rounds otherwise is one of bfloat16 where a value is near a tie, which depends on the CPU: the
    difference is 0 to 0.002 of the way from the beginning.
    """
    train(tmp_path, 1, options | {"muon": True})
    ended = torch.load(tmp_path / "out" / "worker-0.pt", weights_only=True)
    began, alone = muon_alone
    for name, value in alone.items():
        way = (value - began[name]).norm()
        assert way > 0 and (ended[name] - value).norm() <= torch.finfo(torch.bfloat16).eps * way, name


def test_in_hybrid_the_trainers_optimizer_and_schedule_are_the_servers(tmp_path: Path) -> None:
    events = train(tmp_path, 1, {"method": "hybrid_async", "accumulation": 2})
    assert len(events) == 12 and events[-1]["version_after"] == 12
    assert {event["weight"] for event in events} == {2 * 4 * 8}, "the tokens of a step, as the Trainer counts them"
    described = json.loads((tmp_path / "run" / "run.json").read_text())["method"]["framework"]
    rates = [row[0] for row in described["learning_rates"]]
    assert rates == pytest.approx([5e-3 * (1 - step / 12) for step in range(13)])
    assert described["optimizer"] == "AdamW"
    decays = [group["options"]["weight_decay"] for group in described["parameter_groups"]]
    assert decays == [0.1, 0.0]  # none for biases and norms
    losses = [line["eval_loss"] for line in logged(tmp_path / "out", 0, "eval_loss")]
    assert losses[1] < losses[0]
    steps = logged(tmp_path / "out", 0, "loss")
    assert [line["epoch"] for line in steps] == [2 * line["step"] / 64 for line in steps] and len(steps) == 12


def test_one_worker_is_the_trainer_alone_but_for_the_rounding_of_the_exchange(
    tmp_path: Path, processes: Processes
) -> None:
    """To the bit, with bf16 autocast, and with Adafactor, which makes steps of full size of gradients that are mere
    rounding, such as those of the keys' biases in attention: there a rounding is soon seen."""
    code, output = processes.run([command("python"), HELPERS / "hf_rounding_job.py", tmp_path], PYTHONPATH=PATH)
    assert code == 0, output
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    for kind in ("autocast", "Adafactor"):
        assert torch.equal(found[kind, "run"], found[kind, "rounded"]), kind
        assert not torch.equal(found[kind, "run"], found[kind, ""]), "it shows nothing where nothing is rounded"


def test_a_mistake_in_the_callbacks_options_names_the_callback_before_the_trainer_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # transformers would import it; it may not fit this torch
    trainer: Any = import_module("fairseq_async.pytorch.hf_trainer")
    wrong: list[tuple[str, dict[str, Any]]] = [("local_sgd", {"outer": "x"}), ("hybrid_async", {"updates": 1})]
    for method, options in wrong:
        with pytest.raises(SystemExit, match="2"):
            trainer.AsyncCallback(method, **options)
        (line,) = capsys.readouterr().err.splitlines()
        assert f"error: AsyncCallback: {next(iter(options))}" in line or "error: AsyncCallback: unknown" in line, line
