"""What ranks share of their memory, and when they do not."""

import os
from itertools import combinations
from typing import Any

import pytest
import torch

from fairseq_async.collective import agreement
from fairseq_async.collective.adasum.shared_memory import SharedBuffer, SharedMemoryAdasum, open_buffer


def test_a_shared_buffer_is_opened_by_its_address_and_by_no_other() -> None:
    """Another container has other processes under the same numbers, and other files in the same places."""
    buffer = SharedBuffer(16)
    process, descriptor, nbytes, secret = buffer.address()
    first, second = open_buffer(process, descriptor, nbytes, secret), open_buffer(process, descriptor, nbytes, secret)
    assert first is not None and second is not None
    first.copy_(torch.arange(16, dtype=torch.uint8))
    assert second.tolist() == list(range(16))
    assert open_buffer(process, descriptor, nbytes, secret + 1) is None
    assert open_buffer(process, descriptor, nbytes + 1, secret) is None
    other = SharedBuffer(16)
    assert open_buffer(process, other.descriptor, nbytes, secret) is None
    del buffer, other
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_checksum_tells_two_words_that_have_changed_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_AT_ONCE", 4)
    sums = [int(agreement.checksum(torch.arange(10.0)))]
    for i, j in combinations(range(10), 2):
        order = [*range(10)]
        order[i], order[j] = j, i
        sums.append(int(agreement.checksum(torch.arange(10.0)[order])))
    assert sums.count(sums[0]) == 1


class Silent:
    """Messages that nobody may send."""

    rank, size = 0, 2

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


@pytest.mark.parametrize("what", ["double precision", "no memory to share"])
def test_tensors_that_shared_memory_is_not_for_are_left_as_they_are(what: str) -> None:
    shared: Any = SharedMemoryAdasum(Silent())  # type: ignore[arg-type]
    shared.possible = what == "double precision"
    tensors = [torch.ones(3, dtype=torch.float64 if shared.possible else torch.float32)]
    assert not shared.combine(tensors) and tensors[0].tolist() == [1.0] * 3
