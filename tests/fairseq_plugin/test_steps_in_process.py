"""What a step of fairseq's trainers sends and logs: of a worker of three ranks, in fp16, and without a batch."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.distributed import utils
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch.nn import Parameter

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import local_sgd
from fairseq_async.fairseq_plugin.compat.dealt import DealtEpochs
from fairseq_async.fairseq_plugin.hybrid_optimizer import HybridAsync
from fairseq_async.worker import loop
from tests.helpers.fairseq_trainers import HYBRID, LOCAL, Trainers, saved_updates, step
from tests.helpers.run_files import events
from tests.helpers.stand_ins import Clock

FP16 = f"{HYBRID} --fp16 --fp16-init-scale 8 --fp16-scale-window 2 --clip-norm 1"
BOTH = pytest.mark.parametrize("method", [HYBRID, LOCAL])


def rank_of_three(trainers: Trainers, flags: str, parts: tuple[float, float]) -> Any:
    """Rank 0 of worker 0, which has two more ranks; they have such parts of its batches."""
    trainer = trainers.make(flags, workers=2)
    trainer.session.context = replace(trainer.session.context, island_size=3, sizes=(3, 1))
    trainer._wrapped_model = trainer._model

    def gather(found: list[Any], **_: Any) -> list[Any]:
        outputs, *sums = found
        others = [[{"loss": part * each["loss"]} for each in outputs] for part in parts]
        return [found, *([own, *(part * each for each in sums)] for own, part in zip(others, parts, strict=True))]

    trainers.patch.setattr(utils, "all_gather_list", gather)
    trainer.load_checkpoint("none.pt")
    trainer.batches = trainer.get_train_iterator(1).next_epoch_itr()
    return trainer


@pytest.mark.parametrize("parts", [(1.0, 1.0), (1.0, 0.0), (0.5, 0.0)])
@pytest.mark.parametrize(("method", "counts"), [(HYBRID, "weight"), (f"{LOCAL} --local-steps 1", "tokens")])
def test_what_a_rank_sends_is_of_the_batches_of_all_ranks_of_its_worker(
    trainers: Trainers, method: str, counts: str, parts: tuple[float, float]
) -> None:
    """A batch has one token here, and a pass sixteen batches."""
    trainer, losses = rank_of_three(trainers, f"{method} --batch-size 2", parts), list[float]()
    trainer.model.net.register_forward_hook(lambda net, args, output: losses.append(float(output["loss"])))
    step(trainer, 1, 2)
    (event,) = events(trainers.run_dir)
    batches = 2 * (1 + sum(parts))
    assert (event[counts], event["epochs"]) == (batches, batches / 16)
    assert event["loss"] == pytest.approx(sum(losses) / 2)


def test_the_time_of_a_local_step_is_that_of_its_own_batches(trainers: Trainers) -> None:
    """And none between two steps, in which fairseq reads data, validates and saves."""
    clock = Clock()
    time = SimpleNamespace(perf_counter=clock, sleep=lambda seconds: None)
    for module in (loop, local_sgd):
        trainers.patch.setattr(module, "time", time)
    trainer = trainers.join(f"{LOCAL} --local-steps 2")
    trainer.model.net.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + 2.0))
    for _ in range(2):
        clock.now += 100.0
        step(trainer)
    (event,) = events(trainers.run_dir)
    assert (event["step_seconds"], event["computing_seconds"]) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("worker", "ranks", "within", "fetches"),
    [(0, 3, False, True), (0, 1, False, False), (0, 3, True, False), (1, 3, False, False)],
)
def test_before_a_checkpoint_all_ranks_of_worker_0_fetch_the_servers_state(
    trainers: Trainers, worker: int, ranks: int, within: bool, fetches: bool
) -> None:
    """A rank that is alone does so when it saves; from amid a step the ranks could not do so together."""
    trainer, fetched = [trainers.join(LOCAL, worker=number, workers=2) for number in (0, 1)][worker], list[bool]()
    trainer.session.context = replace(trainer.session.context, island_size=ranks)
    trainer._in_train_step = within
    trainers.patch.setattr(trainer, "fetch_server_state", lambda: fetched.append(True))
    trainer.consolidate_optimizer()
    assert fetched == [True] * fetches


@pytest.mark.parametrize(("worker", "rank", "saves"), [(0, 0, True), (0, 2, False), (1, 0, False), (1, 1, False)])
def test_one_rank_of_all_workers_saves(trainers: Trainers, worker: int, rank: int, saves: bool) -> None:
    trainer = trainers.make(HYBRID, worker=worker, workers=2)
    trainer.session.context = replace(trainer.session.context, rank=rank, island_size=3)
    assert trainer.should_save_checkpoint_on_current_rank is saves


def test_a_loss_scale_rises_after_its_window_falls_at_an_overflow_and_is_there_again_after_a_resume(
    trainers: Trainers, tmp_path: Path
) -> None:
    """A batch that overflows is not sent."""
    trainer, scales = trainers.join(FP16, spoilt=(3,)), list[float]()
    for _ in range(4):
        step(trainer)
        scales.append(trainer.optimizer.scaler.loss_scale)
    assert scales == [8.0, 16.0, 16.0, 8.0] and len(events(trainers.run_dir)) == 3
    trainer.optimizer.scaler.loss_scale = 32.0
    saved_updates(trainer, path := tmp_path / "checkpoint.pt")
    trainers.next_run()
    assert trainers.join(FP16, restore_file=path).optimizer.scaler.loss_scale == 32.0


@pytest.mark.parametrize(("barrier", "weights"), [("", [1.0]), ("--barrier", [1.0, 0.0])])
def test_a_gradient_of_no_batch_is_sent_without_weight_where_others_wait_for_it(
    trainers: Trainers, barrier: str, weights: list[float]
) -> None:
    trainer = trainers.join(f"--optimizer hybrid_async {barrier}")
    step(trainer)
    trainer.train_step([{}])
    assert [event["weight"] for event in events(trainers.run_dir)] == weights


@BOTH
def test_a_worker_that_is_to_be_slower_waits_once_in_each_step(trainers: Trainers, method: str) -> None:
    trainer, waits = trainers.join(method), list[int]()
    trainers.patch.setattr(trainer.loop, "slowed_down", lambda: waits.append(trainer.model.net.batches))
    step(trainer, 3, 2)
    assert waits == [2, 4, 6], "after the last batch of each"


def test_the_log_has_the_staleness_and_the_milliseconds_of_the_exchange(trainers: Trainers) -> None:
    first, second = (trainers.join(HYBRID, worker=number, workers=2) for number in (0, 1))
    step(first, 3)
    logged: dict[str, float] = {}
    trainers.patch.setattr(metrics, "log_scalar", lambda name, value, *_, **__: logged.update({name: value}))
    step(second)
    last = second.worker.last
    expected = {"push_ms": 1000 * last["push_seconds"], "pull_ms": 1000 * last["pull_seconds"], "staleness": 3.0}
    assert expected.items() <= logged.items()


@BOTH
def test_a_parameter_of_the_criterion_that_nobody_exchanges_is_one_line(trainers: Trainers, method: str) -> None:
    trainer = trainers.join(method)
    trainer._criterion.late = Parameter(torch.zeros(2))
    trainer._criterion.late.grad = torch.ones(2)
    with pytest.raises(ConfigurationError, match="late has a gradient and is not exchanged.*make it before training"):
        step(trainer)


@BOTH
@pytest.mark.parametrize(
    ("began", "was_there", "reads"), [(False, False, False), (False, True, True), (True, False, True)]
)
def test_a_worker_reads_a_checkpoint_in_a_run_that_began_with_it_or_that_it_was_in(
    trainers: Trainers, tmp_path: Path, method: str, began: bool, was_there: bool, reads: bool
) -> None:
    """Any other would go on at worker 0's place in the data, and leave out what comes before it in its own part."""
    path, places = tmp_path / "checkpoint.pt", {"worker": 1, "workers": 2}
    first = trainers.join(method, workers=2)
    step(first, 3)
    saved_updates(first, path)
    if began:
        trainers.next_run()
        step(trainers.join(method, workers=2, restore_file=path))
    if was_there:
        second = trainers.join(method, **places)
        step(second, 3)
        second.session.client.leave(finished=False)
    assert (trainers.make(method, **places).load_checkpoint(str(path)) is not None) is reads


