"""What the engines of a worker make of a script's loop: passes, steps with and without a gradient, and its end."""

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD

from fairseq_async.deepspeed_plugin.engines import engine as module
from fairseq_async.deepspeed_plugin.engines import local_sgd
from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.deepspeed_plugin.engines.local_sgd import LocalEngine
from fairseq_async.errors import ExchangeError, RefusedError
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.bare_engines import bare, noting


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("what", ["trains", "evaluates", "without gradients", "after the end"])
def test_passes_that_train_are_those_of_a_model_in_training_whose_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, what: str, began: bool
) -> None:
    did = list[Any]()
    monkeypatch.setattr(DeepSpeedEngine, "forward", lambda engine, *given, **named: (given, named))
    batches = SimpleNamespace(note=noting(did, "notes"))
    worker = SimpleNamespace(batches=batches, finished=what == "after the end")
    loop = SimpleNamespace(began=float(began), begin_step=noting(did, "begins"))
    watch = SimpleNamespace(count_pass=noting(did, "counts", True))
    engine = bare(AsyncEngine, async_worker=worker, loop=loop, _loop_watch=watch, _check_loop=noting(did, "checks"))
    vars(engine)["join_run"] = noting(did, "joins")
    vars(engine)["module"] = nn.Linear(1, 1).train(what != "evaluates")
    with torch.set_grad_enabled(what != "without gradients"):
        assert engine("batch", mask="none") == (("batch",), {"mask": "none"})
    trains = [("notes", (("batch",), {"mask": "none"})), *["begins"] * (not began), "counts", "checks"]
    assert did == ["joins", *(trains if what == "trains" else [])]


def test_a_run_is_joined_once_with_what_the_script_has_loaded_before() -> None:
    did, worker = list[Any](), SimpleNamespace(joined=False)
    engine = bare(AsyncEngine, async_worker=worker, _followed=SimpleNamespace(begin=noting(did, "begins")))
    for name in ("_check_loop", "_check_masters", "_join"):
        vars(engine)[name] = noting(did, name)
    assert engine.join_run() is worker and did == ["_check_loop", "begins", "_check_masters", ("_join", None)]
    worker.joined = True
    assert engine.join_run() is worker and len(did) == 4


@pytest.mark.parametrize(
    ("joined", "finished", "before", "without", "said"),
    [
        (False, False, True, None, "the model is trained before the run is joined"),
        (False, False, False, "weight", ""),
        (True, False, True, None, ""),
        (True, False, False, "weight", "error: weight is trained without engine.step()"),
        (True, True, False, "weight", ""),
    ],
)
@pytest.mark.parametrize("stepped", [None, False, True], ids=["amid the loop", "at exit", "at exit after a step"])
def test_a_model_that_is_trained_beside_the_run_is_one_line(
    capsys: pytest.CaptureFixture[str],
    joined: bool,
    finished: bool,
    before: bool,
    without: str | None,
    said: str,
    stepped: bool | None,
) -> None:
    watch = SimpleNamespace(trained_before=lambda: before, trained_without_step=lambda: without, has_stepped=stepped)
    engine = bare(AsyncEngine, async_worker=SimpleNamespace(joined=joined, finished=finished), _loop_watch=watch)
    check = engine._check_loop if stepped is None else engine.check_at_exit
    if not said or stepped:
        return check()
    with pytest.raises(SystemExit):
        check()
    assert said in capsys.readouterr().err


