"""Times the exchange between a GPU and shared memory, by this package's copies and tensor by tensor."""

import time
from collections.abc import Callable

import torch

from fairseq_async.exchange import SharedMemory
from fairseq_async.exchange.devices import CudaDevice

TENSORS, SIZE = 200, 125_000  # 25 million parameters


def milliseconds(action: Callable[[], object]) -> float:
    """Returns the milliseconds of the fastest of ten calls."""
    taken = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - began))
    return min(taken)


def main() -> None:
    """Prints one line for each direction."""
    model = [torch.randn(SIZE, device="cuda") for _ in range(TENSORS)]
    memory, plain = SharedMemory.create(TENSORS * SIZE, 1), torch.zeros(TENSORS * SIZE)
    memory.allocate_slot(0)
    slot, device = memory.slot(0), CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    device.pin("slot", slot)
    down = milliseconds(lambda: device.begin(slot, model).synchronize())
    up = milliseconds(lambda: device.upload(slot))
    apart = milliseconds(lambda: [part.copy_(each) for part, each in zip(plain.split(SIZE), model, strict=True)])
    back = milliseconds(lambda: [each.copy_(part) for part, each in zip(plain.split(SIZE), model, strict=True)])
    print(f"{torch.cuda.get_device_name()}, {TENSORS * SIZE / 1e6:.0f} million parameters in {TENSORS} tensors")
    print(f"to memory: {down:.1f} ms; tensor by tensor {apart:.1f} ms")
    print(f"to the GPU: {up:.1f} ms; tensor by tensor {back:.1f} ms")


if __name__ == "__main__":
    main()
