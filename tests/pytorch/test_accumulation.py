"""Steps of a ``Trainer`` with as many micro-batches as the server says, without a training."""

import copy
import pickle
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from fairseq_async.errors import ConfigurationError


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # transformers would import it; it may not fit this torch
    return import_module("fairseq_async.pytorch.trainer.accumulation")


def test_the_loops_position_is_one_within_the_step(module: Any) -> None:
    """The loop first asks at the end of a step's first micro-batch, whatever its position in the epoch."""
    steps = module.AccumulationSteps(4)
    assert [position % steps for position in (3, 4, 5)] == [3, 0, 1], "no share is known yet"
    for first, number in ((6, 3), (9, 1), (1, 2)):
        steps.begin_step(number)
        assert [(first + more) % steps for more in range(1, number + 1)] == [*range(1, number), 0]
    assert steps == 4 and 8 // steps == 2
    for copied in (copy.deepcopy(steps), pickle.loads(pickle.dumps(steps))):
        assert type(copied) is int and copied == 4


def trainer_of(module: Any, kind: type | None = None, **args: Any) -> Any:
    """A ``Trainer`` that was not set up; its epochs note what they are given."""
    trainer = (kind or module.Trainer).__new__(kind or module.Trainer)
    given = {"gradient_accumulation_steps": 4, "ignore_data_skip": False} | args
    trainer.args, trainer.compute_loss_func, trainer.epochs = SimpleNamespace(**given), None, []
    trainer._run_epoch = lambda **given: trainer.epochs.append(given)
    return trainer


def worker_of(**attributes: Any) -> Any:
    return SimpleNamespace(micro_batches=6, client=SimpleNamespace(workers=2), **attributes)


def drawing(batches: Any, number: int, device: object) -> tuple[list[int], object]:
    return [batch for batch, _ in zip(batches, range(number), strict=False)], device


def test_a_step_at_the_end_of_an_epoch_is_of_what_is_left(module: Any) -> None:
    trainer, worker = trainer_of(module), worker_of(drawn=None)
    accumulation, batches = module.Accumulation(trainer, worker), iter(range(100))
    trainer._run_epoch(train_dataloader=(), steps_in_epoch=10, resume_from_checkpoint=None, epoch=0, epochs_trained=0)
    for drawn in (6, 4, 6, 6):  # in its next epoch the loop asks on, if it has not begun it anew
        worker.micro_batches = 6
        assert len(accumulation.draw(drawing, batches, "cpu")[0]) == worker.micro_batches == drawn
        positions = [number % trainer.args.gradient_accumulation_steps for number in range(3, 3 + drawn)]
        assert positions == [*range(1, drawn), 0]
    worker.micro_batches = 6
    assert accumulation.draw(drawing, iter(()), "cpu") == ([], "cpu") and worker.micro_batches == 6
    (epoch,) = trainer.epochs
    assert epoch["num_update_steps_per_epoch"] == 10, "more than there are"
    own = vars(trainer)["_run_epoch"]
    accumulation.end()
    assert type(trainer.args.gradient_accumulation_steps) is int and "_run_epoch" not in vars(trainer) and own


@pytest.mark.parametrize(
    ("skips", "resumed", "expected", "left"),
    [
        (False, "checkpoint-3", [(2, 2, 5), (3, 2, 0)], [5, 10]),  # it has had two epochs and a half
        (True, "checkpoint-3", [(1, 1, 0), (2, 1, 0)], [10, 10]),
        (False, None, [(1, 1, 0), (2, 1, 0)], [10, 10]),
    ],
)
def test_a_run_that_goes_on_begins_where_the_worker_was_in_its_data(
    module: Any, skips: bool, resumed: str | None, expected: list[tuple[int, int, int]], left: list[int]
) -> None:
    """The Trainer itself believes that it is at the beginning of its second epoch."""
    trainer, worker = trainer_of(module, ignore_data_skip=skips), worker_of(drawn=25)
    accumulation, found, were_left = module.Accumulation(trainer, worker), [], []
    for epoch in (1, 2):
        own = {"epoch": epoch, "epochs_trained": 1, "steps_trained_in_current_epoch": 0}
        trainer._run_epoch(train_dataloader=(), steps_in_epoch=10, resume_from_checkpoint=resumed, **own)
        given = trainer.epochs[-1]
        found.append((given["epoch"], given["epochs_trained"], given["steps_trained_in_current_epoch"]))
        were_left.append(accumulation._left)
    assert found == expected and were_left == left


