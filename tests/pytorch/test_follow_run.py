"""A ``Trainer`` that follows the run: its plan, what is due, its loss and its tokens, without a ``Trainer``."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_async.worker.hybrid import HybridWorker


def flow_of(following: Any, worker: object, did: list[str], **given: Any) -> Any:
    """What follows the run in place of a ``Trainer``'s own flow; the trainer notes what it is asked for."""
    args = SimpleNamespace(max_steps=-1, average_tokens_across_devices=True, gradient_accumulation_steps=2)
    args.logging_strategy = args.eval_strategy = args.save_strategy = "no"
    args.logging_first_step, args.eval_delay = False, 0
    state = following.TrainerState(max_steps=18, logging_steps=100, eval_steps=8, save_steps=100)
    trainer: Any = SimpleNamespace(state=state, control=following.TrainerControl())
    trainer.args = SimpleNamespace(**vars(args) | given)
    own = SimpleNamespace(on_step_end=lambda *given, **others: None)  # a callback of the script
    trainer.callback_handler = SimpleNamespace(callbacks=[following.DefaultFlowCallback(), own])
    trainer.compute_loss = lambda num_items_in_batch: num_items_in_batch
    trainer._maybe_log_save_evaluate = lambda: did.append("logs")
    trainer.get_batch_samples = lambda batches, number, device: ([next(batches)] * number, device)
    prepare, restore = (lambda _: did.append("prepares")), (lambda: did.append("restores"))
    flow = following.FollowRun(trainer, lambda: worker, prepare, restore)
    assert trainer.callback_handler.callbacks == [flow, own]
    return flow


@pytest.mark.parametrize(
    ("loader", "is_part", "max_steps", "total", "planned", "epochs"),
    [
        ([0], False, -1, 0, (4, 100, 120, 16, 9, 12), 3),
        ([0], False, 0, 14, (4, 100, 140, 16, 9, 14), 4),
        ([0], True, -1, 0, (4, 100, 240, 16, 9, 12), 3),
        ([0], False, 12, 6, (4, 100, 120, 16, 9, 6), 2),
        (iter([0]), False, -1, 14, (4, 100, 140, 16, 9, 14), 7),
    ],
)
def test_the_plan_of_a_trainer_is_that_of_the_run(
    following: Any, loader: Any, is_part: bool, max_steps: int, total: int, planned: tuple[int, ...], epochs: int
) -> None:
    """Of seven epochs by its own count, four steps in an epoch, nine batches, 120 samples in all."""
    flow = flow_of(following, None, [], max_steps=max_steps)
    assert flow.plan((7, 4, 100, 120, 8, 9, 12), loader, total, 2, is_part) == (sys.maxsize, *planned)
    flow.on_train_begin(None, state := following.TrainerState(), None)
    assert state.num_train_epochs == epochs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"logging_strategy": "epoch", "save_strategy": "epoch"}, ["", "log save", "", "", "log save"]),
        ({"logging_strategy": "steps", "logging_first_step": True}, ["log", "", "", "", ""]),
        ({"save_strategy": "steps"}, ["", "", "", "", "save"]),
        ({"eval_strategy": "steps"}, ["", "evaluate", "", "evaluate", "evaluate"]),
        ({"eval_strategy": "steps", "eval_delay": 17}, ["", "", "", "evaluate", "evaluate"]),
        ({"eval_strategy": "steps", "eval_delay": 18}, ["", "", "", "", "evaluate"]),
        ({"eval_strategy": "epoch", "eval_delay": 1.2}, ["", "evaluate", "", "", "evaluate"]),
        ({"eval_strategy": "epoch", "eval_delay": 1.3}, ["", "", "", "", "evaluate"]),
    ],
)
def test_what_is_due_in_a_run_with_ten_steps_in_an_epoch(
    following: Any, given: dict[str, Any], expected: list[str]
) -> None:
    """It evaluates every eight steps, and ends amid its second epoch."""
    worker: Any = SimpleNamespace(finished=False)
    flow = flow_of(following, worker, [], **given)
    flow.plan((2, 10, 100, 120, 8, 20, 18), [0], 18, 1, False)
    args, state, seen = flow._trainer.args, flow._trainer.state, []
    for worker.run_progress in (3.0, 12.0, 15.0, 17.0, 18.0):
        worker.finished = worker.run_progress == 18.0
        control = following.TrainerControl()
        state.global_step += 1
        flow.on_step_end(args, state, control)
        due = {"log": control.should_log, "evaluate": control.should_evaluate, "save": control.should_save}
        seen.append(" ".join(name for name, is_due in due.items() if is_due))
        assert control.should_training_stop == worker.finished
    assert seen == expected and (state.global_step, state.epoch) == (18, 1 + 8 * 2 / 20)


