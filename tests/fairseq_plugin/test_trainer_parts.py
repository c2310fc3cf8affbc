"""fairseq's trainers as workers: what their parts do before, between and after steps."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.data.iterators import EpochBatchIterator, GroupedEpochBatchIterator, StreamingEpochBatchIterator
from fairseq.examples.truncated_bptt.truncated_bptt_lm_task import TruncatedBPTTLMConfig, TruncatedBPTTLMTask
from fairseq.trainer import Trainer

from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.fairseq_plugin import local_sgd
from fairseq_async.fairseq_plugin.compat.dealt import DEALT
from fairseq_async.fairseq_plugin.compat.updates import AppliedUpdates
from fairseq_async.fairseq_plugin.local_sgd import LocalSGDTrainer
from tests.helpers.contract.net import Net
from tests.helpers.fairseq_trainers import HYBRID, LOCAL, Trainers, saved_updates, step
from tests.helpers.stand_ins import Numbers

SHARES = "--optimizer hybrid_async --shares auto --update-freq 5"
ADASCALE = "--optimizer adascale --update-freq 2 --batch-size 1"
BOTH = pytest.mark.parametrize("method", [HYBRID, LOCAL])


@pytest.mark.parametrize(
    ("previous", "now", "reached"),
    [(9, 10, True), (8, 13, True), (10, 10, False), (10, 19, False), (10, 20, True), (19, 41, True), (0, 9, False)],
)
def test_an_interval_of_ten_ends_where_a_multiple_was_reached_or_passed(previous: int, now: int, reached: bool) -> None:
    assert (AppliedUpdates(now, previous) % 10 == 0) == reached
    assert AppliedUpdates(now, previous) == now


@pytest.mark.parametrize("before", [1, 2])
def test_a_multiple_that_others_pass_before_a_checkpoint_is_saved_or_then_is_seen_at_the_next_step(
    trainers: Trainers, tmp_path: Path, before: int
) -> None:
    """And the step starts from the parameters of now: the gradient would else be as stale as the save was long."""
    saves, other = (trainers.join(f"{HYBRID} --save-interval-updates 4", worker=number, workers=2) for number in (0, 1))
    step(saves, 2)
    step(other, before)
    saved = saved_updates(saves, tmp_path / "checkpoint.pt")
    assert saved == 2 + before  # that of the parameters that were fetched
    step(other)
    step(saves)
    assert saves.get_num_updates() == 4 and saves.get_num_updates() % 4 == 0
    assert saves.get_num_updates() % 2 == 0  # where validations have another interval
    assert torch.equal(saves.model.net.trace[-1], other.model.net.flat())


def test_a_loop_that_ends_before_its_worker_is_told_so_has_the_servers_own_parameters(trainers: Trainers) -> None:
    """The last step is another worker's, between an answer and the parameters, which are ahead of the server's."""
    flags = f"{HYBRID} --look-ahead 1 --max-update 4"
    first, other = (trainers.join(flags, worker=number, workers=2) for number in (0, 1))
    step(first), step(other)
    pull = first.session.client.pull

    def late(*given: Any, **more: Any) -> int:
        trainers.patch.setattr(first.session.client, "pull", pull)
        step(other)
        return int(pull(*given, **more))

    trainers.patch.setattr(first.session.client, "pull", late)
    step(first)
    assert first.get_num_updates() == 4 and other.optimizer.worker.finished and not first.optimizer.worker.finished
    assert torch.equal(first.model.net.flat(), other.model.net.flat())


def test_parameters_that_are_changed_while_a_worker_saves_are_one_line(trainers: Trainers) -> None:
    trainer = trainers.join(HYBRID)
    step(trainer)
    trainer.fetch_server_state()
    trainer.model.net.layers[0].weight.data.fill_(7)
    with pytest.raises(ConfigurationError, match="layers.0.weight is not as this worker took it from the server"):
        step(trainer)


@pytest.mark.parametrize(
    ("shard", "progress", "max_update", "updates"),
    [(None, 4.7, 10, 3), (0, 4.7, 10, 4), (0, 9.9, 10, 9), (0, 25.0, 10, 9), (0, 25.0, 0, 25)],
)
def test_the_schedule_follows_the_shard_and_ends_before_the_runs_last_update(
    monkeypatch: pytest.MonkeyPatch, shard: int | None, progress: float, max_update: int, updates: int
) -> None:
    """A schedule may have no rate for an update at or behind the end."""
    seen: list[int] = []
    monkeypatch.setattr(Trainer, "lr_step_update", lambda trainer: seen.append(trainer._num_updates))
    trainer: Any = LocalSGDTrainer.__new__(LocalSGDTrainer)
    trainer._worker, trainer._num_updates = SimpleNamespace(shard=shard, progress=progress), 3
    trainer.cfg = SimpleNamespace(optimization=SimpleNamespace(max_update=max_update))
    trainer.lr_step_update()
    assert seen == [updates] and trainer._num_updates == 3


def test_after_a_batch_that_overflows_fairseq_has_the_runs_number_of_updates(trainers: Trainers) -> None:
    """The batch is no local step, at whose end the number would be set."""
    trainer = trainers.join(LOCAL)
    step(trainer)

    def overflow(*_: object) -> None:
        raise OverflowError

    trainers.patch.setattr(Trainer, "clip_grad_norm", overflow)
    trainers.patch.setattr(local_sgd, "skip_next_step", lambda optimizer: None)
    trainer._in_step = True
    trainer.clip_grad_norm(0.0)
    trainers.patch.setattr(type(trainer.worker), "run_progress", property(lambda _: 5.0))
    trainer.set_num_updates(2)
    assert trainer.get_num_updates() == 5


@pytest.mark.parametrize("method", [LOCAL, ADASCALE])
def test_saving_steps_no_schedule(
    trainers: Trainers, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule of a user's may count its steps: a run that saves more often would have other rates."""
    trainer = trainers.join(method)
    step(trainer, 2, 2 if method is ADASCALE else 1)
    monkeypatch.setattr(trainer, "lr_step_update", lambda: pytest.fail("stepped"))
    saved = saved_updates(trainer, tmp_path / "checkpoint.pt")
    assert saved == 2


