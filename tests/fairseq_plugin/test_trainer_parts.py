"""fairseq's trainer as a worker: parts of it that need no training."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data.iterators import EpochBatchIterator, GroupedEpochBatchIterator, StreamingEpochBatchIterator
from fairseq.examples.truncated_bptt.truncated_bptt_lm_task import TruncatedBPTTLMTask
from fairseq.trainer import Trainer
from torch.nn import Parameter

import fairseq_async.fairseq_plugin  # noqa: F401
from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.fairseq_plugin.adascale import AdaScaleOptimizer, AdaScaleTrainer
from fairseq_async.fairseq_plugin.adasum import AdasumOptimizer
from fairseq_async.fairseq_plugin.asynchronous_trainer import AsynchronousTrainer
from fairseq_async.fairseq_plugin.compat.checkpoints import make_plain
from fairseq_async.fairseq_plugin.compat.updates import AppliedUpdates
from fairseq_async.fairseq_plugin.hybrid import HybridAsync, HybridTrainer
from fairseq_async.fairseq_plugin.local_sgd import LocalSGDTrainer
from fairseq_async.fairseq_plugin.synchronous_trainer import SynchronousTrainer
from fairseq_async.options.config import AdaScaleOptions
from fairseq_async.worker.loop import WorkerLoop
from fairseq_async.worker.replica import TensorReplica
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.stand_ins import Numbers


@pytest.mark.parametrize(
    ("previous", "now", "reached"),
    [(9, 10, True), (8, 13, True), (10, 10, False), (10, 19, False), (10, 20, True), (19, 41, True), (0, 9, False)],
)
def test_an_interval_of_ten_ends_where_a_multiple_was_reached_or_passed(previous: int, now: int, reached: bool) -> None:
    assert (AppliedUpdates(now, previous) % 10 == 0) == reached
    assert AppliedUpdates(now, previous) == now


def test_a_multiple_that_others_pass_while_a_checkpoint_is_saved_is_seen_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trainer, "state_dict", lambda self: {"cfg": 0, "extra_state": {}, "num": self._num_updates})
    trainer: Any = object.__new__(HybridTrainer)
    worker = SimpleNamespace(finished=False, progress=51.0, joined=True)
    trainer._num_updates, trainer._optimizer = AppliedUpdates(48, 47), SimpleNamespace(worker=worker)
    trainer.cfg = SimpleNamespace(checkpoint=SimpleNamespace(save_interval_updates=50))
    trainer.session, trainer._server_state = SimpleNamespace(given={}, context=SimpleNamespace(workers=2)), {}
    saved = trainer.state_dict()["num"]
    assert saved == 51 and type(saved) is int  # that of the parameters that were fetched
    worker.progress = 53.0
    assert trainer._applied_updates() == 50 and trainer._applied_updates() % 50 == 0
    assert trainer._applied_updates() % 25 == 0  # where validations have another interval


def test_saving_steps_no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule of a user's may count its steps: a run that saves more often would have other rates."""
    monkeypatch.setattr(Trainer, "state_dict", lambda self: {"extra_state": {}, "num": self._num_updates})
    for kind in (LocalSGDTrainer, AdaScaleTrainer):
        trainer: Any = object.__new__(kind)
        trainer._num_updates, trainer._given = AppliedUpdates(6, 5), {}
        trainer._worker, trainer._optimizer = SimpleNamespace(compressor_state=lambda: None), object()
        trainer.loop, trainer.cfg = SimpleNamespace(state={"server": {}}), SimpleNamespace()
        trainer.session = SimpleNamespace(given={}, context=SimpleNamespace(workers=1))
        monkeypatch.setattr(kind, "lr_step_update", lambda self: pytest.fail("stepped"))
        monkeypatch.setattr(kind, "data_parallel_world_size", 1)
        saved = trainer.state_dict()["num"]
        assert saved == 6 and type(saved) is int


