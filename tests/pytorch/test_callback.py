"""What ``AsyncCallback`` decides at each event of a ``Trainer``, without a ``Trainer``."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.start.context import WorkerContext


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With a ``Trainer`` that another callback has changed already."""
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # transformers would import it; it may not fit this torch
    found = import_module("fairseq_async.pytorch.hf_trainer")
    changed = SimpleNamespace(set_initial_training_values=SimpleNamespace(__wrapped__=None))
    monkeypatch.setattr(found, "Trainer", changed)
    monkeypatch.setattr(found, "_callbacks", [])
    monkeypatch.delenv("RANK", raising=False)
    return found


def callback_of(module: Any, monkeypatch: pytest.MonkeyPatch, worker: int = 0, workers: int = 3, **options: Any) -> Any:
    monkeypatch.setattr(WorkerContext, "find", lambda: WorkerContext(worker, workers))
    return module.AsyncCallback(**{"method": "hybrid_async"} | options)


@pytest.mark.parametrize(("given", "known"), [(None, None), (True, None), (False, None), ("here", "here")])
def test_a_checkpoint_is_where_the_script_says_if_it_says_where(
    module: Any, monkeypatch: pytest.MonkeyPatch, given: object, known: object
) -> None:
    assert callback_of(module, monkeypatch, resume_from_checkpoint=given)._resumed_from == known


def test_a_script_that_reads_the_number_of_workers_divides_the_data_itself(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback_of(module, monkeypatch, worker=2)  # of a training before this one in the same process
    callback = callback_of(module, monkeypatch, worker=1)
    assert callback.worker == 1 and callback.place == (3, 1)
    own, handler = object(), SimpleNamespace(callbacks=[object(), callback])
    assert module._place(SimpleNamespace(callback_handler=handler)) == module._place(None) == (3, 1)
    assert module._place(SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[own]))) is None
    assert callback.workers == 3 and callback.place is None and module._place(None) is None
    callback._training = SimpleNamespace(worker=4, workers=5)  # one that has joined
    assert (callback.worker, callback.workers) == (4, 5)


@pytest.mark.parametrize("worker", [0, 1])
def test_worker_0_alone_saves_the_servers_state_where_the_trainer_has_saved(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worker: int
) -> None:
    callback = callback_of(module, monkeypatch, worker)
    callback._training = MagicMock(worker=worker)
    callback._training.state_dict.return_value = {"server": torch.ones(2), "method": "x"}
    args, state = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=12)
    callback.on_save(args, state, None)
    (tmp_path / "checkpoint-12").mkdir()
    callback.on_save(args, state, None)
    assert [path.name for path in tmp_path.rglob("*.pt")] == ["async_server.pt"] * (worker == 0)
    restored = MagicMock()
    if worker == 0:
        with pytest.raises(ConfigurationError, match="none/async_server.pt, the server's state, is not there"):
            callback._restore(restored, tmp_path / "none" / "async_server.pt")
        callback._restore(restored, tmp_path / "checkpoint-12" / "async_server.pt")
        assert restored.load_state_dict.call_args.args[0]["server"].tolist() == [1.0, 1.0]
    else:
        callback._restore(restored, tmp_path / "none" / "async_server.pt")
        assert not restored.mock_calls, "worker 0 brings it"


@pytest.mark.parametrize(
    ("worker", "finished", "for_all"), [(0, False, True), (0, True, False), (1, False, False), (1, True, False)]
)
def test_worker_0_that_stops_before_the_end_ends_the_run_for_all(
    module: Any, monkeypatch: pytest.MonkeyPatch, worker: int, finished: bool, for_all: bool
) -> None:
    callback = callback_of(module, monkeypatch, worker)
    callback._training = training = MagicMock(worker=worker, finished=finished)
    callback.on_train_end(None, None, None)
    assert training.mock_calls == [call.leave(for_all=for_all), call.abandon()]


