"""Batches that loader processes make ahead, where what is expected next changes."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import Dataset

from fairseq_async.worker.batch_reader import BatchReader
from fairseq_async.worker.shards import BatchCounter, BatchKey, place


class Keys(Dataset[tuple[BatchKey, str]]):
    """Batches that are their keys in words. There are no more than 500 in a part."""

    def __getitem__(self, key: BatchKey) -> tuple[BatchKey, str]:
        if key[1] >= 500:
            raise ValueError("nobody asked for so many")
        return key, f"{key[1]} of part {key[0]}"


def test_after_a_dealt_step_the_batches_of_the_next_one_are_expected() -> None:
    """Of the four batches of a step of two workers, this one has three, from the fifth on."""
    counter = BatchCounter(micro_batches=2, workers=2)
    position: Any = SimpleNamespace(sequence=1, done=0, first_micro_batch=4, micro_batches=3)
    drawn = [counter.next(position) for _ in range(3)]
    assert [counter.following(key) for key in drawn] == [*drawn[1:], place(8, workers=2, micro_batches=2)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_is_expected_only_now_is_read_although_others_were_made_ahead(num_workers: int) -> None:
    distance = 1
    reader = BatchReader(Keys(), num_workers, False, lambda key: (key[0], key[1] + distance))
    assert reader.read((0, 0)) == "0 of part 0"
    distance = 10
    assert reader.read((0, 1)) == "1 of part 0"
    for number in (11, 21, 22, 12, 90):
        assert reader.read((0, number)) == f"{number} of part 0"
    assert [reader.read(key) for key in ((1, 3), (0, 3), (1, 3))] == ["3 of part 1", "3 of part 0", "3 of part 1"]