@pytest.mark.parametrize("counts", [True, False])
def test_tasks_and_models_are_given_a_plain_number_of_updates(monkeypatch: pytest.MonkeyPatch, counts: bool) -> None:
    """A task may take another of three losses in each update; a step that does not count ends no interval."""
    seen: list[int] = []

    def step(self: Any, samples: object, raise_oom: bool) -> None:
        seen.append(self.get_num_updates() % 3)
        if counts:
            self._num_updates = AppliedUpdates(7, 6)

    monkeypatch.setattr(Trainer, "train_step", step)
    trainer: Any = object.__new__(HybridTrainer)
    trainer._num_updates = AppliedUpdates(6, 6)
    AsynchronousTrainer.train_step(trainer, [])
    assert seen == [0] and (trainer.get_num_updates() % 7 == 0) == counts and trainer.get_num_updates() % 6 != 0
    adascale: Any = object.__new__(AdaScaleTrainer)
    adascale._num_updates, adascale._skipped = AppliedUpdates(6, 6), 0
    adascale._optimizer = SimpleNamespace(adascale=SimpleNamespace(discard_norms=lambda: seen.append(-1)))
    adascale.train_step([])
    assert seen == [0, -1, 0], "a step that was not taken may have left norms"


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


BATCHES = [[index] for index in range(24)]


def two_data_sets(**shard: int) -> Any:
    return GroupedEpochBatchIterator(Numbers(24), list, [BATCHES[:18], BATCHES[18:]], epoch=1, **shard)


def trainer_of(
    iterator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, worker: int = 0, workers: int = 3, max_epoch: int = 0
) -> Any:
    """A trainer whose task makes this iterator, given the shard that fairseq passes to it."""

    def make(self: Any, epoch: int, **kwargs: object) -> Any:
        return iterator(num_shards=self.data_parallel_world_size, shard_id=self.data_parallel_rank)

    monkeypatch.setattr(Trainer, "get_train_iterator", make)
    trainer: Any = object.__new__(HybridTrainer)
    trainer._position = trainer._iterator = None
    trainer.cfg = SimpleNamespace(task=SimpleNamespace(_name="made_up"))
    spec = SimpleNamespace(max_epoch=max_epoch, full_rounds=False)
    trainer.session = SimpleNamespace(spec=spec, context=SimpleNamespace(worker=worker, workers=workers))
    return trainer


def test_a_task_that_takes_no_part_of_the_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq's truncated_bptt_lm divides its data among the ranks of fairseq's own group, which has one here."""

    def truncated(**shard: int) -> Any:
        return TruncatedBPTTLMTask.get_batch_iterator(object.__new__(TruncatedBPTTLMTask), Numbers(24), **shard)

    with pytest.raises(ConfigurationError, match="--task made_up does not .* all 3 workers .* same batches; start one"):
        trainer_of(truncated, monkeypatch).get_train_iterator(1)
    assert len(trainer_of(truncated, monkeypatch, workers=1).get_train_iterator(1)) == 24


@pytest.mark.parametrize("kind", [partial(EpochBatchIterator, Numbers(24), list, BATCHES), two_data_sets])
def test_the_batches_of_all_workers_are_one_pass(kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several data sets fairseq keeps one list of batches for each: two, for three workers."""
    drawn, passes = [], 0.0
    for worker in range(3):
        trainer = trainer_of(kind, monkeypatch, worker, max_epoch=2)
        for batch in trainer.get_train_iterator(1).next_epoch_itr():
            drawn += batch
            passes += trainer.fraction_of_epoch([batch])
    assert sorted(drawn) == list(range(24)) and passes == pytest.approx(1)