def test_a_trainers_loss_in_the_log_is_the_mean_of_its_own_steps(following: Any) -> None:
    """The ``Trainer`` divides their sum by the run's steps, which were five, none, and four."""
    did: list[str] = []
    worker: Any = SimpleNamespace(finished=False)
    flow = flow_of(following, worker, did, logging_strategy="steps")
    trainer = flow._trainer
    trainer._globalstep_last_logged, trainer._tr_loss = 0, torch.tensor(6.0)
    for worker.run_progress, loss in ((2.0, None), (5.0, 6.0 * 5 / 2), (5.0, 6.0), (6.0, None), (9.0, 6.0 * 4 / 3)):
        trainer.state.global_step += 1
        flow.on_step_end(trainer.args, trainer.state, trainer.control)
        trainer.control.should_log = loss is not None
        trainer._maybe_log_save_evaluate()
        assert did == ["prepares", "logs", "restores"]
        did.clear()
        if loss is not None:
            assert trainer._tr_loss == loss
            trainer._globalstep_last_logged, trainer._tr_loss = trainer.state.global_step, torch.tensor(6.0)
    trainer.control.should_training_stop = True
    trainer._maybe_log_save_evaluate()
    assert trainer._tr_loss == 6.0, "no step of its own has come since"
    worker.run_progress, trainer.control.should_log = 13.0, False
    flow.on_step_end(trainer.args, trainer.state, trainer.control)
    trainer._maybe_log_save_evaluate()
    assert trainer._tr_loss == 6.0 * 4, "the last one's is logged where the training stops"


@pytest.mark.parametrize(
    ("sequence", "known", "given", "expected"),
    [
        (5, 0, (0, 0, 0, None), [(2, 2, 6, "out"), (3, 2, 6, "out")]),
        (5, 6, (1, 1, 4, "its checkpoint"), [(2, 2, 6, "its checkpoint"), (3, 2, 6, "its checkpoint")]),
        (5, 11, (2, 2, 6, "its checkpoint"), [(2, 2, 6, "its checkpoint"), (3, 2, 6, "its checkpoint")]),
        (0, 0, (0, 0, 0, None), [(0, 0, 0, None), (1, 0, 0, None)]),
    ],
    ids=["started again", "with its old checkpoint", "from a checkpoint", "late"],
)
def test_a_worker_that_was_in_the_run_goes_on_with_the_data_behind_its_steps(
    following: Any,
    capsys: pytest.CaptureFixture[str],
    sequence: int,
    known: int,
    given: tuple[Any, ...],
    expected: list[tuple[Any, ...]],
) -> None:
    """Eleven steps of two batches: two epochs of four steps, and three. Without a checkpoint the Trainer of worker 0
    knows of no evaluation, and a line says so."""
    worker = SimpleNamespace(sequence=sequence, run_progress=11.0, finished=False, client=SimpleNamespace(worker=0))
    flow = flow_of(following, worker, [], output_dir="out", metric_for_best_model="loss")
    names: tuple[str, ...] = ("epoch", "epochs_trained")
    names += ("steps_trained_in_current_epoch", "resume_from_checkpoint")
    seen: list[tuple[Any, ...]] = []
    flow._trainer._run_epoch = lambda loader, **place: seen.append(tuple(place[name] for name in names))
    flow.plan((7, 4, 100, 120, 8, 9, 12), [0], 18, 2, False)
    flow._trainer.state.global_step = known
    flow.begin(18)
    assert flow._trainer.state.global_step == 11
    for epoch in range(2):
        flow._trainer._run_epoch(loader=None, **dict(zip(names, given, strict=True)) | {"epoch": given[0] + epoch})
    assert seen == expected
    forgets = "warning: worker 0 goes on at step 11 without a checkpoint of the Trainer" in capsys.readouterr().err
    assert forgets is (sequence > known == 0)


