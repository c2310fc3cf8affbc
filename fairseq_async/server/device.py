"""Where a server keeps its parameters, its rule's state and the slots: in memory, or on a GPU of its workers."""

import os
from typing import TypeVar

import torch
from torch import Tensor

from fairseq_async.errors import ExchangeError, RefusedError, option
from fairseq_async.exchange import GpuMemory, SharedMemory
from fairseq_async.exchange.gpu_memory import IPC
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.notices import Tell

_Value = TypeVar("_Value")


def allocate_memory(
    spec: MethodSpec, size: int, workers: int, publishes: bool, gpu: str, tell: Tell
) -> SharedMemory | GpuMemory:
    """Allocates what the server of a run shares with its workers, on the device that ``server_device`` says.

    Args:
        gpu: name of the GPU of worker 0's model; empty where it is on the CPU.
        tell: passes a line to the user, for ``auto``: which device it is, and why.

    Raises:
        RefusedError: the server cannot use that GPU.
        ExchangeError: there is no room for it.
    """
    wanted = spec.server.server_device
    if wanted == "cpu":
        return SharedMemory.create(size, workers, publishes)
    try:
        memory = GpuMemory.create(size, workers, publishes, _device(spec, gpu))
    except (RefusedError, ExchangeError) as error:
        if wanted == "cuda":
            raise type(error)(f"{error}; give {option('server_device')} cpu") from error
        tell(f"the server is on the CPU: {error}")
        return SharedMemory.create(size, workers, publishes)
    if wanted == "auto":
        tell("the server is on the GPU of worker 0's model, which has room for it")
    return memory


def _device(spec: MethodSpec, gpu: str) -> torch.device:
    """Returns the GPU in this process.

    Hazard: a process decides once which GPUs it sees. A server begins without any, so that none of its libraries
    takes memory there, and until now nothing has asked CUDA.
    """
    if not gpu:
        raise RefusedError("the model of worker 0 is not on a GPU")
    if spec.server.shards > 1 or spec.upstream is not None or spec.server.record:
        raise RefusedError("shards, a global server and recordings are for servers on the CPU")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    device = IPC.find(gpu)
    if device is None:
        raise RefusedError(f"the server's process does not see {gpu}")
    return device


def moved(state: _Value, device: torch.device) -> _Value:
    """Returns a state with its tensors on the device. Those that are there already are the same ones."""
    if isinstance(state, dict):
        return {key: moved(value, device) for key, value in state.items()}  # type: ignore[return-value]
    if isinstance(state, list | tuple):
        return type(state)(moved(value, device) for value in state)
    return state.to(device) if isinstance(state, Tensor) else state  # type: ignore[return-value]