def test_max_epoch_is_refused_where_nobody_knows_how_long_a_pass_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes would be counted as 0, and the run would never end."""

    def stream(**shard: int) -> Any:
        return StreamingEpochBatchIterator(Stream())

    with pytest.raises(ConfigurationError, match="--max-epoch 5: the training set of --task made_up .* --max-update"):
        trainer_of(stream, monkeypatch, max_epoch=5).get_train_iterator(1)
    trainer = trainer_of(stream, monkeypatch)
    trainer.get_train_iterator(1)
    assert trainer.fraction_of_epoch([[1]]) == 0


def masks(
    kind: type[AsynchronousTrainer],
    worker: int,
    number: int,
    synchronous: bool = False,
    closes_early: bool = False,
) -> int:
    """The first number that dropout would draw in this step."""
    trainer: Any = object.__new__(kind)
    trainer.cfg = SimpleNamespace(common=SimpleNamespace(seed=3))
    trainer.session = SimpleNamespace(
        spec=SimpleNamespace(framework={"synchronous": synchronous}, closes_early=closes_early),
        context=SimpleNamespace(worker=worker),
    )
    state = SimpleNamespace(sequence=number, step_number=number)
    if kind is LocalSGDTrainer:
        trainer._worker, trainer._optimizer = state, object()
    else:
        trainer._optimizer = SimpleNamespace(worker=state)
    trainer._set_seed()
    return int(torch.randint(1 << 60, ()))


@pytest.mark.parametrize("kind", [HybridTrainer, LocalSGDTrainer])
def test_each_step_of_each_worker_has_dropout_masks_of_its_own(kind: type[AsynchronousTrainer]) -> None:
    """Worker 0's are fairseq's, which adds the number of the update to --seed."""
    drawn = [masks(kind, worker, number) for worker in range(3) for number in range(4)]
    assert len(set(drawn)) == 12
    torch.manual_seed(3 + 2)
    assert drawn[2] == int(torch.randint(1 << 60, ()))
    assert masks(kind, 2, 1) == drawn[2 * 4 + 1]  # and the same again


def test_workers_that_step_together_have_fairseqs_one_mask() -> None:
    for together in ({"synchronous": True}, {"closes_early": True}):
        assert len({masks(HybridTrainer, worker, 5, **together) for worker in range(3)}) == 1


def test_ten_gradients_in_a_row_with_nan_end_a_synchronous_run_and_nine_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = iter([*[float("nan")] * 9, 1.5, *[float("inf")] * 10])
    monkeypatch.setattr(Trainer, "clip_grad_norm", lambda self, clip: torch.tensor(next(norms)))
    trainer: Any = object.__new__(SynchronousTrainer)
    trainer._skipped, trainer._optimizer = 0, SimpleNamespace(skip=False)
    seen = [(float(trainer.clip_grad_norm(1.0)), trainer.wrapped.skip) for _ in range(19)]
    assert seen == [(0.0, True)] * 9 + [(1.5, False)] + [(0.0, True)] * 9
    with pytest.raises(AsyncError, match="the gradients of the last 10 steps had NaN or Inf"):
        trainer.clip_grad_norm(1.0)


def test_a_checkpoint_of_another_optimizer_is_refused_where_fairseq_does_not_notice() -> None:
    """It compares names, and that of the inner optimizer, or of half precision, is the same."""
    trainer: Any = object.__new__(LocalSGDTrainer)
    with pytest.raises(ConfigurationError, match="of another optimizer than --optimizer local_sgd"):
        trainer._initialise({"epoch": 1}, reset_optimizer=False)
    for name, optimizer in (("adasum", AdasumOptimizer), ("adascale", AdaScaleOptimizer)):
        loaded: Any = object.__new__(optimizer)
        with pytest.raises(ConfigurationError, match=f"of another optimizer than --optimizer {name}"):
            loaded.load_state_dict({"state": {}, "param_groups": []})


def test_a_tuning_goes_on_with_as_many_workers_as_it_had_and_begins_with_any(monkeypatch: pytest.MonkeyPatch) -> None:
    extra_state: dict[str, Any] = {}
    extra_state = make_plain({"extra_state": extra_state}, {}, 2)["extra_state"]
    monkeypatch.setattr(Trainer, "load_checkpoint", lambda self, filename: extra_state)
    trainer: Any = object.__new__(HybridTrainer)
    trainer.cfg = SimpleNamespace(
        checkpoint=SimpleNamespace(reset_dataloader=False, finetune_from_model="pretrained.pt")
    )
    trainer.session = SimpleNamespace(context=SimpleNamespace(workers=3), spec=SimpleNamespace(shards=()))
    welcome: Any = SimpleNamespace(initialised=False)
    assert trainer.load_fairseq_checkpoint(welcome, "pretrained.pt") is extra_state
    with pytest.raises(ConfigurationError, match="checkpoint_last.pt is of a run of 2 workers"):
        trainer.load_fairseq_checkpoint(welcome, "run/checkpoint_last.pt")


def test_a_run_that_is_finished_before_its_first_whole_step_ends() -> None:
    """0 is no limit to fairseq."""
    trainer: Any = object.__new__(HybridTrainer)
    trainer._num_updates, trainer._optimizer = 0, SimpleNamespace(worker=SimpleNamespace(finished=True, progress=0.5))
    limits = SimpleNamespace(max_update=0)
    trainer.cfg = SimpleNamespace(optimization=limits, checkpoint=SimpleNamespace(save_interval_updates=0))
    assert trainer._applied_updates() >= limits.max_update == 1
    local: Any = object.__new__(LocalSGDTrainer)
    local._optimizer, local._worker = object(), SimpleNamespace(finished=True)
    limits.max_update, local.cfg = 0, trainer.cfg
    assert local._applied_updates(0, 0) >= limits.max_update == 1


def test_a_parameter_that_cannot_be_exchanged_is_one_line() -> None:
    trainer: Any = object.__new__(HybridTrainer)
    trainer._model = trainer._wrapped_model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    trainer._criterion = trainer._wrapped_criterion = torch.nn.Module()
    assert len(trainer.trainable_parameters()) == 4
    trainer._model[1].weight.data = trainer._model[0].weight.data
    with pytest.raises(ConfigurationError, match="1.weight shares its memory with 0.weight"):
        trainer.trainable_parameters()


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_epoch_has_the_scale_of_its_own_update_freq(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """With --update-freq 1,2,4; one gradient has no noise to measure, and is plain training."""
    monkeypatch.setattr(Trainer, "begin_epoch", lambda self, epoch: None)
    monkeypatch.setattr(Trainer, "data_parallel_world_size", ranks)
    trainer: Any = object.__new__(AdaScaleTrainer)
    trainer._gradients, trainer._options = [ranks, 2 * ranks, 4 * ranks], AdaScaleOptions()
    scales: list[tuple[float, int]] = []
    adascale = SimpleNamespace(set_scale=lambda scale, accumulation: scales.append((scale, accumulation)))
    trainer._optimizer = SimpleNamespace(adascale=adascale)
    for epoch in (1, 2, 3, 4):
        trainer.begin_epoch(epoch)
    assert scales == [(float(ranks * each), each) for each in (1, 2, 4, 4)]


def test_an_optimizer_that_is_built_anew_leaves_no_hooks_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    given, closed = list[dict[str, Any]](), list[object]()

    def made(optimizer: object, scale: float, **options: Any) -> object:
        given.append({"scale": scale} | options)
        it = SimpleNamespace()
        it.close = lambda: closed.append(it)
        return it

    monkeypatch.setattr("fairseq_async.fairseq_plugin.adascale.AdaScale", made)
    monkeypatch.setattr("fairseq_async.fairseq_plugin.adascale._masters", lambda optimizer: "masters")
    monkeypatch.setattr(
        SynchronousTrainer, "_build_optimizer", lambda self: setattr(self, "_optimizer", optimizers.pop())
    )
    monkeypatch.setattr(Trainer, "data_parallel_process_group", "group")
    first, second = optimizers = [SimpleNamespace(optimizer=None, skip=False) for _ in "12"]
    trainer: Any = object.__new__(AdaScaleTrainer)
    trainer._optimizer, trainer._gradients, trainer._options = None, [2, 8], AdaScaleOptions(smoothing=0.75, interval=3)
    trainer.arguments = SimpleNamespace(inner_optimizer="adam")
    trainer.cfg = SimpleNamespace(optimization=SimpleNamespace(update_freq=[1, 4]))
    trainer._build_optimizer()
    trainer._build_optimizer()
    assert closed == [second.adascale] and trainer.wrapped is first
    estimator = {"estimator": AdaScaleOptions().estimator, "adaptive": True, "smoothing": 0.75, "interval": 3}
    rest = {"process_group": "group", "accumulation": 4, "masters": "masters"}
    assert given == [{"scale": 8.0} | estimator | rest] * 2


@pytest.mark.parametrize(("in_step", "skip", "updates"), [(True, False, 7), (True, True, 6), (False, False, 9)])
def test_only_a_step_that_was_taken_counts_and_by_the_scale_invariant_steps(
    in_step: bool, skip: bool, updates: int
) -> None:
    trainer: Any = object.__new__(AdaScaleTrainer)
    trainer._num_updates, trainer._in_step, trainer.quantizer = 6, in_step, None
    adascale = SimpleNamespace(scale_invariant_steps=7.9)
    trainer._optimizer, trainer._lr_scheduler = SimpleNamespace(skip=skip, adascale=adascale), SimpleNamespace()
    trainer.lr_step_update = lambda: None
    trainer.set_num_updates(9)
    assert trainer.get_num_updates() == updates


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_the_flags_of_a_reset_drop_what_they_say_and_nothing_else(schedule: bool, positions: bool) -> None:
    """--reset-dataloader begins with the first epoch: the passes that a checkpoint has counted would end the run."""
    optimizer: Any = object.__new__(HybridAsync)
    server = {"version": 7, "rule": {"schedule": {"best": 1.0}, "steps": 7}}
    optimizer.restored = {"server": server, "positions": {0: {"epoch": 3}}, "plan": {"epochs": 2.5}}
    optimizer.reset_restored(schedule, positions)
    assert server == {"version": 7, "rule": {"schedule": None if schedule else {"best": 1.0}, "steps": 7}}
    assert optimizer.restored["plan"] == {"epochs": 0.0 if positions else 2.5}
    assert optimizer.restored["positions"] == ({} if positions else {0: {"epoch": 3}})


@pytest.mark.parametrize("reset", [False, True])
def test_a_reset_of_the_data_of_local_sgd_begins_with_the_first_epoch(reset: bool) -> None:
    brought: list[Any] = []
    trainer: Any = object.__new__(LocalSGDTrainer)
    trainer.cfg = SimpleNamespace(checkpoint=SimpleNamespace(reset_dataloader=reset))
    trainer.session = SimpleNamespace(run_dir=None)
    trainer.loop = SimpleNamespace(bring=lambda state, run_dir, from_checkpoint: brought.append(state))
    state = {"positions": {0: {"epoch": 3}, 1: {"epoch": 2}}, "plan": {"epochs": 2.5, "steps": 9}}
    trainer._initialise({"async_server": state}, False)
    positions = {} if reset else {0: {"epoch": 3}, 1: {"epoch": 2}}
    assert brought == [{"positions": positions, "plan": {"epochs": 0.0 if reset else 2.5, "steps": 9}}]


def test_a_worker_that_has_saved_takes_the_servers_parameters_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others went on meanwhile: its next gradient would be as stale as the save was long."""
    seen: list[str] = []
    monkeypatch.setattr(Trainer, "train_step", lambda self, samples, raise_oom: seen.append("step"))
    trainer: Any = object.__new__(HybridTrainer)
    trainer._num_updates, trainer._server_state = AppliedUpdates(6, 6), {"server": {}}
    trainer._iterator = SimpleNamespace(state_dict=dict)
    worker: Any = SimpleNamespace(check_unchanged=lambda: seen.append("check"), start=lambda: seen.append("pull"))
    trainer._optimizer, trainer.loop = SimpleNamespace(worker=worker), WorkerLoop(worker, WorkerContext())
    monkeypatch.setattr(HybridTrainer, "fraction_of_epoch", lambda self, batches: 0.0)
    for _ in range(2):
        trainer.train_step([[1]])
    assert seen == ["check", "pull", "step", "step"]


