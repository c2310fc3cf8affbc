"""How bytes travel. No algorithm here."""

from fairseq_async.exchange.channel import Channel
from fairseq_async.exchange.copying import copy, pack, unpack
from fairseq_async.exchange.shared_memory import SharedMemory

__all__ = ["Channel", "SharedMemory", "copy", "pack", "unpack"]