@BOTH
@pytest.mark.parametrize("runs", [False, True])
def test_a_file_that_cannot_be_read_ends_a_worker_but_in_a_run_that_is_going_on(
    trainers: Trainers, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, runs: bool
) -> None:
    """Worker 0 may be writing it."""
    trainer = trainers.join(method)
    step(trainer, 3)
    saved_updates(trainer, path := tmp_path / "checkpoint.pt")
    if runs:
        trainer.session.client.leave(finished=False)
    else:
        trainers.next_run()
    path.write_bytes(path.read_bytes()[:1000])
    again = trainers.make(method)
    if runs:
        assert again.load_checkpoint(str(path)) is None and f"{path} is not read" in caplog.text
    else:
        with pytest.raises(ConfigurationError, match="checkpoint.pt is no checkpoint that can be read"):
            again.load_checkpoint(str(path))


def test_a_rank_without_a_batch_is_no_dummy_where_another_rank_of_its_worker_has_one(trainers: Trainers) -> None:
    trainer = trainers.join(HYBRID)
    for size, drawn, loss in ((3.0, 2.0, 1.5), (0.0, 0.0, 0.0)):
        trainer.optimizer.dummy = bool(drawn)
        trainer._take_sums(size, drawn, loss)
        assert (trainer._drawn, trainer.optimizer.dummy) == (drawn, not drawn)
        assert (trainer.optimizer.tokens, trainer.optimizer.losses) == ([size], [loss])