@pytest.mark.parametrize(
    ("worker", "wanted", "left", "calls"),
    [
        (0, "", "", []),
        (0, "log", "log", []),
        (0, "evaluate", "evaluate", [call.take_server_parameters()]),
        (0, "save log", "save log", [call.take_server_parameters()]),
        (0, "training_stop save", "training_stop save", [call.pull(), call.take_server_parameters()]),
        (1, "log evaluate save", "", []),
        (1, "log training_stop", "training_stop", [call.pull()]),
    ],
)
def test_before_the_trainer_logs_evaluates_or_saves_worker_0_has_the_servers_parameters(
    module: Any, monkeypatch: pytest.MonkeyPatch, worker: int, wanted: str, left: str, calls: list[Any]
) -> None:
    callback = callback_of(module, monkeypatch, worker)
    callback._training = training = MagicMock(worker=worker)
    names = ("training_stop", "evaluate", "save", "log")
    control = SimpleNamespace(**{f"should_{name}": name in wanted.split() for name in names})
    callback._prepare(control)
    assert {name for name in names if getattr(control, f"should_{name}")} == set(left.split())
    assert training.mock_calls == calls


@pytest.mark.parametrize(
    ("options", "workers", "number", "follows", "shares"),
    [
        ({}, 3, 4, True, True),
        ({}, 1, 4, True, False),
        ({}, 3, 1, True, False),
        ({}, 3, 4, False, False),  # the script counts them itself
        ({"barrier": True}, 3, 4, True, False),
        ({"updates_per_step": 3}, 3, 4, True, False),
        ({"shares": "equal"}, 3, 4, True, False),
        ({"shares": "auto"}, 3, 4, False, True),
    ],
)
def test_the_server_divides_the_micro_batches_of_a_step_by_default_where_it_can(
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    workers: int,
    number: int,
    follows: bool,
    shares: bool,
) -> None:
    checked = list[object]()
    callback = callback_of(module, monkeypatch, workers=workers, **options)
    callback._trainer = SimpleNamespace(args=SimpleNamespace(gradient_accumulation_steps=number))
    monkeypatch.setattr(module, "follows_shares", lambda trainer: follows)
    monkeypatch.setattr(module, "check_counting", checked.append)
    assert callback._shares() == ({"shares": "auto", "micro_batches": number} if shares else {})
    assert checked == [callback._trainer] * shares


