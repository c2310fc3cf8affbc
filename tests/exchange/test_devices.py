"""Copies between memory and a GPU, on a fake one whose transfers are done no sooner than somebody waits for them."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.exchange import SharedMemory, devices
from fairseq_async.exchange.copying import copy_fused
from fairseq_async.exchange.devices import PLAIN, CudaDevice, device_of
from fairseq_async.worker.replica import MasterReplica, TensorReplica
from tests.helpers.fake_cuda import FakeCuda, install


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


@pytest.fixture
def gpu(cuda: FakeCuda) -> CudaDevice:
    return CudaDevice(torch.device("cpu"))


def tensors() -> list[Tensor]:
    return [torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(), torch.tensor([5.0, 6.0]).bfloat16(), torch.tensor(7.0)]


def test_a_model_on_the_cpu_is_copied_plainly() -> None:
    assert device_of([torch.zeros(2), torch.zeros(3)]) is PLAIN and device_of([]) is PLAIN


def test_the_slot_is_complete_after_one_transfer_and_one_wait_and_not_before(cuda: FakeCuda, gpu: CudaDevice) -> None:
    slot = torch.zeros(7)
    gpu.pin("slot", slot)
    given = tensors()
    transfer = gpu.begin(slot, given, factor=0.5)
    given[2].fill_(9.0)  # the next backward pass may begin
    assert slot.tolist() == [0.0] * 7 and cuda.late == 1
    transfer.synchronize()
    assert slot.tolist() == [0.5, 1.5, 1.0, 2.0, 2.5, 3.0, 3.5]
    assert (cuda.to_memory, cuda.to_gpu, cuda.unpinned) == (1, 0, 0)
    assert (cuda.event_waits, cuda.synchronisations, len(cuda.recorded)) == (1, 0, 1)


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_gpu_and_plain_copies_write_the_same_bits(gpu: CudaDevice, factor: float) -> None:
    given = [torch.randn(50, 3), torch.randn(40).half(), torch.randn(30).bfloat16()]
    one, other = torch.zeros(220), torch.zeros(220)
    gpu.begin(one, given, factor).synchronize()
    PLAIN.begin(other, given, factor).synchronize()
    assert torch.equal(one, other)


def test_what_was_uploaded_is_there_and_its_source_may_change(cuda: FakeCuda, gpu: CudaDevice) -> None:
    published = torch.arange(4.0)
    gpu.pin("published", published)
    near = gpu.upload(published)
    published.zero_()
    assert near.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (cuda.to_gpu, cuda.to_memory, cuda.event_waits, cuda.synchronisations, cuda.late) == (1, 0, 1, 0, 0)


def test_memory_is_pinned_once_and_let_go_when_another_takes_its_place(cuda: FakeCuda, gpu: CudaDevice) -> None:
    first, second, third = torch.zeros(4), torch.zeros(8), torch.zeros(8)
    gpu.pin("slot", first)
    gpu.pin("slot", first.view(2, 2))  # the same memory
    assert cuda.pinned == {first.data_ptr(): 16}
    gpu.begin(first, [torch.ones(4)])  # nobody waits: as when a worker is interrupted
    gpu.pin("slot", second)
    assert first.tolist() == [1.0] * 4 and cuda.pinned == {second.data_ptr(): 32}
    gpu.pin("slot", third)
    assert cuda.pinned == {third.data_ptr(): 32}, "of the same size, as after a restart of the server"


def test_nothing_stays_pinned_when_the_worker_is_gone(cuda: FakeCuda) -> None:
    gpu = CudaDevice(torch.device("cpu"))
    gpu.pin("slot", torch.zeros(4))
    gpu.fetch([torch.ones(3)])
    assert len(cuda.pinned) == 2
    del gpu
    gc.collect()
    assert not cuda.pinned


def test_memory_that_cannot_be_pinned_is_used_all_the_same(
    cuda: FakeCuda, gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []  # other tests change how messages are logged
    monkeypatch.setattr(devices.logger, "warning", lambda text, *values: said.append(text % values))
    cuda.refuses = True
    slot = torch.zeros(3)
    for _ in range(2):
        gpu.pin("slot", slot)
    gpu.begin(slot, [torch.ones(3)]).synchronize()
    assert slot.tolist() == [1.0] * 3 and cuda.unpinned == 1
    assert len(said) == 1 and "cannot be pinned (CUDA error 712)" in said[0]
    cuda.refuses, another = False, torch.zeros(3)
    gpu.pin("slot", another)
    assert list(cuda.pinned) == [another.data_ptr()], "another vector is tried"


def test_each_vector_of_shared_memory_has_pages_of_its_own(cuda: FakeCuda, gpu: CudaDevice) -> None:
    memory = SharedMemory.create(5, 3)
    for number, vector in enumerate([memory.published, *map(memory.slot, range(3))]):
        assert vector.data_ptr() % 4096 == 0
        gpu.pin(str(number), vector)
    assert len(cuda.pinned) == 4


def test_a_pseudo_gradient_takes_one_transfer_and_the_parameters_another(cuda: FakeCuda) -> None:
    theta, slot = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])
    replica = TensorReplica([("theta", theta)])
    replica.device.pin("slot", slot)
    replica.subtract(slot)
    assert slot.tolist() == [2.0, 1.0]
    replica.write(slot)
    assert theta.tolist() == [2.0, 1.0]
    assert (cuda.to_memory, cuda.to_gpu, cuda.unpinned, cuda.synchronisations) == (1, 1, 0, 0)


def test_masters_of_a_part_of_the_model_go_to_their_places(cuda: FakeCuda) -> None:
    low = [torch.zeros(3).bfloat16(), torch.zeros(2).bfloat16()]
    masters = [(1, torch.tensor([1.0, 2.0])), None]  # this rank's: the last two numbers of the first
    replica = MasterReplica([("a", low[0]), ("b", low[1])], masters)
    slot = torch.full((5,), 9.0)
    replica.device.pin("slot", slot)
    replica.read(slot)
    assert slot.tolist() == [9.0, 1.0, 2.0, 9.0, 9.0]
    replica.subtract(slot)
    assert slot.tolist() == [9.0, 0.0, 0.0, 9.0, 9.0]
    replica.write(torch.arange(5.0))
    assert masters[0] is not None and masters[0][1].tolist() == [1.0, 2.0]
    assert low[0].tolist() == [0.0, 1.0, 2.0] and low[1].tolist() == [3.0, 4.0]
    assert cuda.to_memory == 2 and cuda.synchronisations == 0
    low[0][0] = 9.0  # of another rank
    assert replica.strayed() is None
    low[0][1] = 9.0
    assert replica.strayed() == "a"


@pytest.mark.parametrize("offloaded", [False, True])
def test_masters_are_copied_on_the_gpu_that_the_parameters_are_on_unless_they_are_in_memory(offloaded: bool) -> None:
    """What is uploaded is told apart here by a 1 that is added: a second transfer would have half the bandwidth."""
    low, master = torch.zeros(2).bfloat16(), torch.zeros(2)
    replica = MasterReplica([("a", low)], [(0, master)])
    there: Any = SimpleNamespace(upload=lambda flat: flat + 1.0)
    replica._parameter_device = there
    replica.device = PLAIN if offloaded else there
    replica.write(torch.tensor([2.0, 3.0]))
    assert low.tolist() == [3.0, 4.0] and master.tolist() == ([2.0, 3.0] if offloaded else [3.0, 4.0])


def test_a_fused_copy_takes_tensors_of_any_kind() -> None:
    given = tensors()
    taken = [torch.zeros(each.shape) for each in given]
    copy_fused(taken, given)
    assert all(torch.equal(one, other.float()) for one, other in zip(taken, given, strict=True))
    copy_fused([], [])
