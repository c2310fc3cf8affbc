"""The workarounds for fairseq, one by one."""

from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data.token_block_dataset import TokenBlockDataset
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.optim import FP16Optimizer, build_optimizer
from torch import distributed, nn

from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.fairseq_plugin.compat.batches import batches_of_first_epoch, real_batches
from fairseq_async.fairseq_plugin.compat.checkpoints import (
    check_workers,
    checkpoint_errors,
    make_plain,
    rescale_position,
)
from fairseq_async.fairseq_plugin.compat.numpy_names import restore_names
from fairseq_async.fairseq_plugin.compat.optimizers import betas_as_strings
from fairseq_async.fairseq_plugin.compat.precision import finite_norm, forget_factor, loss_scale_errors, loss_scaler
from fairseq_async.fairseq_plugin.compat.shutdown import ddp_on_cpu
from fairseq_async.fairseq_plugin.compat.updates import AppliedUpdates, RemoteSchedule
from tests.helpers.fairseq_trainers import configuration

KEPT: list[distributed.ProcessGroup] = []  # see gloo_of_one


@pytest.mark.parametrize(
    ("previous", "value", "interval", "reached"),
    [
        (9, 10, 10, True),  # reached
        (8, 13, 10, True),  # passed
        (10, 10, 10, False),  # reached before: to save again would overwrite
        (10, 19, 10, False),
        (0, 0, 10, False),
        (3, 45, 10, True),  # several passed
        (25, 8, 10, False),  # behind it: the server has gone back to a snapshot
    ],
)
def test_an_interval_ends_where_its_multiple_is_reached_or_passed(
    previous: int, value: int, interval: int, reached: bool
) -> None:
    assert (AppliedUpdates(value, previous) % interval == 0) is reached


def test_empty_batches_are_left_out() -> None:
    assert real_batches([{"id": 1}, {}, None, {"id": 2}]) == [{"id": 1}, {"id": 2}]


def test_another_number_of_ranks_goes_on_at_the_same_batch() -> None:
    """2 ranks, each after 6 batches, are at batch 12: that is batch 4 of each of 3 ranks."""
    extra_state: dict[str, Any] = {"train_iterator": {"iterations_in_epoch": 6}}
    extra_state = make_plain({"extra_state": extra_state}, {}, 2)["extra_state"]
    rescale_position(extra_state, 3)
    assert extra_state["train_iterator"]["iterations_in_epoch"] == 4


def test_positions_of_another_number_of_workers_are_refused() -> None:
    extra_state: dict[str, Any] = {}
    check_workers(extra_state, 3, "of an earlier edition")
    extra_state = make_plain({"extra_state": extra_state}, {}, 2)["extra_state"]
    check_workers(extra_state, 2, "the same")
    with pytest.raises(ConfigurationError, match="FILE is of a run of 2 workers.* has 3.*--reset-dataloader"):
        check_workers(extra_state, 3, "FILE")


def test_a_position_of_plain_fairseq_is_of_the_ranks_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"cfg": {"distributed_training": {"distributed_world_size": 1}}}
    monkeypatch.setattr(checkpoint_utils, "load_checkpoint_to_cpu", lambda filename: state)
    extra_state = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 12}}
    check_workers(extra_state, 1, "FILE")
    with pytest.raises(ConfigurationError, match="FILE is of a run of 1 worker.* has 2.*--reset-dataloader"):
        check_workers(extra_state, 2, "FILE")
    extra_state["train_iterator"] = {"epoch": 2, "iterations_in_epoch": 0}
    check_workers(extra_state, 2, "FILE")


@pytest.mark.parametrize("cached", [True, False])
def test_only_a_cached_iterator_is_made_again(cached: bool) -> None:
    iterators = {"the training set": "of epoch 3"} if cached else {}
    task = Namespace(dataset_to_epoch_iter=iterators, dataset=lambda subset: f"the {subset}ing set")
    cfg = Namespace(dataset=Namespace(train_subset="train"))
    assert batches_of_first_epoch(task, cfg, lambda: "of epoch 1") == ("of epoch 1" if cached else None)
    assert not iterators


def test_an_iterator_that_makes_its_batches_anew_in_each_epoch_stays() -> None:
    iterators = {"data": Namespace(batch_sampler=lambda dataset, epoch: [[0]])}
    task = Namespace(dataset_to_epoch_iter=iterators, dataset=lambda subset: "data")
    assert batches_of_first_epoch(task, Namespace(dataset=Namespace(train_subset="train")), lambda: "anew") is None
    assert iterators


