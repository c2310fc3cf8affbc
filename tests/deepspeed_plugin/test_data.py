"""The loader of a worker's batches, and the digest of its first one."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from fairseq_async.deepspeed_plugin.batches import digest_of
from fairseq_async.deepspeed_plugin.data import DataShare, ShardedLoader


@dataclass
class Position:
    """A worker at the beginning of shard 0."""

    sequence: int = 0
    shard: int | None = 0
    offset: int = 0
    done: int = 0
    finished: bool = False


class Numbers:
    """A data set whose sample n is n."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loader(position: Position, endless: bool, workers: int = 2, micro_batches: int = 1) -> ShardedLoader:
    """Twelve samples in batches of two; the worker's shard is its part of them."""
    share = DataShare([12 // workers] * workers, workers, 2, micro_batches, rank=0, ranks=1)
    return ShardedLoader(Numbers(12), share, 1, None, lambda: position, endless)  # type: ignore[arg-type]


def test_without_an_end_of_the_run_a_loop_is_one_pass_over_the_workers_part() -> None:
    """``for epoch in range(2): for batch in loader``: each sample of the worker's half once in an epoch."""
    position = Position()
    batches = loader(position, endless=False)
    assert len(batches) == 3
    for _ in range(2):
        drawn: list[int] = []
        for batch in batches:
            drawn += batch.tolist()  # type: ignore[attr-defined]
            position.done += 1
        assert sorted(drawn) == [0, 1, 2, 3, 4, 5]


def test_with_an_end_of_the_run_a_loop_goes_on_to_it() -> None:
    position = Position()
    drawn: Counter[int] = Counter()
    for batch in loader(position, endless=True):
        drawn.update(batch.tolist())  # type: ignore[attr-defined]
        position.done += 1
        position.finished = position.done == 9
    assert drawn == dict.fromkeys(range(6), 3)


def test_an_epoch_that_ends_within_a_step_goes_on_with_its_next_micro_batch() -> None:
    """Two epochs of three batches are three steps of two: no batch is drawn again, and none is left out."""
    position = Position()
    batches, drawn, count = loader(position, endless=False, micro_batches=2), Counter[int](), 0
    for _ in range(2):
        for batch in batches:
            drawn.update(batch.tolist())  # type: ignore[attr-defined]
            count += 1
            position.done = count // 2
    assert drawn == dict.fromkeys(range(6), 2)


@pytest.mark.parametrize(("samples", "workers", "batches"), [(12, 2, 3), (13, 2, 4), (12, 5, 2), (1, 2, 1)])
def test_the_length_is_that_of_deepspeeds_loader_with_as_many_ranks(samples: int, workers: int, batches: int) -> None:
    share = DataShare([samples], workers, 2, 1, rank=0, ranks=1)
    made = ShardedLoader(Numbers(samples), share, 1, None, Position, endless=True)  # type: ignore[arg-type]
    assert len(made) == batches


def test_a_digest_tells_batches_apart_whatever_holds_their_tensors() -> None:
    ids = torch.arange(6).view(2, 3)
    assert digest_of(((), {"input_ids": ids})) == digest_of([ids.clone()]) != digest_of([ids + 1])
    assert digest_of([ids.bfloat16(), torch.tensor(1.0)]) != digest_of([ids.bfloat16(), torch.tensor(2.0)])
    assert digest_of(("text", {"n": 1})) is None and digest_of([torch.empty(0)]) is None
