"""Transfers between memory and a real GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.exchange import SharedMemory
from fairseq_async.exchange.devices import PLAIN, CudaDevice, device_of
from fairseq_async.worker.changes import ParameterWatch
from fairseq_async.worker.replica import MasterReplica, TensorReplica

SIZES = (3, 5), (), (1000, 1000), (0, 4), (70_001,)


@pytest.fixture
def gpu() -> CudaDevice:
    return CudaDevice(torch.device("cuda", 0))


def tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_gpu_and_the_cpu_write_the_same_bits(
    gpu: CudaDevice, dtype: torch.dtype, factor: float, pinned: bool
) -> None:
    given = tensors(dtype)
    size = sum(each.numel() for each in given)
    memory = SharedMemory.create(size, 1)
    memory.allocate_slot(0)
    expected = torch.zeros(size)
    PLAIN.begin(expected, given, factor)
    there = [each.cuda() for each in given]
    if pinned:
        gpu.pin("slot", memory.slot(0))
        assert memory.slot(0).is_pinned()
    for _ in range(3):
        memory.slot(0).fill_(torch.nan)
        gpu.begin(memory.slot(0), there, factor).synchronize()
        assert torch.equal(memory.slot(0), expected)
    assert torch.equal(gpu.upload(memory.slot(0)).cpu(), expected)


def test_a_transfer_waits_for_the_work_before_it_and_not_for_the_work_after_it(gpu: CudaDevice) -> None:
    values, slot = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20)
    gpu.pin("slot", slot)
    torch.cuda._sleep(100_000_000)  # cycles: the gradient is late
    values.fill_(7.0)
    transfer = gpu.begin(slot, [values])
    values.fill_(9.0)  # the next backward pass
    transfer.synchronize()
    assert slot.unique().tolist() == [7.0]


def test_what_was_uploaded_is_there_though_its_source_has_changed(gpu: CudaDevice) -> None:
    published = torch.full((1 << 22,), 3.0)
    gpu.pin("published", published)
    for _ in range(5):
        published.fill_(3.0)
        near = gpu.upload(published)
        published.fill_(4.0)
        assert near.unique().tolist() == [3.0]


def test_memory_is_not_pinned_any_more_when_another_takes_its_place(gpu: CudaDevice) -> None:
    first, second = torch.zeros(1 << 16), torch.zeros(1 << 16)
    gpu.pin("slot", first)
    gpu.pin("slot", second)
    assert second.is_pinned() and not first.is_pinned()


def test_a_failed_registration_spoils_no_later_kernel(gpu: CudaDevice) -> None:
    slot = torch.zeros(1 << 16)
    gpu.pin("one", slot)
    gpu.pin("two", slot)  # is refused: it is registered
    assert torch.ones(5, device="cuda").sum().item() == 5.0


def test_replicas_on_the_gpu_and_on_the_cpu_are_equal() -> None:
    values = tensors(torch.float32)
    here = [(str(number), Parameter(each.clone())) for number, each in enumerate(values)]
    there = [(name, Parameter(each.detach().cuda())) for name, each in here]
    assert isinstance(device_of([each for _, each in there]), CudaDevice)
    low = [(name, each.detach().bfloat16()) for name, each in there]
    masters = [(0, each.detach().view(-1)) for _, each in there]
    for replica in (TensorReplica(there), MasterReplica(low, masters)):
        one, other = (torch.linspace(-1, 1, replica.layout.size) for _ in range(2))
        TensorReplica(here).subtract(one)
        replica.subtract(other)
        assert torch.equal(one, other)
        replica.write(one)
        replica.read(other)
        assert torch.equal(one, other)
        replica.write(torch.cat([each.flatten() for each in values]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_change_of_one_value_on_the_gpu_is_noticed(dtype: torch.dtype) -> None:
    there = [(str(number), each.cuda()) for number, each in enumerate(tensors(dtype))]
    watch = ParameterWatch(there)
    watch.note()
    assert watch.changed() is None
    for name, tensor in there:
        if tensor.numel():
            before = tensor.clone()
            tensor.view(-1)[-1] += 1
            assert watch.changed() == name
            tensor.copy_(before)
    assert watch.changed() is None
