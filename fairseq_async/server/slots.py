"""The vectors between a run's server and its workers: slots, published parameters, and every step between these and
the server's own parameters: fragments, codecs, parts on other machines, parameters ahead."""

import math
import os

import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment, in_turn
from fairseq_async.algorithms.codecs.payload import checksum_of
from fairseq_async.algorithms.missing import clear, elements_of
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ExchangeError, RefusedError, option
from fairseq_async.exchange import GpuMemory, SharedMemory, copy, linux
from fairseq_async.exchange.gpu_memory import IPC
from fairseq_async.method.spec import MethodSpec
from fairseq_async.options import compression
from fairseq_async.protocol import Hello, Pull, PullReply, Push, PushReply
from fairseq_async.protocol.division import exchanged, local_part
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.notices import Tell, tell_log
from fairseq_async.protocol.receipt import Status
from fairseq_async.server.compressed_starts import CompressedFragments, compressed_starts
from fairseq_async.server.network.connections import Peer
from fairseq_async.server.parameter_server import ParameterServer


class Slots:
    """Brings updates from the workers into the server, and parameters to the workers.

    A compressed update travels on the worker's connection, also on the server's own machine. Its values are decoded
    into the worker's slot, where an uncompressed update would be.

    Args:
        count: how many workers there can be at one time.
        gpu: name of the GPU of worker 0's model; empty where there is none.
        tell: passes a line to the user who runs the server.

    Attributes:
        memory: the memory that the server shares with the workers of its machine.
        local_part: the part of the model that is on this machine: all of it, but for shards on others.
    """

    def __init__(self, spec: MethodSpec, layout: Layout, count: int, gpu: str = "", tell: Tell = tell_log) -> None:
        self._starts = compressed_starts(spec, layout)
        publishes = spec.publishes and self._starts is None and not spec.server.hosts
        self.memory = allocate_memory(spec, layout.size, count, publishes, gpu, tell)
        self._apart: set[int] = set()  # workers of this machine that cannot share its memory
        self.local_part, self._fragments = local_part(spec, layout), exchanged(spec, layout)
        self._published = -1
        self._last_pull_sequence: dict[int, int] = {}  # by worker, when it took compressed parameters
        self._sizes = [tuple(segment.size for segment in layout.segments[each.tensors]) for each in self._fragments]
        push = spec.compress.push
        self.codec = None if push is None else compression.build(push)
        self._size = layout.size
        most = 0 if self.codec is None else self.codec.most_bytes([segment.size for segment in layout.segments])
        self._room_bytes = max(4 * layout.size, most)  # worker 0 brings its first parameters in fp32

    # Where they are

    @property
    def device(self) -> torch.device:
        """The device of the slots, and of the server's parameters."""
        return self.memory.device

    def note_shared(self, peer: Peer, hello: Hello) -> None:
        """Notes whether a worker that joins shares memory with the server, or sends tensors behind its messages."""
        on_gpu = isinstance(self.memory, GpuMemory)
        peer.remote = hello.remote or (on_gpu and not hello.gpu)
        (self._apart.add if on_gpu and peer.remote else self._apart.discard)(peer.id)

    def place_of(self, worker: int) -> tuple[str, list[str]]:
        """Returns the fields ``memory`` and ``on_gpu`` of a worker's welcome."""
        if worker in self._apart:
            return "", []
        return self.memory.path, self.memory.shared(worker) if isinstance(self.memory, GpuMemory) else []

    # Updates

    def open(self, peer: Peer) -> None:
        """Makes room for the updates of a worker that has joined. What was sent to it before is forgotten: with a lost
        connection, an answer may have been lost."""
        self.memory.allocate_slot(peer.id)
        if self._starts is not None:
            self._starts.remove_worker(peer.id)
        channel = peer.channel
        channel.any_length = self.codec is not None or self._fragments[0].size < self._size
        if self.codec is not None:  # the system gives no memory for it before something arrives
            channel.room = torch.empty(self._room_bytes, dtype=torch.uint8, device="cpu")
        else:
            channel.room = self._room(peer)

    def _room(self, peer: Peer) -> Tensor | None:
        """Returns where an update arrives that follows a message: in the slot, or in memory on its way to a GPU."""
        return self.memory.slot(peer.id).cpu() if peer.remote else None

    def hold(self, peer: Peer) -> None:
        """Takes no tensor from a worker whose update waits in its slot: it would overwrite what was checked."""
        if self.codec is None:
            peer.channel.room = None

    def release(self, peer: Peer) -> None:
        """Takes tensors again: the update that was in the slot is applied."""
        if self.codec is None and peer.channel.room is None:
            peer.channel.room = self._room(peer)

    def unpack(self, peer: Peer, push: Push) -> str | None:
        """Writes a compressed update, or a fragment, to its place in the slot; returns a payload's checksum, else None.

        Raises:
            RefusedError: a tensor is missing, or has not the size of its fragment.
            CodecError: the payload is not one of this run's codec.
        """
        channel, slot = peer.channel, self.memory.slot(peer.id)
        missing = not channel.with_tensor and (peer.remote or self.codec is not None)
        if missing and (self.codec is None or push.norm is None or math.isfinite(push.norm)):
            raise RefusedError("an update without its tensor")
        if self.codec is None and channel.with_tensor:
            self._place(peer, self._fragment(push.sequence), slot)
        if self.codec is None or missing:
            return None
        data = self._arrived(peer)
        fragment = self._fragment(push.sequence)
        values = self.codec.decode(data, fragment.size, in_turn(self._sizes, push.sequence))
        without = elements_of(int(push.report.missing or "0", 16), in_turn(self._sizes, push.sequence))
        fragment.of(slot).copy_(clear(values, without))  # a codec may round zeros beside larger values up
        return checksum_of(data)

    def _place(self, peer: Peer, fragment: Fragment, slot: Tensor) -> None:
        """Moves a fragment, which arrives at the beginning of the slot, to its place."""
        if peer.channel.tensor_bytes != 4 * fragment.size:
            raise RefusedError(f"the fragment has {4 * fragment.size} bytes: {peer.channel.tensor_bytes} were sent")
        if fragment.elements.start or not slot.is_cpu:
            fragment.of(slot).copy_(torch.frombuffer(self._arrived(peer), dtype=torch.float32).clone())

    def update(self, worker: int, sequence: int) -> Tensor:
        """Returns the worker's update of this number, which is in its slot."""
        return self._fragment(sequence).of(self.memory.slot(worker))

    def first_parameters(self, peer: Peer) -> Tensor:
        """Returns the slot of worker 0, into which it has brought the run's first parameters.

        Raises:
            RefusedError: they have not the model's size.
        """
        slot = self.memory.slot(peer.id)
        if not peer.remote:
            return slot
        if (sent := peer.channel.tensor_bytes) != 4 * self._size:
            raise RefusedError(f"the parameters have {4 * self._size} bytes: {sent} were sent")
        if self.codec is not None or not slot.is_cpu:
            slot.view(torch.uint8).copy_(torch.frombuffer(self._arrived(peer), dtype=torch.uint8))
        return slot

    def _arrived(self, peer: Peer) -> memoryview:
        assert peer.channel.room is not None
        return memoryview(peer.channel.room.view(torch.uint8).numpy().data)[: peer.channel.tensor_bytes]

    # Parameters

    def publish(self, server: ParameterServer) -> None:
        """Publishes changed parameters: in shared memory, where workers read them by themselves, or encoded."""
        before, self._published = self._published, server.version
        if server.version == before:
            return
        if self._starts is not None:
            self._starts.follow(server)
        elif self.memory.publishes:
            self.memory.publish(server.parameters, server.version)
        if before == 0:
            linux.trim()

    def give(self, server: ParameterServer, worker: int, pull: Pull) -> tuple[PullReply, Tensor]:
        """Returns the answer to a pull, and the parameters: a payload, or the worker's slot, into which they were
        written."""
        sequence, compressed = pull.fragment_of, self._starts if pull.starts else None
        if compressed is not None and self._pulls_again(server, worker):
            # only updates are logged: a replay does not know when it took the last changes
            compressed.remove_worker(worker)
        starts = None if compressed is None else compressed.of(worker, sequence)
        if starts is not None and (payload := starts.payload(server, pull.look_ahead)) is not None:
            if server.staleness.compensation:
                server.note_pull(worker, starts.decode(payload))
            return PullReply(server.version, compressed=True, adds=starts.adds), payload
        given, number = self.local_part.of(self.memory.slot(worker)), 0
        if sequence is None:
            number = server.give(worker, given, pull.look_ahead, pull.starts)
        else:
            given = self._fragment(sequence).of(given)
            copy(given, server.dispatch_fragment(sequence))
        if compressed is not None:
            compressed.note_taken(worker, given, sequence)
        self.memory.settle()
        return PullReply(server.version, number=number), given

    def _pulls_again(self, server: ParameterServer, worker: int) -> bool:
        """Notes that a worker takes compressed parameters; returns whether it does so again without an update in
        between, as after a validation."""
        last = server.sequences.get(worker, -1)
        before, self._last_pull_sequence[worker] = self._last_pull_sequence.get(worker), last
        return before == last

    def next_pull(self, push: Push, reply: PushReply) -> Pull | None:
        """Returns the pull that a worker will send after this reply to its push; None if it sends none, or not yet."""
        waits = reply.finished or reply.assignment.idle or reply.status is Status.REFUSED
        if not push.pulls or waits or reply.version == push.base_version:
            return None
        fragment_of = push.sequence if len(self._fragments) > 1 else None
        return Pull(reply.assignment.look_ahead, starts=True, fragment_of=fragment_of)

    def state_dict(self) -> State:
        """Returns what another server needs to send the same; starts of single workers are sent anew."""
        return {"starts": self._starts.state_dict()} if isinstance(self._starts, CompressedFragments) else {}

    def load_state_dict(self, state: State) -> None:
        """Goes on from a state that may have what :meth:`state_dict` returned."""
        if isinstance(self._starts, CompressedFragments) and "starts" in state:
            self._starts.load_state_dict(state["starts"])

    def _fragment(self, sequence: int) -> Fragment:
        """Returns the fragment of an update of this number; with one fragment it is the whole model."""
        return in_turn(self._fragments, sequence)


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
