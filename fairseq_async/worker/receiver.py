"""The parameters behind a server's answers in a worker: where they arrive, and how compressed ones are decoded."""

import torch
from torch import Tensor

from fairseq_async import compression
from fairseq_async.algorithms.codecs.payload import checksum_of
from fairseq_async.errors import ProtocolError
from fairseq_async.exchange import Channel
from fairseq_async.method_spec import MethodSpec
from fairseq_async.server import Layout
from fairseq_async.server.protocol import PullReply


class ParameterReceiver:
    """Brings parameters from a worker's connection into its slot.

    Compressed ones come on the connection, also from a server on this machine. Parameters in fp32 come behind the
    answer of a server on another machine; one on this machine has written them into the slot.

    Attributes:
        payload: checksum of the payload that came last; None where the last parameters came in fp32.
    """

    def __init__(self, spec: MethodSpec, layout: Layout) -> None:
        pull = spec.compress.pull
        self._codec = None if pull is None else compression.build(pull)
        most = 0 if self._codec is None else self._codec.most_bytes([layout.size])
        self._room = torch.empty(max(4 * layout.size, most) if most else 0, dtype=torch.uint8)
        self.payload: str | None = None

    def open(self, channel: Channel, slot: Tensor | None) -> None:
        """Makes room on a new connection; ``slot`` is that of a worker to whom fp32 comes behind the answers."""
        channel.any_length = self._codec is not None
        channel.room = slot if self._codec is None else self._room

    def take(self, channel: Channel, reply: PullReply, slot: Tensor) -> int:
        """Writes the parameters of the answer that came last into the slot, or the part of it that was asked for;
        returns their bytes.

        Raises:
            ProtocolError: they are not there, or not of its size.
            CodecError: the payload is none of this run's codec.
        """
        self.payload = None
        if self._codec is None or not (channel.with_tensor or reply.compressed):
            return 4 * slot.numel()  # they are there
        size = channel.tensor_bytes if channel.with_tensor else 0
        data = memoryview(self._room.numpy().data)[:size]
        if reply.compressed:
            slot.copy_(self._codec.decode(data, slot.numel()))
            self.payload = f"{checksum_of(data):08x}"
        elif size != 4 * slot.numel():
            raise ProtocolError(f"parameters of {size} bytes came: {4 * slot.numel()} were asked for")
        else:
            slot.view(torch.uint8).copy_(self._room[:size])
        return size
