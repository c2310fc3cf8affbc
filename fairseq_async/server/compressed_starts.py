"""The parameters from which workers start, in few bytes: encoded once for each version, for all workers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_async.algorithms import in_turn
from fairseq_async.algorithms.codecs.payload import checksum_of
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError
from fairseq_async.method.spec import MethodSpec
from fairseq_async.options import compression
from fairseq_async.protocol.layout import Layout
from fairseq_async.server.compressed_changes import CompressedChanges
from fairseq_async.server.parameter_server import ParameterServer


class CompressedStarts:
    """Encodes the start of work at each version of the parameters: θ_v, or what a rule's ``dispatch`` makes of it.

    Where the model is exchanged in fragments, an instance encodes one fragment, at that fragment's versions.

    A payload has whole parameters, not their changes, and every worker that starts from a version gets the same one: no
    error adds up, nothing depends on what a worker has had before, and a lost answer is asked for again. With bf16 the
    payload has the rounded parameters. What int8 loses of one version is added to the next::

        c_v = θ_v + (c_(v−1) − Q(c_(v−1)));  Q(c_v) is sent

    so that the mean over versions of what is sent approaches that of the parameters, and a change too small for a level
    of int8 shows after some versions. This takes one vector for all workers, c_v. What is sent is never further from
    θ_v than two roundings.

    Parameters with NaN or Inf have no payload: they are sent in fp32.

    Args:
        options: options of the codec.
        turn: the fragment's number, which is the sequence number of an update of it.

    Attributes:
        version: the version of the parameters that were encoded last.
    """

    adds = False  # a payload has the parameters themselves

    def __init__(self, options: compression.PullOptions, turn: int = 0) -> None:
        self._turn = turn
        self._codec = compression.build(options)
        self._keeps_loss = isinstance(options, compression.Int8Options)
        self._carried: Tensor | None = None  # c_v; a checkpoint has it and no payload, which is a function of it
        self._payload: Tensor | None = None
        self._size = 0
        self.version = -1

    def follow(self, server: ParameterServer) -> None:
        """Encodes the server's present version, unless it is encoded already."""
        if (version := server.changed_at(self._turn)) == self.version:
            return
        start = server.dispatch_fragment(self._turn).cpu()
        self.version, self._size = version, start.numel()
        if self._keeps_loss:
            start = self._carry(start)
        self._payload = self._encoded(start)

    def payload(self, server: ParameterServer, look_ahead: float = 0.0) -> Tensor | None:
        """Returns the payload (uint8) of the server's present version; None where its parameters have NaN or Inf.

        Args:
            look_ahead: how many versions ahead of the present one to go. Parameters ahead are for one worker alone:
                they are encoded with the carried loss, but do not change it.
        """
        self.follow(server)
        if not look_ahead:
            return self._payload
        ahead = torch.empty_like(server.parameters)
        server.write_ahead(ahead, look_ahead)
        if self._carried is not None:
            ahead.sub_(server.parameters).add_(self._carried.to(ahead))
        return self._encoded(ahead)

    def decode(self, payload: Tensor) -> Tensor:
        """Returns the parameters that a worker decodes from a payload: flat, fp32."""
        return self._codec.decode(payload.numpy().data, self._size)

    def state_dict(self) -> State:
        """Returns the state that the payloads of later versions depend on."""
        return {"version": self.version, "carried": self._carried}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`."""
        if self._keeps_loss and state["carried"] is not None:
            self.version, self._carried = state["version"], state["carried"].to("cpu", copy=True)
            self._size = self._carried.numel()
            self._payload = self._encoded(self._carried)

    def _carry(self, start: Tensor) -> Tensor:
        """Returns c_v; it is a copy of ``start`` if there is no loss to carry."""
        if self._carried is None or self._payload is None:
            self._carried = start.clone()
        else:
            self._carried.sub_(self.decode(self._payload)).add_(start)
        return self._carried

    def _encoded(self, start: Tensor) -> Tensor | None:
        try:
            return torch.frombuffer(bytearray(self._codec.encode(start)), dtype=torch.uint8)
        except CodecError:
            return None


class CompressedFragments:
    """The compressed starts of each fragment of the model; a model that is exchanged whole has one fragment.

    A worker that takes several fragments at once, as it does when it joins, gets them in fp32.
    """

    def __init__(self, fragments: Sequence[CompressedStarts]) -> None:
        self._fragments = fragments

    def follow(self, server: ParameterServer) -> None:
        """Encodes the fragments that have changed since the last call."""
        for each in self._fragments:
            each.follow(server)

    def of(self, worker: int, sequence: int | None) -> CompressedStarts | None:
        """Returns the encoder of the fragment that an update of this number is of; for None that of the whole model, or
        None if the model has several fragments. It is the same for every worker."""
        if sequence is not None:
            return in_turn(self._fragments, sequence)
        return self._fragments[0] if len(self._fragments) == 1 else None

    def note_taken(self, worker: int, values: Tensor, sequence: int | None) -> None:
        """Does nothing: no payload depends on what a worker has."""

    def remove_worker(self, worker: int) -> None:
        """Does nothing: no state is kept for a worker."""

    def state_dict(self) -> State:
        """Returns the state that the payloads of later versions depend on."""
        if len(self._fragments) == 1:
            return self._fragments[0].state_dict()
        return {"fragments": [each.state_dict() for each in self._fragments]}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`, which must have as many fragments."""
        for each, own in zip(self._fragments, state.get("fragments", [state]), strict=True):
            each.load_state_dict(own)


def compressed_starts(spec: MethodSpec, layout: Layout) -> CompressedFragments | CompressedChanges | None:
    """Makes the encoder of a run's starts; None where workers get them in fp32."""
    pull = spec.compress.pull
    if pull is None:
        return None
    if compression.sends_changes(pull):
        return CompressedChanges(pull, layout.fragments(spec.fragments))
    return CompressedFragments([CompressedStarts(pull, fragment) for fragment in range(spec.fragments)])


def checksum(payload: Tensor | None) -> str | None:
    """Returns the checksum by which a log names a payload; None for no payload."""
    return None if payload is None else checksum_of(payload.numpy().data)