@pytest.mark.parametrize(("known", "total", "begins", "ends"), [(0, 15, 11, 15), (13, 0, 13, 18)])
@pytest.mark.parametrize("shares", [0, 3])
def test_a_trainer_begins_where_the_run_is_or_its_own_checkpoint_and_ends_where_worker_0_says(
    following: Any, monkeypatch: pytest.MonkeyPatch, known: int, total: int, begins: int, ends: int, shares: int
) -> None:
    """What it logs next is of the steps from here on."""
    worker: Any = HybridWorker.__new__(HybridWorker)
    worker.sequence, worker.finished, worker.micro_batches = 0, False, shares
    worker._partial_steps, worker._steps = True, 11.5
    divided = list[object]()
    monkeypatch.setattr(following, "Accumulation", lambda *given: divided.append(given))
    flow = flow_of(following, worker, [])
    trainer = flow._trainer
    trainer.state.global_step = known
    flow.begin(total)
    assert (trainer.state.global_step, trainer.state.max_steps) == (begins, ends)
    assert trainer._initial_global_step == trainer._globalstep_last_logged == begins
    assert divided == [(trainer, worker)] * (shares > 0)


def test_a_run_that_its_server_takes_back_takes_no_trainer_back(following: Any) -> None:
    """It would evaluate and save once more what it has."""
    worker: Any = SimpleNamespace(finished=False)
    flow, seen = flow_of(following, worker, [], save_strategy="steps"), list[tuple[int, bool]]()
    state = flow._trainer.state
    state.save_steps = 4
    for worker.run_progress in (6.0, 3.0, 4.5, 8.0):
        control = following.TrainerControl()
        state.global_step += 1
        flow.on_step_end(flow._trainer.args, state, control)
        seen.append((state.global_step, control.should_save))
    assert seen == [(6, True), (6, False), (6, False), (8, True)]


def test_a_callback_is_told_every_step_that_the_run_has_taken(following: Any) -> None:
    """The last of them, or the present one once more, by the Trainer itself."""
    worker: Any = SimpleNamespace(finished=False)
    flow, seen = flow_of(following, worker, []), list[tuple[int, str]]()
    trainer, other = flow._trainer, following.TrainerControl(should_evaluate=True)
    own = trainer.callback_handler.callbacks[1]

    def on_step_end(args: Any, state: Any, control: Any, *, model: str) -> Any:
        seen.append((state.global_step, model))
        return other if state.global_step == 4 else None

    own.on_step_end = on_step_end
    for worker.run_progress in (1.0, 3.0, 3.0, 6.0):
        trainer.state.global_step += 1
        control = flow.on_step_end(trainer.args, trainer.state, trainer.control, model="model")
        own.on_step_end(trainer.args, trainer.state, control, model="by the Trainer")
        assert control is (other if worker.run_progress == 6.0 else trainer.control)
    told, last = "model", "by the Trainer"
    assert seen == [(1, last), (2, told), (3, last), (3, last), (4, told), (5, told), (6, last)]


def test_an_epoch_of_dealt_batches_ends_where_the_next_gradient_is_of_another_pass(following: Any) -> None:
    """Until the training ends, which gives the Trainer its own number of micro-batches back, once."""
    did = list[str]()
    flow = flow_of(following, SimpleNamespace(finished=False, run_progress=1.0), [])
    flow._accumulation = SimpleNamespace(epoch_is_over=False, end=lambda: did.append("ends"))
    for is_over in (False, True):
        flow._accumulation.epoch_is_over, control = is_over, following.TrainerControl()
        flow.on_step_end(flow._trainer.args, flow._trainer.state, control)
        assert control.should_epoch_stop is is_over
    for _ in range(2):
        flow.on_train_end(flow._trainer.args, flow._trainer.state, control)
    assert did == ["ends"]


@pytest.mark.parametrize(
    ("length", "stops", "step", "is_done"),
    [(4, False, 8, False), (4, False, 7, False), (4, True, 8, False), (4, True, 7, True), (0, False, 7, True)],
)
def test_what_is_due_at_the_end_of_an_epoch_is_done_there_only_if_no_step_has_done_it(
    following: Any, length: int, stops: bool, step: int, is_done: bool
) -> None:
    flow = flow_of(following, None, [], logging_strategy="epoch", eval_strategy="epoch", save_strategy="epoch")
    flow._steps_per_epoch = length
    state = following.TrainerState(global_step=step, epoch=2.0)
    control = following.TrainerControl(should_training_stop=stops)
    flow.on_epoch_end(flow._trainer.args, state, control)
    assert (control.should_log, control.should_evaluate, control.should_save) == (is_done,) * 3


def test_a_gradient_weighs_as_many_tokens_as_the_trainer_has_counted(following: Any) -> None:
    worker: Any = HybridWorker.__new__(HybridWorker)
    flow = flow_of(following, worker, [])
    for tokens, weight in ((torch.tensor(7), 7.0), (None, None), (0, 0.0)):
        assert flow._trainer.get_batch_samples(iter("ab"), 3, tokens) == (["a"] * 3, tokens)
        assert worker.weight == weight
    flow._trainer.args.average_tokens_across_devices = False
    flow._trainer.get_batch_samples(iter("a"), 1, 5)
    assert worker.weight == 0.0, "it is left alone"


