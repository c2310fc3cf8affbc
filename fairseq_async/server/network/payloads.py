"""The tensors behind messages to a server: where they arrive, and how compressed ones are decoded."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment, in_turn
from fairseq_async.algorithms.codecs.payload import checksum_of
from fairseq_async.algorithms.missing import clear, elements_of
from fairseq_async.errors import RefusedError
from fairseq_async.method.spec import MethodSpec
from fairseq_async.options import compression
from fairseq_async.protocol import Push
from fairseq_async.protocol.layout import Layout
from fairseq_async.server.network.peers import Peer


class Payloads:
    """Brings the tensors behind a worker's messages into its slot.

    A compressed update travels on the worker's connection, also on the server's own machine. Its values are decoded
    into the worker's slot, where an uncompressed update would be.
    """

    def __init__(self, spec: MethodSpec, layout: Layout, fragments: Sequence[Fragment]) -> None:
        self._fragments = fragments
        self._sizes = [tuple(segment.size for segment in layout.segments[each.tensors]) for each in fragments]
        push = spec.compress.push
        self.codec = None if push is None else compression.build(push)
        self._size = layout.size
        most = 0 if self.codec is None else self.codec.most_bytes([segment.size for segment in layout.segments])
        self._room_bytes = max(4 * layout.size, most)  # worker 0 brings its first parameters in fp32

    def open(self, peer: Peer, slot: Tensor) -> None:
        """Makes room for the tensors behind the messages of a worker that has joined."""
        channel = peer.channel
        channel.any_length = self.codec is not None or self._fragments[0].size < self._size
        if self.codec is not None:  # the system gives no memory for it before something arrives
            channel.room = torch.empty(self._room_bytes, dtype=torch.uint8, device="cpu")
        else:
            channel.room = slot if peer.remote else None

    def hold(self, peer: Peer) -> None:
        """Takes no tensor from a worker whose update waits in its slot: it would overwrite what was checked."""
        if self.codec is None:
            peer.channel.room = None

    def release(self, peer: Peer, slot: Tensor) -> None:
        """Takes tensors again: the update that was in the slot is applied."""
        if self.codec is None and peer.remote:
            peer.channel.room = slot

    def unpack(self, peer: Peer, push: Push, slot: Tensor) -> str | None:
        """Writes a compressed update, or a fragment, to its place in the slot; returns a payload's checksum, else None.

        Raises:
            RefusedError: a tensor is missing, or has not the size of its fragment.
            CodecError: the payload is not one of this run's codec.
        """
        channel = peer.channel
        missing = not channel.with_tensor and (peer.remote or self.codec is not None)
        if missing and (self.codec is None or push.norm is None or math.isfinite(push.norm)):
            raise RefusedError("an update without its tensor")
        if self.codec is None and channel.with_tensor:
            self._place(peer, in_turn(self._fragments, push.sequence), slot)
        if self.codec is None or missing:
            return None
        data = self._arrived(peer)
        fragment = in_turn(self._fragments, push.sequence)
        values = self.codec.decode(data, fragment.size, in_turn(self._sizes, push.sequence))
        without = elements_of(int(push.report.missing or "0", 16), in_turn(self._sizes, push.sequence))
        fragment.of(slot).copy_(clear(values, without))  # a codec may round zeros beside larger values up
        return checksum_of(data)

    def _place(self, peer: Peer, fragment: Fragment, slot: Tensor) -> None:
        """Moves a fragment, which arrives at the beginning of the slot, to its place."""
        if peer.channel.tensor_bytes != 4 * fragment.size:
            raise RefusedError(f"the fragment has {4 * fragment.size} bytes: {peer.channel.tensor_bytes} were sent")
        if fragment.elements.start:
            fragment.of(slot).copy_(slot[: fragment.size].clone())

    def take_parameters(self, peer: Peer, slot: Tensor) -> None:
        """Writes the parameters that a worker on another machine has sent into the slot.

        Raises:
            RefusedError: they have not the model's size.
        """
        if not peer.remote:
            return  # they are in the slot already
        if (sent := peer.channel.tensor_bytes) != 4 * self._size:
            raise RefusedError(f"the parameters have {4 * self._size} bytes: {sent} were sent")
        if self.codec is not None:
            slot.view(torch.uint8).copy_(torch.frombuffer(self._arrived(peer), dtype=torch.uint8))

    def _arrived(self, peer: Peer) -> memoryview:
        assert peer.channel.room is not None
        return memoryview(peer.channel.room.numpy().data)[: peer.channel.tensor_bytes]