@pytest.mark.parametrize("deals", [False, True])
def test_the_batches_of_all_workers_steps_are_dealt_in_fairseqs_order(trainers: Trainers, deals: bool) -> None:
    """Where fairseq's loop can take them so: 32 in steps of 3 workers with 5 each, the first two passes unshuffled."""
    flags = "--optimizer hybrid_async --shares auto --update-freq 5 --batch-size 1 --curriculum 2"
    trainer = trainers.make(flags, workers=3)
    trainer.session.can_deal = deals
    trainer.load_checkpoint("none.pt")
    epochs = trainer.get_train_iterator(1)
    assert isinstance(epochs, DealtEpochs) is deals
    if deals:
        batches = epochs.next_epoch_itr()
        assert len(epochs) == 3 * 5 and [next(batches)[0]["id"].tolist() for _ in range(3)] == [[0], [3], [6]]


def test_while_the_batches_of_a_step_are_drawn_no_time_ends_the_training(trainers: Trainers) -> None:
    trainer, times = (
        trainers.join("--optimizer hybrid_async --shares auto --update-freq 3 --batch-size 2"),
        list[float](),
    )
    trainers.patch.setattr(Trainer, "cumulative_training_time", lambda _: 7.0)
    for _ in range(6):
        step(trainer)
        times.append(trainer.cumulative_training_time())
    assert times == [0.0, 0.0, 7.0] * 2


def test_a_run_that_its_server_takes_back_takes_no_worker_of_local_sgd_back(trainers: Trainers) -> None:
    """Nor does the mean of all workers, where another has had fewer steps."""
    trainer, seen = trainers.join(LOCAL), list[int]()
    for progress in (6.5, 3.0, 7.0):
        trainers.patch.setattr(type(trainer.worker), "run_progress", progress)
        trainer.set_num_updates(0)
        seen.append(trainer.get_num_updates())
    assert seen == [6, 6, 7]


@pytest.mark.parametrize(
    ("flags", "workers", "is_enough"),
    [("--updates-per-step 1", 4, True), ("--updates-per-step 1", 5, False), ("--barrier", 5, True)],
)
def test_each_worker_needs_a_batch_where_nobody_waits_for_it(
    trainers: Trainers, flags: str, workers: int, is_enough: bool
) -> None:
    """There are four batches. With a barrier a worker without one sends a gradient without weight."""
    trainer = trainers.make(f"--optimizer hybrid_async {flags} --batch-size 8", workers=workers)
    assert trainer.optimizer
    if is_enough:
        trainer.get_train_iterator(1)
    else:
        with pytest.raises(ConfigurationError, match="the training set has 4 batches for 5 workers"):
            trainer.get_train_iterator(1)


@pytest.mark.parametrize(
    ("tokens", "dummy", "ranks", "factor", "weight"),
    [
        ([20.0, 29.0], False, 1, 1 / 49, 49.0),  # whose inverse is no whole number
        ([5.0], False, 2, 2 / 5, 5.0),
        ([0.0, 0.0], False, 1, 1.0, 1e-9),
        ([0.0, 4.0], False, 1, 1 / 4, 4.0),
        ([], False, 1, 1 / 4, 4.0),
        ([4.0], True, 1, 1 / 4, 0.0),
        ([1e-12], False, 1, 1e12, 1e-12),
    ],
)
def test_an_update_weighs_as_many_tokens_as_fairseq_divides_by_and_next_to_nothing_without_one(
    tokens: list[float], dummy: bool, ranks: int, factor: float, weight: float
) -> None:
    """A task that multiplies gradients after fairseq has clipped them changes no weight."""
    optimizer: Any = HybridAsync.__new__(HybridAsync)
    optimizer.tokens, optimizer.dummy, optimizer._ranks, optimizer._norm = tokens, dummy, ranks, None
    optimizer._scales_into_slot, optimizer._factor, optimizer.barrier = False, 0.5, True
    optimizer.worker = SimpleNamespace(write_ahead=lambda _: None)
    optimizer.multiply_grads(factor)
    assert optimizer._weight == weight and optimizer._factor == 0.5 * factor
    optimizer._norm = 1.0
    optimizer.multiply_grads(3.0)
    assert optimizer._weight == weight and optimizer._factor == 1.5 * factor