@pytest.mark.parametrize(
    ("divides", "stands_in", "by_tokens", "averages", "divided", "tokens", "weight"),
    [
        (True, True, True, True, False, 7, 0.0),
        (True, False, True, True, False, 7, 7.0),
        (True, False, True, False, False, 7, None),
        (True, False, True, True, False, None, None),
        (True, False, False, True, True, 7, None),
        (True, False, False, False, False, 7, 1.5),
        (False, False, False, True, False, 7, None),
        (False, False, True, False, False, 7, "left alone"),
    ],
)
def test_a_gradient_weighs_as_in_a_synchronous_trainer(
    following: Any,
    monkeypatch: pytest.MonkeyPatch,
    divides: bool,
    stands_in: bool,
    by_tokens: bool,
    averages: bool,
    divided: bool,
    tokens: int | None,
    weight: object,
) -> None:
    """By its tokens, or by its samples (None), or by the worker's ranks where it is a sum over micro-batches, or not at
    all where its batch only stands in for empty ones."""
    monkeypatch.setattr(following, "is_divided_by_micro_batches", lambda trainer, found: divided and found == tokens)
    monkeypatch.setattr(following, "averages_over_tokens", lambda trainer: by_tokens)
    worker: Any = HybridWorker.__new__(HybridWorker)
    worker.weight, worker.share = "left alone", 1.5  # of the ranks of all workers
    flow = flow_of(following, worker, [], average_tokens_across_devices=averages)
    if divides:
        flow._accumulation = SimpleNamespace(
            stands_in=stands_in, draw=lambda original, batches, device: (["a"], tokens)
        )
    flow._trainer.get_batch_samples(iter("a"), 1, tokens)
    assert worker.weight == weight


@pytest.mark.parametrize(
    ("progress", "finished", "steps"), [(2.9999999, False, 3), (18.0, False, 17), (18.0, True, 18), (25.0, True, 18)]
)
def test_only_a_run_that_is_over_has_had_all_steps_and_thirds_of_steps_add_up(
    following: Any, progress: float, finished: bool, steps: int
) -> None:
    worker: Any = SimpleNamespace(finished=finished, run_progress=progress)
    flow = flow_of(following, worker, [])
    flow.on_step_end(flow._trainer.args, flow._trainer.state, flow._trainer.control)
    assert flow._trainer.state.global_step == steps


def mean_of_tokens(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs / num_items_in_batch


def mean_of_batch(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs


def test_what_never_reads_the_number_of_tokens_gives_no_mean_over_them(following: Any) -> None:
    class PassedOn(following.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class Read(following.Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = 1
        ) -> Any:
            return [each(model) / num_items_in_batch for each in inputs]

    class Unread(following.Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = 1
        ) -> Any:
            return super().compute_loss(model, inputs, return_outputs)

    class Dropped(following.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs)

    class Model(torch.nn.Module):
        def forward(self, inputs: Any, **kwargs: Any) -> Any:
            return inputs / kwargs.get("num_items_in_batch", 1)

    class Plain(torch.nn.Module):
        def forward(self, inputs: Any, **kwargs: Any) -> Any:
            return inputs

    class Positional(torch.nn.Module):
        def forward(self, inputs: Any) -> Any:
            return inputs

    class Adapted(torch.nn.Module):
        """As PEFT has it."""

        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.get_base_model = lambda: base

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.get_base_model()(*args, **kwargs)

    def averages(kind: Any, model: Any, **given: Any) -> bool:
        trainer = kind.__new__(kind)
        trainer.model, trainer.accelerator = model, SimpleNamespace(unwrap_model=lambda model: model)
        trainer.compute_loss_func, trainer.label_smoother = given.get("function"), given.get("smoother")
        return bool(following.averages_over_tokens(trainer))

    usual = following.Trainer
    assert averages(usual, Model()) and averages(usual, Adapted(Model())) and averages(Read, Plain())
    assert averages(PassedOn, Plain()), "nobody can tell from outside"
    assert averages(usual, Plain(), smoother=object()) and averages(usual, Plain(), function=mean_of_tokens)
    assert averages(usual, torch.compile(Model())) and not averages(usual, torch.compile(Plain()))
    assert not averages(usual, Plain()) and not averages(usual, Adapted(Plain()))
    assert not averages(usual, Positional())
    assert not averages(Unread, Model()) and not averages(Dropped, Model())
    assert not averages(usual, Model(), function=mean_of_batch)
