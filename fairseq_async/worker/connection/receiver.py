"""The worker's side of a pull: where the parameters behind the server's answer arrive, and how they are decoded."""

import torch
from torch import Tensor

from fairseq_async.algorithms import Int8, in_turn
from fairseq_async.algorithms.codecs.payload import checksum_of
from fairseq_async.errors import ProtocolError
from fairseq_async.exchange import Channel
from fairseq_async.method.spec import MethodSpec
from fairseq_async.options import compression
from fairseq_async.protocol import Layout, Pull, PullReply


class ParameterReceiver:
    """Writes the parameters that a worker receives into its slot.

    Compressed parameters come on the connection, also from a server on this machine. Parameters in fp32 come behind
    the answer of a server on another machine; a server on this machine has written them into the slot.

    Attributes:
        payload: checksum of the last payload; None where the last parameters came in fp32.
    """

    def __init__(self, spec: MethodSpec, layout: Layout) -> None:
        pull, size = spec.compress.pull, layout.size
        self._codec = None if pull is None else compression.build(pull)
        self._fragments = layout.fragments(spec.fragments)
        # the parameters that were taken last, to which received changes are added
        sends_changes = pull is not None and compression.sends_changes(pull)
        self._reference = torch.zeros(size, dtype=torch.float32, device="cpu") if sends_changes else None
        codecs = [] if self._codec is None else [self._codec, Int8()]  # changes begin from parameters in int8
        most = max([4 * size, *(codec.most_bytes([size]) for codec in codecs)])
        self._room = torch.empty(most if codecs else 0, dtype=torch.uint8, device="cpu")
        self.payload: str | None = None

    def open(self, channel: Channel, slot: Tensor | None) -> None:
        """Sets where a new connection receives parameters; ``slot`` is None if the server is on this machine."""
        channel.any_length = self._codec is not None
        channel.room = slot if self._codec is None else self._room

    def take(self, channel: Channel, reply: PullReply, slot: Tensor, pull: Pull) -> int:
        """Writes the parameters of the last answer, which answers ``pull``, into their place in the slot; returns
        their number of bytes.

        Raises:
            ProtocolError: they were not sent, or do not have the size that was asked for.
            CodecError: the payload is not of this run's codec.
        """
        whole = pull.fragment_of is None
        place = slice(None) if whole else in_turn(self._fragments, pull.fragment_of or 0).elements
        part, self.payload = slot[place], None
        size = channel.tensor_bytes if channel.with_tensor else 0
        if reply.compressed:
            self._decode(memoryview(self._room.numpy().data)[:size], reply.adds, place, part)
            return size
        if self._codec is not None and channel.with_tensor:
            self._unpack(size, part)
        if self._reference is not None and pull.starts:
            self._reference[place] = part
        return 4 * part.numel()

    def _decode(self, data: memoryview, adds: bool, place: slice, part: Tensor) -> None:
        if self._codec is None:
            raise ProtocolError("a payload came: nothing is compressed in this run")
        if self._reference is None:
            part.copy_(self._codec.decode(data, part.numel()))
        elif adds:
            part.copy_(self._reference[place].add_(self._codec.decode(data, part.numel())))
        else:
            part.copy_(self._reference[place].copy_(Int8().decode(data, part.numel())))
        self.payload = checksum_of(data)

    def _unpack(self, size: int, part: Tensor) -> None:
        if size != 4 * part.numel():
            raise ProtocolError(f"parameters of {size} bytes came: {4 * part.numel()} were asked for")
        part.view(torch.uint8).copy_(self._room[:size])