def validated(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Parameter]:
    """A trainer of local SGD whose worker's own parameter is 1, while the model has the server's, 5."""
    for name in ("train_step", "begin_epoch"):
        monkeypatch.setattr(Trainer, name, lambda self, *_: self.seen.append(parameter.item()))
    parameter = Parameter(torch.ones(1))
    replica = TensorReplica([("weight", parameter)])
    trainer: Any = object.__new__(LocalSGDTrainer)
    trainer.seen, trainer._num_updates, trainer._optimizer = [], 0, object()
    worker: Any = SimpleNamespace(replica=replica, settle=lambda: None, check_unchanged=lambda: None)
    trainer._worker, trainer.loop = worker, WorkerLoop(worker, WorkerContext())
    trainer.session = SimpleNamespace(snapshot=lambda: {"server": {"parameters": torch.full((1,), 5.0)}})
    trainer.fetch_server_state()
    assert parameter == 5
    return trainer, parameter


def test_an_epoch_begins_with_the_workers_own_parameters_which_a_task_may_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, parameter = validated(monkeypatch)
    trainer.begin_epoch(2)
    parameter.data.mul_(3)  # as the task does in its begin_epoch
    trainer.train_step([[1]])
    assert trainer.seen == [1, 3]


def test_parameters_that_are_swapped_for_a_validation_are_put_back_or_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the next epoch's beginning at the latest."""
    for puts_back in (True, False):
        trainer, parameter = validated(monkeypatch)
        parameter.data.fill_(7)
        trainer.begin_epoch(2)
        if not puts_back:
            with pytest.raises(ConfigurationError, match="weight is not as the validation found it"):
                trainer.train_step([[1]])
            return
        parameter.data.fill_(5)
        trainer.train_step([[1]])
        assert trainer.seen == [7, 1]