def test_after_a_norm_of_nan_the_next_step_multiplies_by_one() -> None:
    """Gradients of bf16 have no loss scale, by which fairseq would set the factor again."""
    for half, dtype, factor in (("--bf16", torch.bfloat16, 1.0), ("--fp16", torch.float16, 0.5)):
        model, master = torch.nn.Parameter(torch.ones(2, dtype=dtype)), torch.nn.Parameter(torch.ones(2))
        cfg = configuration(f"--optimizer adam {half}")
        optimizer = FP16Optimizer(cfg, [model], build_optimizer(cfg.optimizer, [master]), master)
        optimizer._multiply_factor = float("nan") if optimizer.scaler is None else 0.5
        forget_factor(optimizer)
        assert optimizer._multiply_factor == factor


def test_betas_are_strings_as_on_a_command_line() -> None:
    args = Namespace(adam_betas=[0.9, 0.98], other_betas="(0.5, 0.6)", lr=[0.1])
    assert betas_as_strings(args) == {"adam_betas": "(0.9, 0.98)", "other_betas": "(0.5, 0.6)"}


def test_a_norm_that_is_not_finite_is_0_and_others_stay() -> None:
    assert finite_norm(torch.tensor(2.5)) == 2.5
    assert finite_norm(torch.tensor(float("nan"))) == 0.0 and finite_norm(torch.tensor(float("inf"))) == 0.0


def test_fairseqs_own_errors_are_errors_of_one_line() -> None:
    with pytest.raises(ConfigurationError, match="model.pt: Optimizer does not match"), checkpoint_errors("model.pt"):
        raise AssertionError("Optimizer does not match")
    with pytest.raises(AsyncError, match="Minimum loss scale"), loss_scale_errors():
        raise FloatingPointError("Minimum loss scale reached")


def test_a_language_model_can_have_a_sentence_in_each_sample() -> None:
    """fairseq's ``--sample-break-mode eos`` asks NumPy for a name that it no longer has."""
    restore_names()
    sentences = [torch.ones(length, dtype=torch.long) for length in (2, 3)]
    blocks = TokenBlockDataset(sentences, np.array([2, 3]), 8, pad=0, eos=2, break_mode="eos")
    assert [len(each) for each in blocks] == [2, 3]


@pytest.fixture
def gloo_of_one() -> Iterator[distributed.ProcessGroup]:
    """A process group of one rank, which is never freed.

    To free it is to join its threads with Python's lock held, and one of them may be waiting for that lock, to let go
    of a hook that is a Python function: both would wait for ever.
    """
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    group = distributed.group.WORLD
    assert group is not None
    KEPT.append(group)
    yield group
    distributed.destroy_process_group()


@pytest.mark.parametrize(("hook", "gradient"), [("none", 1 + 2**-20), ("fp16", 1.0)])
def test_on_a_cpu_too_ranks_may_reduce_their_gradients_in_fp16(
    gloo_of_one: distributed.ProcessGroup, hook: str, gradient: float
) -> None:
    model = nn.Linear(1, 1, bias=False)
    wrapped = ddp_on_cpu(DistributedTrainingConfig(ddp_comm_hook=hook), model, gloo_of_one)
    wrapped(torch.full((1, 1), 1 + 2**-20)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.item() == gradient


@pytest.mark.parametrize(("window", "found"), [(None, 2**14 // 2 // 4), (100, 100)])
def test_a_loss_scaler_has_fairseqs_options_and_its_window_of_a_rank(window: int | None, found: int) -> None:
    common = Namespace(fp16_init_scale=8, fp16_scale_window=window, fp16_scale_tolerance=0.25)
    common.threshold_loss_scale, common.min_loss_scale = 2.0, 0.5
    cfg = Namespace(common=common, optimization=Namespace(update_freq=[4]))
    cfg.distributed_training = Namespace(distributed_world_size=2)
    made = loss_scaler(cfg)
    options = (made.loss_scale, made.scale_window, made.tolerance, made.threshold, made.min_loss_scale)
    assert options == (8, found, 0.25, 2.0, 0.5)


@pytest.mark.parametrize(("worker", "joined", "reports"), [(0, True, True), (1, True, False), (0, False, False)])
def test_worker_0_alone_reports_its_epochs_to_the_servers_schedule(worker: int, joined: bool, reports: bool) -> None:
    told, rates = list[Any](), list[float]()

    def schedule_event(*event: Any) -> Any:
        told.append(event)
        return SimpleNamespace(learning_rate=len(told) / 8)

    client = SimpleNamespace(worker=worker, schedule_event=schedule_event)
    schedule: Any = RemoteSchedule.__new__(RemoteSchedule)
    schedule.optimizer = SimpleNamespace(
        worker=SimpleNamespace(joined=joined, client=client), take_rate=rates.append, get_lr=lambda: 0.75
    )
    schedule.step_begin_epoch(3)
    schedule.step(3, torch.tensor(2.5))
    schedule.step(4)
    assert told == ([("begin_epoch", 3, None), ("end_epoch", 3, 2.5), ("end_epoch", 4, None)] if reports else [])
    assert rates == ([0.125, 0.25, 0.375] if reports else []) and schedule.step_update(7) == 0.75
