"""Moves bytes between processes and devices: channels, shared memory, copies. Contains no training algorithm."""

from fairseq_async.exchange.channel import Channel
from fairseq_async.exchange.copying import copy, pack, unpack
from fairseq_async.exchange.gpu_memory import GpuMemory
from fairseq_async.exchange.shared_memory import SharedMemory

__all__ = ["Channel", "GpuMemory", "SharedMemory", "copy", "pack", "unpack"]
