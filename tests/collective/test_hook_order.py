"""Adasum's hook works off the buckets one after the other, and says what went wrong."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.collective import AdasumState, adasum_hook
from fairseq_async.collective.adasum import hooks


class Bucket:
    """As DistributedDataParallel hands it over: gradients that are views of one buffer."""

    def __init__(self, *values: float) -> None:
        self._buffer = torch.tensor(values)

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return list(self._buffer.split(1))


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(hooks, "DistributedAdasum", lambda group: None)
    return AdasumState()


def test_buckets_are_combined_in_their_order_however_long_one_takes(state: Any) -> None:
    """Else two ranks would combine different buckets with each other."""
    begun, go_on = threading.Event(), threading.Event()
    order: list[float] = []

    def combine(gradients: Sequence[Tensor]) -> None:
        if not order:
            begun.set()
            assert go_on.wait(30)
        order.append(float(gradients[0]))
        for gradient in gradients:
            gradient.mul_(10)

    state.combine = combine
    try:
        futures = [adasum_hook(state, bucket) for bucket in (Bucket(1.0, 2.0), Bucket(3.0), Bucket(4.0))]  # type: ignore[arg-type]
        assert begun.wait(30) and order == [] and not any(future.done() for future in futures)
    finally:
        go_on.set()
    assert [future.wait().tolist() for future in futures] == [[10.0, 20.0], [30.0], [40.0]]
    assert order == [1.0, 3.0, 4.0]


def test_an_error_in_the_thread_is_raised_where_the_bucket_is_waited_for(state: Any) -> None:
    def combine(gradients: Sequence[Tensor]) -> None:
        raise RuntimeError("a rank is gone")

    state.combine = combine
    with pytest.raises(RuntimeError, match="a rank is gone"):
        adasum_hook(state, Bucket(1.0)).wait()  # type: ignore[arg-type]