def test_backward_is_within_the_run_and_its_loss_stays_what_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With CUDA graphs the next step writes its loss into the same memory."""
    monkeypatch.setattr(DeepSpeedEngine, "backward", lambda engine, loss, *given, **named: (loss, given, named))
    engine, loss = bare(AsyncEngine, async_worker=SimpleNamespace(joined=True)), torch.tensor(0.5, requires_grad=True)
    assert engine.backward(loss, 1, retain=2) == (loss, (1,), {"retain": 2})
    with torch.no_grad():
        loss.fill_(9.0)
    assert float(engine._loss) == 0.5 and not engine._loss.requires_grad
    engine.async_worker.joined = False
    with pytest.raises(SystemExit):
        engine.backward(loss)
    assert "call engine.join_run() before the first batch" in capsys.readouterr().err


def test_a_step_is_seen_and_takes_no_arguments_of_a_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    did = list[Any]()
    monkeypatch.setattr(DeepSpeedEngine, "step", lambda engine, *given: did.append(("steps", *given)))
    engine = bare(AsyncEngine, _loop_watch=SimpleNamespace(step=noting(did, "is seen")))
    engine.step({})
    assert did == ["is seen", ("steps",)]
    with pytest.raises(SystemExit):
        engine.step({"epoch": 3})
    assert "leave lr_kwargs out" in capsys.readouterr().err and len(did) == 2


def test_a_hundred_steps_in_a_row_without_a_gradient_end_the_process(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Warned of at the first one; a step with a gradient between them begins another row."""
    engine = bare(AsyncEngine, global_steps=7, _without_gradient=range(0))
    vars(engine)["_skip_step"] = lambda: setattr(engine, "global_steps", engine.global_steps + 1)
    for _ in range(99):
        engine._skip_without_gradient()
    engine.global_steps += 1
    for _ in range(99):
        engine._skip_without_gradient()
    assert engine.global_steps == 7 + 99 + 1 + 99
    with pytest.raises(SystemExit):
        engine._skip_without_gradient()
    assert "100 calls of engine.step() in a row had no gradient" in capsys.readouterr().err
    assert sum("without a gradient does nothing" in each.message for each in caplog.records) == 1


def test_a_step_that_is_left_out_counts_as_deepspeeds_do(monkeypatch: pytest.MonkeyPatch) -> None:
    did, weight = list[Any](), Parameter(torch.zeros(1))
    monkeypatch.setattr(module, "count_step", lambda engine, applied: did.append(applied))
    engine = bare(AsyncEngine, optimizer=SimpleNamespace(zero_grad=noting(did, "masters")), skipped_steps=3)
    vars(engine)["zero_grad"] = noting(did, "parameters")
    engine.weight = weight
    engine._skip_step()
    assert (did, engine.skipped_steps) == (["masters", "parameters", False], 4)


def test_steps_after_the_end_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = bare(AsyncEngine, async_worker=SimpleNamespace(finished=False), _warned_of_end=False)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert not engine._is_past_the_end() and not caplog.records
        engine.async_worker.finished = True
        assert engine._is_past_the_end() and engine._is_past_the_end() and len(caplog.records) == 1


@pytest.mark.parametrize("enabled", [False, True])
def test_the_figures_of_an_exchange_are_a_monitors_over_samples(enabled: bool) -> None:
    written = list[object]()
    monitor = SimpleNamespace(enabled=enabled, write_events=written.append)
    figures = {"norm": 2.5, "staleness": 3}
    bare(AsyncEngine, monitor=monitor, global_samples=48, async_worker=SimpleNamespace(last=figures))._log()
    assert written == ([[("Async/norm", 2.5, 48), ("Async/staleness", 3, 48)]] if enabled else [])


@pytest.mark.parametrize("for_all", [False, True])
@pytest.mark.parametrize("worker", [0, 2])
def test_a_worker_ends_its_part_or_the_run_of_all(worker: int, for_all: bool) -> None:
    did = list[Any]()
    client = SimpleNamespace(leave=noting(did, "leaves"))
    side = SimpleNamespace(joined=True, finished=False, client=client, await_end=noting(did, "waits"))
    engine = bare(AsyncEngine, async_worker=side, worker=worker, _has_left=False)
    for name in ("_check_loop", "pull", "_keep_server_state"):
        vars(engine)[name] = noting(did, name)
    engine.end(for_all)
    keeps = ["_keep_server_state"] * (worker == 0)
    assert did == ["_check_loop", "pull" if for_all else "waits", *keeps, ("leaves", ("finished", for_all))]
    assert side.finished and engine._has_left
    engine.end(for_all)
    assert did[-1] == "_check_loop", "it has ended"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_servers_state_at_the_end_is_written_by_one_rank_and_a_failure_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    def fail_to_save(path: str) -> None:
        did.append(path)
        raise ExchangeError("the peer closed the connection")

    did, path = list[Any](), tmp_path / "of a script" / "state"
    monkeypatch.setattr(module.atexit, "register", noting(did, "registers"))
    client = SimpleNamespace(save_state=fail_to_save)
    engine = bare(
        AsyncEngine, async_worker=SimpleNamespace(client=client), context=SimpleNamespace(rank=rank), _state_at_end=path
    )
    for _ in range(2):
        did.clear()
        with caplog.at_level(logging.WARNING, logger=module.__name__):
            engine._keep_server_state()
        if rank == 0:
            assert did[0] == ("registers", path.unlink, ("missing_ok", True)) and not path.exists()
            path.write_text("of a process that was killed")
    assert did[-1] == str(path) and len(did) == 2 - rank and path.parent.exists() == (rank == 0)
    assert "save_checkpoint() will fail after this: the peer closed the connection" in caplog.text