def test_what_cannot_be_divided_is_one_line(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the Trainer is made, and where it begins to train with a single micro-batch a step."""
    with pytest.raises(SystemExit, match="2"):
        callback_of(module, monkeypatch, micro_batches=4)
    assert "error: AsyncCallback: micro_batches is what the Trainer has as gradient_acc" in capsys.readouterr().err
    callback = callback_of(module, monkeypatch, shares="auto")
    args = SimpleNamespace(auto_find_batch_size=False, gradient_accumulation_steps=1)
    model = torch.nn.Linear(2, 1)
    callback._trainer, callback._flow = SimpleNamespace(args=args, model=model), object()
    with pytest.raises(ConfigurationError, match="optim is one of the layerwise optimizers, which step within backwa"):
        callback._make(model, module.LayerWiseDummyOptimizer(optimizer_dict={}), None, 9)
    state = SimpleNamespace(max_steps=9, global_step=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SystemExit, match="2"):
        callback.on_train_begin(args, state, None, optimizer=optimizer, lr_scheduler=0)
    said = "error: AsyncCallback: shares is auto: give TrainingArguments gradient_accumulation_steps of at least 2"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("max_norm", "norm", "others"), [(1.0, 5.0, {}), (0.5, 0.5, {}), (0.7, 0.7, {"norm_type": 1})])
def test_the_trainers_own_clipping_is_the_servers_and_a_scripts_stays(
    module: Any, monkeypatch: pytest.MonkeyPatch, max_norm: float, norm: float, others: dict[str, float]
) -> None:
    """A training_step may clip a part of the model, or to another norm, by the Trainer's accelerator."""
    callback, weight = callback_of(module, monkeypatch), torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    accelerator = SimpleNamespace(clip_grad_norm_=torch.nn.utils.clip_grad_norm_)
    callback._trainer = SimpleNamespace(args=SimpleNamespace(max_grad_norm=1.0), accelerator=accelerator)
    assert callback._clipping() == {"clip_norm": 1.0}
    measured = accelerator.clip_grad_norm_([weight], max_norm, **others)
    assert measured.item() == pytest.approx(7.0 if others else 5.0)
    assert weight.grad.norm(others.get("norm_type", 2)).item() == pytest.approx(norm, rel=1e-5)


def begun(module: Any, monkeypatch: pytest.MonkeyPatch, callback: Any, step: int, planned: int, ends: int) -> Any:
    """What the beginning of a training does, in its order; worker 0 says at which step the run ends."""
    did = MagicMock()
    training = did.made.return_value
    training.total_steps, training.worker = ends, callback.worker
    for name in ("take_back", "RunSchedule", "note_calls"):
        monkeypatch.setattr(module, name, getattr(did, name))
    for name in ("HybridAsync", "AsyncLocalSGD"):
        monkeypatch.setattr(module, name, did.made)
    monkeypatch.setattr(module.AsyncCallback, "_worker_side", lambda _: "the worker side")
    monkeypatch.setattr(module.AsyncCallback, "_shares", lambda _: {})
    monkeypatch.setattr(module.AsyncCallback, "_modules_beside", lambda *_: [])
    monkeypatch.setattr(module, "_divisions", [SimpleNamespace(by_script=False)])
    callback._flow, callback._trainer = did.flow, did.trainer
    did.trainer.model = did.trainer.model_wrapped = "model"
    did.trainer.args = SimpleNamespace(auto_find_batch_size=False, max_grad_norm=0.0)
    state = SimpleNamespace(global_step=step, max_steps=planned)
    did.flow.begin.side_effect = lambda total: vars(state).update(max_steps=total, global_step=step or 4)
    args = SimpleNamespace(output_dir="out")
    given = {"model": "another's", "optimizer": SimpleNamespace(optimizer="optimizer"), "lr_scheduler": "scheduler"}
    callback.on_train_begin(args, state, None, **given)
    return did


@pytest.mark.parametrize("method", ["hybrid_async", "local_sgd"])
@pytest.mark.parametrize(
    ("step", "resume_from", "state_in"),
    [(0, None, None), (6, None, "out/checkpoint-6/async_server.pt"), (6, "here", "here/async_server.pt")],
)
@pytest.mark.parametrize(("divides", "ends"), [(False, 18), (True, 15)])
def test_a_training_begins_with_the_runs_end_its_own_checkpoint_and_a_schedule_that_follows_the_run(
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    step: int,
    resume_from: str | None,
    state_in: str | None,
    divides: bool,
    ends: int,
) -> None:
    """The Trainer has planned 18 steps, whatever the option says, and the run is under way: that resumes nothing, and a
    scheduler of the script is where it was made."""
    callback = callback_of(module, monkeypatch, method=method, total_steps=30, resume_from_checkpoint=resume_from)
    if divides:
        assert callback.workers == 3
    restored = list[object]()
    monkeypatch.setattr(callback, "_restore", lambda training, path: restored.append(str(path)))
    did = begun(module, monkeypatch, callback, step, planned=18, ends=ends)
    (_, made), training = did.made.call_args, did.made.return_value
    assert made["total_steps"] == 18 and did.made.call_args.args == ("model", "optimizer")
    assert made.get("scheduler") == ("scheduler" if method == "hybrid_async" else None)
    assert (training.of_trainer, training.by_script) == (True, divides)
    assert restored == ([] if state_in is None else [state_in])
    assert did.take_back.mock_calls == [call("scheduler")] * (step > 0) and not did.note_calls.called
    anew = did.trainer.create_scheduler
    assert anew.mock_calls == ([] if ends == 18 else [call(num_training_steps=15)])
    follows = "scheduler" if ends == 18 else anew.return_value
    did.RunSchedule.assert_called_once_with(follows, "optimizer", "the worker side", ends, step > 0, "scheduler")
    assert did.trainer.lr_scheduler == did.RunSchedule.return_value


@pytest.mark.parametrize("divides", [False, True])
def test_the_plan_is_of_the_steps_that_the_option_says_and_of_as_many_parts_as_workers(
    module: Any, monkeypatch: pytest.MonkeyPatch, divides: bool
) -> None:
    callback = callback_of(module, monkeypatch, total_steps=30)
    if divides:
        assert callback.workers == 3
    follows = MagicMock()
    monkeypatch.setattr(module, "FollowRun", follows)
    checked = list[object]()
    monkeypatch.setattr(module, "_check_groups", lambda *given: checked.append(given))
    trainer = SimpleNamespace(args=SimpleNamespace())
    plan = callback.follow(trainer, "plan", "loader")
    follows.return_value.plan.assert_called_once_with("plan", "loader", 30, 3, divides)
    assert plan == follows.return_value.plan.return_value and callback._trainer is trainer
    assert checked == [(trainer.args, 1 if divides else 3)], "a part of the script's is a worker's own data"


@pytest.mark.parametrize("method", ["hybrid_async", "local_sgd"])
@pytest.mark.parametrize("holds", [True, False])
def test_a_loss_with_parameters_of_its_own_is_trained_beside_the_model(
    module: Any, monkeypatch: pytest.MonkeyPatch, method: str, holds: bool
) -> None:
    """As losses of sentence-transformers are, each of which has the model, too. The Trainer clips the model alone."""
    callback, model = callback_of(module, monkeypatch, method=method), torch.nn.Linear(2, 2)
    loss, other = (torch.nn.ModuleList([model, torch.nn.Linear(2, 1)]) for _ in range(2))
    trained = torch.nn.ModuleList([model, loss]) if holds else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    args = SimpleNamespace(max_grad_norm=1.0, gradient_accumulation_steps=1)
    callback._trainer = SimpleNamespace(model=model, loss={"one": loss, "other": other}, args=args)
    callback._trainer.accelerator = SimpleNamespace(clip_grad_norm_=None)
    monkeypatch.setattr(module, "AsyncLocalSGD", made := MagicMock())
    monkeypatch.setattr(module, "HybridAsync", made)
    callback._make(model, optimizer, "scheduler", 9)
    assert made.call_args.args == ([model, loss] if holds else model, optimizer)
    assert ("clip_norm" in made.call_args.kwargs) is (method == "hybrid_async" and not holds)


def test_a_parameter_that_the_trainer_holds_by_itself_is_trained_beside_the_model(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback, model = callback_of(module, monkeypatch), torch.nn.Linear(2, 2)
    temperature, nowhere, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    callback._trainer = SimpleNamespace(model=model, temperature=temperature, other=other)
    held = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    (beside,) = callback._modules_beside(model, held)
    assert list(map(id, beside.parameters())) == [id(temperature)]
    held.add_param_group({"params": [nowhere]})
    with pytest.raises(ConfigurationError, match="1 parameters that are neither the model's nor attributes of the"):
        callback._modules_beside(model, held)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((None, 2, 4), ""),
        ((24, 2, 4), ""),
        ((8, 2, 4), "GRPOConfig has counted 1 processes, and the run has 3 workers: make AsyncCallback before"),
        ((12, 1, 8), "a worker generates 4 completions at a time, which are no whole groups of num_generations 8"),
    ],
)
def test_groups_of_completions_are_each_of_one_worker(
    module: Any, capsys: pytest.CaptureFixture[str], sizes: tuple[int | None, int, int], said: str
) -> None:
    """As TRL's GRPO draws them, by the number of processes that its arguments have found when they were made."""
    kind = type("GRPOConfig", (SimpleNamespace,), {})
    names = ("generation_batch_size", "steps_per_generation", "num_generations")
    arguments = kind(per_device_train_batch_size=4, **dict(zip(names, sizes, strict=True)))
    if said:
        with pytest.raises(SystemExit, match="2"):
            module._check_groups(arguments, 3)
    else:
        module._check_groups(arguments, 3)
    assert said in capsys.readouterr().err
