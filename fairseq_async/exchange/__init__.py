"""How bytes travel. No algorithm here."""

from fairseq_async.exchange.copying import copy, environment, pack, unpack
from fairseq_async.exchange.messages import Channel
from fairseq_async.exchange.shared_memory import SharedMemory

__all__ = ["Channel", "SharedMemory", "copy", "environment", "pack", "unpack"]