@pytest.mark.parametrize("tag", [None, "best"])
@pytest.mark.parametrize("compressor", [None, {"unsent": 5}])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("worker", "rank"), [(0, 0), (0, 1), (2, 0)])
def test_each_worker_saves_its_engine_and_worker_0_the_servers_state_beside_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    worker: int,
    rank: int,
    joined: bool,
    compressor: dict[str, int] | None,
    tag: str | None,
) -> None:
    did, named, own = list[Any](), tag or "global_step7", "worker-2" if worker else "."
    monkeypatch.chdir(tmp_path)

    def save(engine: Any, directory: str, *given: object, **others: object) -> str:
        did.append((directory, *given, others))
        (tmp_path / own / named).mkdir(parents=True)
        return "saved"

    monkeypatch.setattr(DeepSpeedEngine, "save_checkpoint", save)
    side = SimpleNamespace(joined=joined, settle=noting(did, "settles"), compressor_state=lambda: compressor)
    engine = bare(AsyncEngine, async_worker=side, worker=worker, context=SimpleNamespace(rank=rank), global_steps=7)
    engine._followed = SimpleNamespace(state_dict=lambda: {"begins_at": 4})
    for name in ("_check_loop", "_save_server_state"):
        vars(engine)[name] = noting(did, name)
    assert engine.save_checkpoint(".", tag, {"epoch": 3}, exclude_frozen_parameters=True) == "saved"
    state = {"epoch": 3, "async_begins": {"begins_at": 4}}
    saves = (own, named, state, {"exclude_frozen_parameters": True})
    beside = [("_save_server_state", tmp_path / named / "async_server.pt")] * (worker == 0 and joined)
    assert did == ["_check_loop", "settles", saves, *beside]
    files = [each.name for each in (tmp_path / own / named).iterdir()]
    assert files == ["async_compressor.pt"] * (rank == 0 and compressor is not None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("missing", [False, True])
def test_the_servers_state_of_the_end_is_copied_by_one_rank(tmp_path: Path, rank: int, missing: bool) -> None:
    engine = bare(AsyncEngine, _has_left=True, context=SimpleNamespace(rank=rank), _state_at_end=tmp_path / "state")
    (tmp_path / "state").write_text("the server's state")
    file = tmp_path / ("none/copy" if missing else "copy")
    with pytest.raises(RefusedError, match=f"cannot be written to {file}: ") if missing and not rank else nullcontext():
        engine._save_server_state(file)
    assert file.exists() == (rank == 0 and not missing)


BEGINS, BEGAN = {"begins_at": 4}, {"begins_at": 9}
STATE = Path("state")


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine that has not joined, with what it does in ``did``; ``loaded`` is what DeepSpeed finds, and ``state``
    what the server's is."""
    did = list[Any]()
    side = SimpleNamespace(joined=False, finished=False)
    engine = bare(
        AsyncEngine,
        did=did,
        async_worker=side,
        worker=0,
        loaded=("run/tag/model.pt", {"epoch": 3, "async_begins": BEGINS}),
    )
    engine.state = STATE

    def load(engine: Any, *given: object) -> Any:
        did.append(("loads", *given))
        return engine.loaded

    followed = {name: noting(did, name) for name in ("begin", "load_state_dict")}
    engine._followed = SimpleNamespace(state_dict=lambda: BEGAN, **followed)
    for name in ("_join", "_check_without_optimizer", "_restore_compressor"):
        vars(engine)[name] = noting(did, name)
    monkeypatch.setattr(DeepSpeedEngine, "load_checkpoint", load)
    monkeypatch.setattr(module, "own_checkpoint", lambda directory, tag, worker: f"{directory}-{worker}")
    monkeypatch.setattr(module, "check_files", lambda engine, *given: did.append(("checks", *given)))
    monkeypatch.setattr(module, "refresh_masters", lambda engine: did.append("refreshes"))
    monkeypatch.setattr(module, "server_state_beside", lambda *given: engine.state if given[0] else None)
    return engine


def test_a_checkpoint_is_loaded_before_the_first_batch_or_after_the_end(
    loading: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    loading.async_worker.joined = True
    with pytest.raises(SystemExit):
        loading.load_checkpoint("run")
    assert "load_checkpoint must come before the first batch" in capsys.readouterr().err and not loading.did
    loading.async_worker.finished = True
    assert loading.load_checkpoint("run", "tag") == ("run/tag/model.pt", {"epoch": 3})
    assert loading.did == [("checks", "run-0", "tag", True), ("loads", "run-0", "tag", *[True] * 3, False, None)]


@pytest.mark.parametrize(
    ("optimizer", "schedule", "begins"),
    [(True, True, BEGINS), (True, True, None), (True, False, BEGINS), (False, True, BEGINS)],
)
def test_a_worker_goes_on_with_the_servers_state_from_where_the_run_began(
    loading: Any, optimizer: bool, schedule: bool, begins: object
) -> None:
    loading.worker, loading.loaded = 2, ("run/tag/model.pt", {"async_begins": begins} if begins else None)
    options = {"load_optimizer_states": optimizer, "load_lr_scheduler_states": schedule}
    assert loading.load_checkpoint("run", **options, custom_load_fn="own") == loading.loaded
    assert loading.did == [
        ("checks", "run-2", None, optimizer),
        ("loads", "run-2", None, True, optimizer, schedule, False, "own"),
        *([] if optimizer else ["refreshes", "_check_without_optimizer"]),
        ("load_state_dict", BEGINS if begins and schedule else BEGAN),
        ("_join", STATE),
        ("_restore_compressor", "run/tag/model.pt"),
    ]


@pytest.mark.parametrize("worker", [0, 2])
@pytest.mark.parametrize("case", ["module alone", "nothing there", "no state of a server"])
def test_a_new_run_begins_without_a_state_of_the_server(
    loading: Any, caplog: pytest.LogCaptureFixture, case: str, worker: int
) -> None:
    loading.worker = worker
    if case == "nothing there":
        loading.loaded = None, None
    elif case == "no state of a server":
        loading.state = None
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert loading.load_checkpoint("run", load_module_only=case == "module alone") is loading.loaded
    assert loading.did[0] == ("checks", f"run-{worker}", None, case != "module alone")
    assert loading.did[2:] == ["begin", ("_join", None)]
    assert ("no server state in run" in caplog.text) == (worker == 0 and case != "module alone")


@pytest.mark.parametrize(
    ("path", "restores"), [("checkpoint/tag/model.pt", True), ("checkpoint/model.pt", False), (None, False)]
)
def test_what_compressed_updates_left_is_that_of_the_checkpoint(
    tmp_path: Path, path: str | None, restores: bool
) -> None:
    did, folder = list[Any](), tmp_path / "checkpoint" / "tag"
    folder.mkdir(parents=True)
    torch.save({"unsent": 5}, folder / "async_compressor.pt")
    engine = bare(AsyncEngine, async_worker=SimpleNamespace(restore_compressor=did.append))
    engine._restore_compressor(path and str(tmp_path / path))
    assert did == [{"unsent": 5}] * restores


def test_what_a_pull_brings_is_no_change_of_the_scripts() -> None:
    did = list[Any]()
    engine = bare(AsyncEngine, _loop_watch=SimpleNamespace(begin_again=noting(did, "begins again")))
    vars(engine)["_check_loop"] = noting(did, "checks")
    vars(engine)["join_run"] = noting(did, "joins", SimpleNamespace(catch_up=noting(did, "pulls")))
    engine.pull()
    assert did == ["checks", "begins again", "joins", "pulls"]


@pytest.mark.parametrize("state", [None, STATE])
def test_a_worker_joins_with_the_state_of_a_checkpoint_or_what_its_optimizer_brings(state: Path | None) -> None:
    did = list[Any]()
    loop = SimpleNamespace(join=lambda spec, brought, run_dir: did.append((spec, brought(), run_dir)))
    engine = bare(AsyncEngine, spec="spec", loop=loop, _state_at_end=Path("run/state"), _loop_watch=SimpleNamespace())
    engine._loop_watch.join = noting(did, "begins")
    for name, answer in (("_state_brought", "brought"), ("_set_learning_rates", None)):
        vars(engine)[name] = noting(did, name, answer)
    engine._join(state)
    brings = ["_state_brought"] * (state is None)
    assert did == ["begins", *brings, ("spec", state or "brought", Path("run")), "_set_learning_rates"]


# Local SGD


@pytest.mark.parametrize(("steps", "finished", "lacks"), [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1)])
def test_a_local_step_ends_where_deepspeed_has_stepped_within_the_run(
    monkeypatch: pytest.MonkeyPatch, steps: int, finished: int, lacks: int
) -> None:
    did = list[Any]()
    monkeypatch.setattr(AsyncEngine, "step", lambda engine: setattr(engine, "global_steps", 5 + steps))
    worker, loop = SimpleNamespace(finished=bool(finished)), SimpleNamespace(begin_step=noting(did, "begins"))
    engine = bare(LocalEngine, global_steps=5, async_worker=worker, loop=loop, _lacks_gradient=bool(lacks))
    vars(engine)["_end_step"] = noting(did, "ends")
    engine.step()
    assert did == ["ends"] * (steps and not finished and not lacks) + ["begins"] * steps


@pytest.mark.parametrize("what", ["past the end", "no gradient", "not finite", "steps"])
def test_the_optimizer_of_a_worker_steps_with_a_finite_gradient_within_the_run(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    did = list[Any]()
    monkeypatch.setattr(local_sgd.tensors, "has_no_gradient", lambda engine: what == "no gradient")
    monkeypatch.setattr(local_sgd.tensors, "has_nonfinite_step", lambda engine: what in ("not finite", "no gradient"))
    monkeypatch.setattr(local_sgd, "lower_loss_scale", lambda engine: did.append("lowers"))
    monkeypatch.setattr(DeepSpeedEngine, "_take_model_step", lambda engine, given: did.append(("steps", given)))
    engine = bare(LocalEngine, lr_scheduler="schedule", _takes_step=False)
    vars(engine)["_is_past_the_end"] = lambda: what == "past the end"
    for name in ("_check_trained", "_check_followed", "_skip_step", "_skip_without_gradient"):
        vars(engine)[name] = noting(did, name)
    engine._take_model_step({"given": 1})
    expected: dict[str, list[Any]] = {
        "past the end": ["_skip_step"],
        "no gradient": ["_skip_without_gradient"],
        "not finite": ["lowers", "_skip_step"],
        "steps": [("steps", {"given": 1})],
    }
    assert did == ["_check_trained", "_check_followed", *expected[what]]
    assert engine._lacks_gradient == (what == "no gradient") and engine.lr_scheduler == "schedule"


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("applied", [False, True])
def test_a_local_step_counts_where_it_was_taken_and_the_log_is_of_exchanges(
    monkeypatch: pytest.MonkeyPatch, applied: bool, exchanged: bool
) -> None:
    did = list[Any]()
    monkeypatch.setattr(local_sgd, "may_overflow", lambda engine: False)
    loop = SimpleNamespace(slowed_down=lambda: 1.5, count_left_out=noting(did, "counts"))
    worker = SimpleNamespace(step=noting(did, "step", exchanged))
    engine = bare(LocalEngine, loop=loop, async_worker=worker, _loss="loss")
    vars(engine)["was_step_applied"] = lambda: applied
    for name in ("_log", "_set_learning_rates"):
        vars(engine)[name] = noting(did, name)
    engine._end_step()
    steps = [("step", 1.5, "loss"), *["_log"] * exchanged] if applied else []
    assert did == [("counts", not applied), *steps, "_set_learning_rates"]


@pytest.mark.parametrize(
    ("worker", "finished", "changed", "refused"),
    [(0, False, True, True), (2, False, True, False), (0, True, True, False), (0, False, False, False)],
)
def test_parameters_that_a_script_has_loaded_are_not_saved_as_the_servers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    worker: int,
    finished: bool,
    changed: bool,
    refused: bool,
) -> None:
    monkeypatch.setattr(AsyncEngine, "save_16bit_model", lambda engine, *given, **named: (given, named))
    own = SimpleNamespace(changed=lambda: changed)
    engine = bare(LocalEngine, worker=worker, async_worker=SimpleNamespace(finished=finished), _own=own)
    if not refused:
        assert engine.save_16bit_model("directory", name="file") == (("directory",), {"name": "file"})
        return
    with pytest.raises(SystemExit):
        engine.save_16bit_model("directory")
    assert "the script has loaded others into the model" in capsys.readouterr().err


@pytest.mark.parametrize("finished", [False, True])
def test_a_gradient_of_what_is_in_no_exchange_is_looked_for_within_the_run(
    monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    did = list[Any]()
    monkeypatch.setattr(DeepSpeedEngine, "_backward_epilogue", lambda engine: did.append("ends the pass"))
    monkeypatch.setattr(local_sgd.tensors, "check_unstepped", did.append)
    bare(LocalEngine, async_worker=SimpleNamespace(finished=finished), _unstepped="others")._backward_epilogue()
    assert did == ["ends the pass", *["others"] * (not finished)]


@pytest.mark.parametrize(
    ("workers", "total_steps", "schedule", "world", "watches"),
    [
        (2, 40, None, None, True),
        (1, 40, None, None, False),
        (2, 0, None, None, False),
        (2, 40, "schedule", None, False),
        (2, 40, None, "a Trainer's", False),
    ],
)
def test_rates_of_a_workers_own_steps_are_looked_for_where_the_run_has_several_workers_and_an_end(
    monkeypatch: pytest.MonkeyPatch, workers: int, total_steps: int, schedule: Any, world: Any, watches: bool
) -> None:
    did = list[Any]()
    for name in ("round_masters", "replica_of", "check_matrices", "unstepped"):
        monkeypatch.setattr(local_sgd.tensors, name, noting(did, name))
    monkeypatch.setattr(local_sgd, "check_overflow_always", noting(did, "check_overflow_always"))
    monkeypatch.setattr(AsyncEngine, "set_up", lambda engine, *given: did.append(given))
    monkeypatch.setattr(local_sgd, "entered_world", lambda: world)
    monkeypatch.setattr(local_sgd, "FollowedSchedule", lambda *given: given)
    monkeypatch.setattr(local_sgd, "OwnRates", lambda optimizer, remedy: (optimizer, remedy))
    weight = Parameter(torch.ones(2))
    engine: Any = bare(
        LocalEngine, workers=workers, lr_scheduler=schedule, optimizer="wrapper", _trained=[("w", weight)]
    )
    engine.basic_optimizer = "torch's"
    spec, context = SimpleNamespace(total_steps=total_steps), SimpleNamespace(rank=1)
    engine.set_up("worker", spec, context, Path("run"))
    assert engine._own_rates == (("torch's", local_sgd._REMEDY) if watches else None)
    assert engine._followed == (schedule, "wrapper", total_steps)
    engine._own.note()
    with torch.no_grad():
        weight.fill_(2.0)
    assert engine._own.changed()
    names = ["replica_of", "round_masters", "check_matrices", "unstepped", "check_overflow_always"]
    assert [each[0] for each in did if each[0] in names] == names and ("replica_of", engine, 1) in did


def test_an_engine_that_is_set_up_is_in_no_step_and_sees_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    given = list[Any]()
    monkeypatch.setattr(module, "refuse_other_steps", lambda *each: given.extend(each))
    optimizer = SGD((model := nn.Linear(2, 1)).parameters(), lr=0.5)
    engine = bare(
        AsyncEngine, optimizer=optimizer, lr_scheduler=None, zero_optimization_partition_weights=lambda: False
    )
    vars(engine)["module"] = model
    worker, context = SimpleNamespace(finished=False, joined=True), WorkerContext(worker=2, workers=3)
    engine.set_up(worker, "spec", context, Path("run"))
    assert (engine.async_worker, engine.spec, engine.context) == (worker, "spec", context)
    assert (engine.worker, engine.workers, engine.loop.worker) == (2, 3, worker)
    monkeypatch.chdir("/")
    assert engine._state_at_end.parent == tmp_path / "run", "wherever the script goes"
    assert [name for name, _ in engine._trained] == ["weight", "bias"] and engine._without_gradient == range(0)
    assert (engine._has_left, engine._loss, engine._warned_of_end, engine._takes_step) == (False, None, False, False)
    assert not engine._loop_watch.has_stepped and engine._followed.rates == [0.5]
    of, workers, is_expected = given
    assert (of, workers, is_expected(engine)) == (engine, 3, False)
    for owner, name in ((engine, "_takes_step"), (worker, "finished")):
        setattr(owner, name, True)
        assert is_expected(engine)
        setattr(owner, name, False)