def test_a_script_that_counts_is_found_in_any_class_of_its_own(module: Any) -> None:
    class Counting(module.Trainer):  # type: ignore[misc,name-defined]
        def compute_loss(self) -> float:
            return 1.0 / float(self.args.gradient_accumulation_steps)

    class Further(Counting):
        def log(self) -> None: ...

    def own_loss(trainer: Any) -> float:
        return 1.0 / float(trainer.args.gradient_accumulation_steps)

    plain = trainer_of(module)
    assert module.follows_shares(plain)
    module.check_counting(plain)
    plain.compute_loss_func = own_loss
    for trainer, name in (
        (trainer_of(module, Counting), "Counting.compute_loss"),
        (trainer_of(module, Further), "Counting.compute_loss"),
        (plain, "compute_loss_func"),
    ):
        assert not module.follows_shares(trainer)
        with pytest.raises(ConfigurationError, match=f"^{name} reads args.gradient_accumulation_steps"):
            module.check_counting(trainer)


def test_data_and_sampler_are_told_the_pass_whose_batches_are_dealt(module: Any) -> None:
    class Told(list[int]):
        passes: tuple[int, ...] = ()

        def set_epoch(self, number: int) -> None:
            self.passes += (number,)

    data, order = Told(range(6)), Told(range(6))
    shard = BatchSamplerShard(BatchSampler(order, 1, drop_last=False), num_processes=2, process_index=0)
    loader = SimpleNamespace(dataset=data, collate_fn=list, batch_sampler=shard)
    batches = import_module("fairseq_async.pytorch.trainer.dealt")._Batches(loader, workers=2, micro_batches=2)
    assert [batches[0, number][1] for number in (0, 3, 4, 5)] == [[0], None, [0], [2]]
    assert data.passes == order.passes == (0, 1)


@pytest.mark.parametrize(
    ("resumed", "epochs_trained", "trained"), [("checkpoint-3", 1, 3), (None, 1, -1), ("checkpoint-3", 0, -1)]
)
def test_an_epoch_of_dealt_batches_is_the_pass_that_the_server_deals(
    module: Any, monkeypatch: pytest.MonkeyPatch, resumed: str | None, epochs_trained: int, trained: int
) -> None:
    """Only the first one of a run that goes on is one that the Trainer has begun before. Nothing ends it but its last
    gradient, and batches that stand in for empty ones are known as such."""
    dealt = SimpleNamespace(begin_pass=lambda: 3, draw=lambda: ([7, 8], True))
    made = list[tuple[Any, ...]]()
    monkeypatch.setattr(module, "can_be_dealt", lambda loader, workers: (loader, workers) == ("loader", 2))
    monkeypatch.setattr(module, "DealtBatches", lambda *given: (made.append(given), dealt)[1])
    trainer, worker = trainer_of(module), worker_of(drawn=25)
    accumulation = module.Accumulation(trainer, worker)
    for _ in range(2):
        trainer._run_epoch(
            train_dataloader="loader",
            steps_in_epoch=10,
            resume_from_checkpoint=resumed,
            epoch=1,
            epochs_trained=epochs_trained,
            steps_trained_in_current_epoch=5,
        )
    given = trainer.epochs[-1]
    assert (given["epoch"], given["epochs_trained"], given["steps_trained_in_current_epoch"]) == (3, trained, 0)
    assert given["steps_in_epoch"] == given["num_update_steps_per_epoch"] == sys.maxsize
    assert made == [("loader", worker, 4)] and not accumulation.stands_in
    assert accumulation.draw(drawing, iter(()), "cpu") == ([7, 8], "cpu") and accumulation.stands_in
    assert [position % trainer.args.gradient_accumulation_steps for position in (6, 7)] == [1, 0]


@pytest.mark.parametrize(
    ("given", "tokens", "divided"),
    [
        ({"loss_is_scaled_for_ga": True}, 7, False),
        ({"loss_is_scaled_for_ga": False}, 7, True),
        ({"model_accepts_loss_kwargs": True}, 7, False),
        ({"model_accepts_loss_kwargs": True}, None, True),
        ({"model_accepts_loss_kwargs": False}, 7, True),
        ({"model_accepts_loss_kwargs": False, "compute_loss_func": abs}, None, False),
    ],
)
def test_a_trainer_divides_losses_by_the_number_of_micro_batches_unless_they_are_parts_of_a_mean(
    module: Any, given: dict[str, Any], tokens: int | None, divided: bool
) -> None:
    trainer = SimpleNamespace(**{"compute_loss_func": None} | given)
    assert module.is_divided_by_micro_batches(trainer, tokens) is divided