@pytest.mark.parametrize("method", ["--optimizer hybrid_async --updates-per-step 2", ADASCALE])
def test_tasks_and_models_are_given_a_plain_number_of_updates(trainers: Trainers, method: str) -> None:
    """A task may take another of three losses in each update; a step that does not count ends no interval."""
    trainer, seen = trainers.join(method), list[Any]()
    trainer.model.register_forward_hook(lambda *_: seen.append(trainer.get_num_updates()))
    ends = []
    for _ in range(4):
        step(trainer, 1, 2 if method is ADASCALE else 1)
        ends.append(trainer.get_num_updates() % 1 == 0)
    assert {type(each) for each in seen} == {int} and sorted(seen) == seen and seen[-1]
    assert ends == ([True] * 4 if method is ADASCALE else [False, True, False, True])


@BOTH
def test_no_criterion_is_asked_to_log_a_step_without_a_batch(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """As at the end of an epoch, where a worker has none, for criteria that divide by a step's size."""
    trainer = trainers.join(method)
    step(trainer)
    sizes: list[float] = []
    monkeypatch.setattr(trainer.task, "reduce_metrics", lambda outputs, _: sizes.append(1 / len(outputs)))
    assert trainer.train_step([{}]) is None and not sizes
    step(trainer)
    assert sizes == [1.0]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


def test_a_batch_that_completes_no_step_ends_no_interval(trainers: Trainers) -> None:
    """Else the worker would validate after each of them."""
    trainer, ends = trainers.join(SHARES), list[bool]()
    for _ in range(len(trainer.batches) - 1):
        step(trainer)
        ends.append(trainer.get_num_updates() % 1 == 0)
    assert ends == [number % 5 == 4 for number in range(len(ends))] and True in ends[:-1]


@pytest.mark.parametrize(
    ("flags", "epochs"), [("", 3), ("--barrier", 0), ("--barrier --shares auto --update-freq 2", 3)]
)
def test_the_server_counts_the_passes_unless_each_worker_ends_after_its_own_part(
    trainers: Trainers, flags: str, epochs: int
) -> None:
    """With shares by speed, a worker's part is what it comes to."""
    trainer = trainers.make(f"--optimizer hybrid_async {flags} --max-epoch 3", workers=2)
    assert trainer.session.spec.max_epoch == epochs


BATCHES = [[index] for index in range(24)]


def two_data_sets(**shard: int) -> Any:
    return GroupedEpochBatchIterator(Numbers(24), list, [BATCHES[:18], BATCHES[18:]], epoch=1, **shard)


def with_iterator(trainer: Any, iterator: Callable[..., Any]) -> Any:
    """Whose task makes this iterator, given the part that fairseq passes to it."""
    assert trainer.optimizer  # which fairseq builds before it reads data
    trainer.task.get_batch_iterator = lambda num_shards, shard_id, **_: iterator(
        num_shards=num_shards, shard_id=shard_id
    )
    return trainer


def test_a_task_that_takes_no_part_of_the_data_is_refused(trainers: Trainers, tmp_path: Path) -> None:
    """fairseq's truncated_bptt_lm divides its data among the ranks of fairseq's own group, which has one here."""
    Dictionary().save(str(tmp_path / "dict.txt"))
    task = TruncatedBPTTLMTask(TruncatedBPTTLMConfig(data=str(tmp_path)))
    task._collate_fn = list  # type: ignore[method-assign]
    iterator = partial(task.get_batch_iterator, Numbers(24))
    assert len(with_iterator(trainers.make(HYBRID), iterator).get_train_iterator(1)) == 24
    trainers.next_run()
    of_three = with_iterator(trainers.make(HYBRID, workers=3), iterator)
    with pytest.raises(ConfigurationError, match="--task contract does not .* all 3 .* same batches; start one"):
        of_three.get_train_iterator(1)


@pytest.mark.parametrize("kind", [partial(EpochBatchIterator, Numbers(24), list, BATCHES), two_data_sets])
def test_the_batches_of_all_workers_are_one_pass(trainers: Trainers, kind: Callable[..., Any]) -> None:
    """Of several data sets fairseq keeps one list of batches for each: two, for three workers."""
    drawn, passes = [], 0.0
    for worker in range(3):
        trainer = with_iterator(trainers.make(f"{HYBRID} --max-epoch 2", worker=worker, workers=3), kind)
        for batch in trainer.get_train_iterator(1).next_epoch_itr():
            drawn += batch
            trainer._drawn = 1.0
            passes += trainer.fraction_of_epoch()
    assert sorted(drawn) == list(range(24)) and passes == pytest.approx(1)


def test_max_epoch_is_refused_where_nobody_knows_how_long_a_pass_is(trainers: Trainers) -> None:
    """Passes would be counted as 0, and the run would never end."""

    def stream(**shard: int) -> Any:
        return StreamingEpochBatchIterator(Stream())

    trainer = with_iterator(trainers.make(f"{HYBRID} --max-epoch 5"), stream)
    with pytest.raises(ConfigurationError, match="--max-epoch 5: the training set of --task contract .* --max-update"):
        trainer.get_train_iterator(1)
    trainers.next_run()
    trainer = with_iterator(trainers.make(HYBRID), stream)
    trainer.get_train_iterator(1)
    assert trainer.fraction_of_epoch() == 0


def masks(trainer: Any) -> int:
    """The first number that dropout would draw in the next step."""
    trainer._set_seed()
    return int(torch.randint(1 << 60, ()))


@BOTH
def test_each_step_of_each_worker_has_dropout_masks_of_its_own(trainers: Trainers, method: str) -> None:
    """Worker 0's are fairseq's, which adds the number of the update to --seed."""
    drawn = []
    for worker in range(2):
        trainer = trainers.join(method, worker=worker, workers=2)
        for _ in range(3):
            drawn.append(masks(trainer))
            assert masks(trainer) == drawn[-1]
            step(trainer)
    torch.manual_seed(3 + 2)
    assert len(set(drawn)) == 6 and drawn[2] == int(torch.randint(1 << 60, ()))


@pytest.mark.parametrize("together", ["--barrier", ""])
def test_workers_that_step_together_have_fairseqs_one_mask(trainers: Trainers, together: str) -> None:
    method = f"--optimizer hybrid_async {together}"
    assert len({masks(trainers.join(method, worker=worker, workers=3)) for worker in range(3)}) == 1


def test_ten_gradients_in_a_row_with_nan_end_a_synchronous_run_and_nine_do_not(trainers: Trainers) -> None:
    """They do not count as updates, of which the others are scale-invariant steps."""
    trainer = trainers.join(ADASCALE, spoilt=(*range(18), *range(20, 40)))
    step(trainer, 9, 2)
    assert trainer.get_num_updates() == 0 and trainer.wrapped.skip
    step(trainer, 1, 2)
    assert trainer.get_num_updates() == int(trainer.wrapped.adascale.scale_invariant_steps) == 1
    trainer.batches = trainer.get_train_iterator(1).next_epoch_itr()
    step(trainer, 9, 2)
    assert trainer.get_num_updates() == 1
    with pytest.raises(AsyncError, match="the gradients of the last 10 steps had NaN or Inf"):
        step(trainer, 1, 2)
    trainer.set_num_updates(9)  # of a checkpoint
    assert trainer.get_num_updates() == 9


def test_a_checkpoint_of_another_optimizer_is_refused_where_fairseq_does_not_notice(trainers: Trainers) -> None:
    """It compares names, and that of the inner optimizer, or of half precision, is the same."""
    plain = {"state": {}, "param_groups": list[Any]()}
    with pytest.raises(ConfigurationError, match="of another optimizer than --optimizer adascale"):
        trainers.make(ADASCALE).optimizer.load_state_dict(plain)
    trainer = trainers.make(LOCAL)
    trainer.worker.join(trainer.session.spec)
    with pytest.raises(ConfigurationError, match="of another optimizer than --optimizer local_sgd"):
        trainer._initialise({"epoch": 1}, reset_optimizer=False)


def test_a_tuning_goes_on_with_as_many_workers_as_it_had_and_begins_with_any(
    trainers: Trainers, tmp_path: Path
) -> None:
    first = trainers.join(HYBRID, workers=2)
    step(first)
    saved_updates(first, path := tmp_path / "checkpoint.pt")
    trainers.next_run()
    trainers.join(HYBRID, finetune_from_model=path, workers=3)
    trainers.next_run()
    with pytest.raises(ConfigurationError, match="checkpoint.pt is of a run of 2 workers"):
        trainers.join(HYBRID, restore_file=path, workers=3)


@BOTH
def test_each_worker_of_a_resumed_run_goes_on_at_its_own_place_in_the_data(
    trainers: Trainers, tmp_path: Path, method: str
) -> None:
    """In the second epoch of one, with the batches that it would have drawn."""
    workers = [trainers.join(method, worker=number, workers=2) for number in (0, 1)]
    step(workers[0], 3)
    step(workers[1], 4)
    epoch = workers[1].get_train_iterator(2)
    epoch.load_state_dict({"version": 2, "epoch": 2, "iterations_in_epoch": 0, "shuffle": True})
    workers[1].batches = epoch.next_epoch_itr()
    step(workers[1], 2)
    saved_updates(workers[0], path := tmp_path / "checkpoint.pt")
    left = [next(each.batches)["id"].tolist() for each in workers]
    trainers.next_run()
    again = [trainers.join(method, restore_file=path, worker=number, workers=2) for number in (0, 1)]
    assert [next(each.batches)["id"].tolist() for each in again] == left


@BOTH
def test_a_worker_does_not_go_on_at_the_place_of_one_whose_ranks_had_other_parts_of_the_data(
    trainers: Trainers, method: str
) -> None:
    trainer = trainers.make(method, workers=2)
    session, _ = trainer.session, trainer.optimizer
    trainer.get_train_iterator(1).next_epoch_itr()
    assert "parts" not in trainer.position()  # as where each worker has one
    alone, session.context = session.context, replace(session.context, sizes=(1, 2))
    trainer.get_train_iterator(1).next_epoch_itr()
    position = trainer.position()
    assert position["parts"] == [0, 1, 3]
    trainer.resume_data(None, position)
    assert trainer._position == position
    for context in (alone, replace(session.context, sizes=(2, 1), island_size=2), replace(alone, sizes=(1, 3))):
        session.context = context
        with pytest.raises(
            ConfigurationError, match="workers of other numbers of ranks.*give --reset-dataloader, or the"
        ):
            trainer.resume_data(None, position)
    session.context = replace(alone, joins=True)  # with the number of a worker that has left
    trainer.resume_data(None, position)
    assert trainer._position is None


@BOTH
def test_a_run_that_is_finished_before_its_first_whole_step_ends(trainers: Trainers, method: str) -> None:
    """0 is no limit to fairseq."""
    first, second = (trainers.join(method, worker=number, workers=2) for number in (0, 1))
    first.session.client.leave(finished=True)
    step(second, 3)
    assert second.get_num_updates() >= second.cfg.optimization.max_update >= 1


@BOTH
def test_a_worker_that_comes_to_a_run_that_is_over_has_no_step_to_take(trainers: Trainers, method: str) -> None:
    """Though the run's progress is that of the worker: no step, as here, or as many as a checkpoint has."""
    first = trainers.join(method, worker=0, workers=2)
    first.session.client.leave(finished=True)
    late = trainers.join(method, worker=1, workers=2)
    assert late.get_num_updates() >= late.cfg.optimization.max_update >= 1


def test_a_parameter_that_cannot_be_exchanged_is_one_line(trainers: Trainers) -> None:
    trainer = trainers.make(HYBRID)
    layers = trainer.model.net.layers
    layers[1].weight.data = layers[0].weight.data
    with pytest.raises(ConfigurationError, match="layers.1.weight shares its memory with net.layers.0.weight"):
        trainer.trainable_parameters()


def test_each_epoch_has_the_scale_of_its_own_update_freq(trainers: Trainers) -> None:
    """One gradient has no noise to measure, and is plain training."""
    trainer, scales = trainers.make("--optimizer adascale --update-freq 1,2,4"), []
    for epoch in (1, 2, 3, 4):
        trainer.begin_epoch(epoch)
        scales.append((trainer.wrapped.adascale.scale, trainer.wrapped.adascale.accumulation))
    assert scales == [(float(each), each) for each in (1, 2, 4, 4)]


def test_an_optimizer_that_is_built_anew_leaves_no_hooks_of_the_one_before(trainers: Trainers) -> None:
    trainer = trainers.join("--optimizer adascale --update-freq 4 --adascale-smoothing 0.75 --adascale-interval 3")
    before, net = trainer.wrapped.adascale, trainer.model.net
    trainer._build_optimizer()
    now = trainer.wrapped.adascale
    for number in range(4):
        net(**net.run.batch(number))["loss"].backward()
    assert (before.passes, now.passes) == (0, 4)
    assert (now.scale, now.accumulation, now.interval, now.gains.whole.smoothing) == (4.0, 4, 3, 0.75)


@BOTH
def test_what_compressed_updates_have_left_unsent_is_there_again_after_a_resume(
    trainers: Trainers, tmp_path: Path, method: str
) -> None:
    def residual(trainer: Any) -> torch.Tensor:
        found: torch.Tensor = trainer.worker.compressor_state()["parts"][0]["feedback"]["residual"]
        return found

    before = trainers.join(f"{method} --compress topk")
    step(before, 3)
    saved_updates(before, path := tmp_path / "checkpoint.pt")
    trainers.next_run()
    after = trainers.join(f"{method} --compress topk", restore_file=path)
    assert residual(before).any() and torch.equal(residual(after), residual(before))


@pytest.mark.parametrize(("ranks", "within", "saves"), [(1, True, True), (2, True, False), (2, False, True)])
def test_an_island_saves_nothing_from_amid_a_step_where_its_ranks_cannot_fetch_the_state_together(
    trainers: Trainers, tmp_path: Path, ranks: int, within: bool, saves: bool
) -> None:
    trainer = trainers.join(HYBRID)
    step(trainer)
    trainer.consolidate_optimizer()
    trainer.session.context = replace(trainer.session.context, island_size=ranks)
    trainer._in_train_step = within
    trainer.save_checkpoint(str(path := tmp_path / "crash.pt"), {"train_iterator": {"epoch": 1}})
    assert path.exists() is saves


@pytest.mark.parametrize(
    ("place", "given", "own_part"),
    [
        ({}, {}, True),
        ({}, {"reset_dataloader": True}, False),
        ({}, {"finetune_from_model": True}, False),
        ({DEALT: True}, {}, False),
    ],
)
def test_a_run_that_goes_on_keeps_its_workers_parts_or_is_dealt_as_before_and_a_tuning_of_it_is_dealt(
    trainers: Trainers, tmp_path: Path, place: dict[str, bool], given: dict[str, bool], own_part: bool
) -> None:
    before = trainers.join(HYBRID)
    position = before.position()
    trainers.patch.setattr(before, "position", lambda: position | place)
    step(before)
    saved_updates(before, path := tmp_path / "checkpoint.pt")
    trainers.next_run()
    file = "finetune_from_model" if "finetune_from_model" in given else "restore_file"
    trainer = trainers.join(SHARES, **given | {file: path})
    assert trainer.worker.first_micro_batch is not None and trainer._own_part is own_part


@pytest.mark.parametrize("masters", ["", "--bf16", "--bf16 --fp16-no-flatten-grads"])
@pytest.mark.parametrize("restored", [False, True])
def test_a_worker_of_local_sgd_exchanges_what_its_optimizer_steps(
    trainers: Trainers, tmp_path: Path, masters: str, restored: bool
) -> None:
    """For a checkpoint fairseq builds the optimizer, and the masters of a half-precision model, anew."""
    trainer = trainers.join(f"{LOCAL} {masters}")
    if restored:
        step(trainer)
        saved_updates(trainer, path := tmp_path / "checkpoint.pt")
        trainers.next_run()
        trainer = trainers.join(f"{LOCAL} {masters}", restore_file=path)
    step(trainer)
    exchanged = torch.zeros(trainer.worker.replica.layout.size)
    trainer.worker.replica.read(exchanged)
    stepped = [each for group in trainer.optimizer.optimizer.param_groups for each in group["params"]]
    assert torch.equal(exchanged, torch.cat([each.detach().flatten() for each in stepped]))


def test_the_last_step_of_an_epoch_of_a_workers_own_part_is_of_what_is_left_of_it(trainers: Trainers) -> None:
    """Where the server says how many batches a step has, and does not deal them."""
    trainer = trainers.join(SHARES)
    batches = len(trainer.batches)
    whole, left = divmod(batches, 5)
    assert whole and left, "it shows nothing otherwise"
    step(trainer, batches - 1)
    assert trainer.worker.sequence == whole
    step(trainer)
    assert trainer.worker.sequence == trainer.get_num_updates() == whole + 1


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_the_flags_of_a_reset_drop_what_they_say_and_nothing_else(
    trainers: Trainers, schedule: bool, positions: bool
) -> None:
    """--reset-dataloader begins with the first epoch: the passes that a checkpoint has counted would end the run."""
    trainer = trainers.join(HYBRID)
    step(trainer)
    state = trainer.fetch_server_state()
    trainer.optimizer.restored = dict(copy.deepcopy(state))
    trainer.optimizer.reset_restored(schedule, positions)
    left = trainer.optimizer.restored
    assert left["server"]["version"] == 1
    assert left["server"]["rule"]["schedule"] == (None if schedule else state["server"]["rule"]["schedule"])
    assert left["plan"]["epochs"] == (0.0 if positions else state["plan"]["epochs"]) and state["plan"]["epochs"] > 0
    assert left["positions"] == ({} if positions else state["positions"]) and state["positions"]
    assert ("dealer" in left["shares"]) is not positions and "dealer" in state["shares"]


@pytest.mark.parametrize("reset", [False, True])
def test_a_reset_of_the_data_of_local_sgd_begins_with_the_first_epoch(
    trainers: Trainers, tmp_path: Path, reset: bool
) -> None:
    first = trainers.join(LOCAL)
    step(first, 3)
    saved_updates(first, path := tmp_path / "checkpoint.pt")
    trainers.next_run()
    state = trainers.join(LOCAL, restore_file=path, reset_dataloader=reset).fetch_server_state()
    assert state["server"]["version"] == 1
    assert (state["plan"]["epochs"], state["positions"]) == (0.0, {}) if reset else state["positions"]


def validated(trainers: Trainers) -> tuple[Any, Net, torch.Tensor]:
    """A trainer of local SGD amid a round, its net with the server's parameters, and its own."""
    trainer = trainers.join(LOCAL)
    net = trainer.model.net
    step(trainer, 2)
    own = net.flat()
    trainer.fetch_server_state()
    assert torch.equal(net.flat(), net.trace[0])
    return trainer, net, own


def test_an_epoch_begins_with_the_workers_own_parameters_which_a_task_may_change(trainers: Trainers) -> None:
    trainer, net, own = validated(trainers)
    trainer.begin_epoch(2)
    assert torch.equal(net.flat(), own)
    net.layers[0].weight.data.mul_(3)  # as the task does in its begin_epoch
    changed = net.flat()
    step(trainer)
    assert torch.equal(net.trace[-1], changed)


@pytest.mark.parametrize("puts_back", [True, False])
def test_parameters_that_are_swapped_for_a_validation_are_put_back_or_one_line(
    trainers: Trainers, puts_back: bool
) -> None:
    """In the next epoch's beginning at the latest."""
    trainer, net, own = validated(trainers)
    before = copy.deepcopy(net.state_dict())
    net.layers[0].weight.data.fill_(7)
    trainer.begin_epoch(2)
    assert (net.layers[0].weight == 7).all()
    if puts_back:
        net.load_state_dict(before)
        step(trainer)
        assert torch.equal(net.trace[-1], own)
    else:
        with pytest.raises(ConfigurationError, match="layers.0.weight is not as the validation found it"):
            step(trainer)
