"""fairseq's epochs over the batches that the server deals, by hand: a position in place of a worker."""

from types import SimpleNamespace
from typing import Any

import pytest
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator
from torch.utils.data import Dataset

from fairseq_async.fairseq_plugin.compat.dealt import DEALT, DealtEpochs, can_be_dealt, grouped
from fairseq_async.fairseq_plugin.replayed import ReplayedWorker
from fairseq_async.server.rounds.dealer import Dealer

BATCHES = 11  # of two workers with four each in a step: a step of eight, and one of three that is filled up


class Numbers(Dataset[int]):
    """Samples that are their numbers and, where they change with the pass, the pass."""

    epoch = 1

    def __getitem__(self, number: int) -> int:
        return 1000 * self.epoch + number

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def iterator(**given: Any) -> EpochBatchIterator:
    """Each batch is of one sample."""
    return EpochBatchIterator(Numbers(), list, [[number] for number in range(BATCHES)], **{"buffer_size": 3} | given)


def at(first: int, number: int, sequence: int = 0) -> Any:
    return SimpleNamespace(
        sequence=sequence, shard=0, offset=0, done=0, first_micro_batch=first, micro_batches=number, finished=False
    )


def part(worker: int, epoch: int, shuffle: bool = True) -> list[list[int]]:
    """What fairseq draws for one of two workers in a pass."""
    own = iterator(num_shards=2, shard_id=worker, epoch=epoch)
    return list(own.next_epoch_itr(shuffle=shuffle))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("curriculum", [0, 1])
def test_workers_of_equal_speed_draw_fairseqs_own_parts_step_by_step(num_workers: int, curriculum: int) -> None:
    for worker in (0, 1):
        position = at(4 * worker, 4)
        epochs = DealtEpochs(iterator(num_workers=num_workers), position, 2, 4, curriculum)
        for epoch in (1, 2):
            batches = grouped(epochs.next_epoch_itr(), 1)
            drawn, sizes = [], []
            for batch in batches:
                drawn += batch
                if len(drawn) % 4 == 0:
                    sizes.append(epochs.iterations_in_epoch)
                    position.sequence += 1
                    position.first_micro_batch += 8
            assert epochs.epoch == epoch and epochs.end_of_epoch() and sizes == [0, 4]
            expected = part(worker, epoch, shuffle=epoch > curriculum)
            assert list(filter(len, drawn)) == list(filter(len, expected)) and len(drawn) == 8


def test_a_replay_draws_as_fairseq_trains() -> None:
    """The first epoch is in the order of the data, and the later ones have two batches in a step."""
    begun, epochs = list[int](), iterator(num_shards=2, shard_id=1)
    trainer = SimpleNamespace(
        get_train_iterator=lambda *_, **__: epochs, begin_epoch=begun.append, lr_step=lambda *_: None
    )
    cfg = SimpleNamespace(
        dataset=SimpleNamespace(curriculum=1),
        distributed_training=SimpleNamespace(fix_batches_to_gpus=False),
        optimization=SimpleNamespace(update_freq=[1, 2], skip_remainder_batch=False),
    )
    task = SimpleNamespace(has_sharded_data=lambda split: False)
    replayed: Any = SimpleNamespace(cfg=cfg, trainer=trainer, task=task)
    drawn = ReplayedWorker._draw(replayed)
    for epoch, frequency in ((1, 1), (2, 2), (3, 2)):
        steps = [next(drawn) for _ in range(6 // frequency)]
        assert {len(step) for step in steps} == {frequency} and begun[-1] == epoch
        assert [batch for step in steps for batch in step] == part(1, epoch, shuffle=epoch > 1)


def test_whatever_the_shares_each_batch_of_a_pass_is_drawn_once_by_all_workers_together() -> None:
    """Gradients of six batches and of two, which do not come in turn: one reaches into the third pass."""
    dealer, drawn = Dealer(2, 4), []
    positions = [at(*dealer.deal(worker, 0, 4)) for worker in (0, 1)]
    both = [DealtEpochs(iterator(), position, 2, 4, 0) for position in positions]
    begun = [epochs.next_epoch_itr() for epochs in both]
    ends = []
    for worker in (0, 1, 0, 0, 1, 0, 0, 1, 0):
        position, epochs = positions[worker], both[worker]
        if epochs.end_of_epoch():
            ends.append((worker, epochs.epoch))
            begun[worker] = epochs.next_epoch_itr()
        drawn += [next(begun[worker])[0] for _ in range(position.micro_batches)]
        position.sequence += 1
        position.first_micro_batch, position.micro_batches = dealer.deal(worker, position.sequence, (6, 2)[worker])
    first = [batch for batch in drawn if batch and batch[0] < 2000]
    second = [batch for batch in drawn if batch and 2000 <= batch[0] < 3000]
    assert sorted(first) == [[1000 + number] for number in range(BATCHES)]
    assert sorted(second) == [[2000 + number] for number in range(BATCHES)]
    assert ends == [(0, 1), (1, 1), (0, 2)]


def test_a_position_is_one_from_which_fairseqs_own_iterator_can_go_on() -> None:
    epochs = DealtEpochs(iterator(), at(8 + 16, 6), 2, 4, 0)
    assert epochs.state_dict() == {
        "version": 2,
        "shuffle": True,
        DEALT: True,
        "epoch": 2,
        "iterations_in_epoch": 4,
    }
    own = iterator(num_shards=2)
    own.load_state_dict(epochs.state_dict())
    assert list(own.next_epoch_itr()) == part(0, 2)[4:]


def test_batches_that_are_skipped_are_followed_by_those_of_the_next_step() -> None:
    batches = DealtEpochs(iterator(), at(0, 2), 2, 2, 0).next_epoch_itr()
    assert [next(batches)[0] for _ in range(4)] == part(0, 1)[:4]


def test_batches_that_are_not_the_same_in_each_pass_cannot_be_dealt() -> None:
    made_anew = EpochBatchIterator(Numbers(), list, lambda dataset, epoch: [[0], [1]])
    assert can_be_dealt(iterator(), cached=True)
    assert not can_be_dealt(iterator(), cached=False)
    assert not can_be_dealt(made_anew, cached=True)
    assert not can_be_dealt(iterator(grouped_shuffling=True), cached=True)
    assert not can_be_dealt(GroupedIterator([], 1), cached=True)


def test_other_iterators_are_grouped_by_fairseq() -> None:
    assert list(grouped(iterator().next_epoch_itr(shuffle=False), 4))[0] == [[1000], [1001], [1002], [1003]]
