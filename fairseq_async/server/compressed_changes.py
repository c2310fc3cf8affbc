"""The parameters from which workers start, sent as their changes since each worker took them last."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment, Int8
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError
from fairseq_async.options import compression
from fairseq_async.server.parameter_server import ParameterServer


class WorkerFragment:
    """One worker's copy of one fragment, and the encoder of the changes that bring this copy to the present version.

    Args:
        options: options of the codec for changes.
        known: the worker's copies, by fragment, as far as the server knows them; this class keeps them up to date.
        turn: the number of the fragment.

    Attributes:
        adds: whether the payload is to be added to the worker's parameters; otherwise it has the parameters themselves.
    """

    def __init__(self, options: compression.PullOptions, known: dict[int, Tensor], turn: int) -> None:
        self.adds = turn in known
        self._codec = compression.build(options) if self.adds else Int8()
        self._known, self._turn = known, turn

    def payload(self, server: ParameterServer, look_ahead: float = 0.0) -> Tensor | None:
        """Returns the payload (uint8), and counts it as sent to the worker; None where it would have NaN or Inf.

        Args:
            look_ahead: how many versions ahead of the present one to go.
        """
        start = torch.empty_like(server.parameters) if look_ahead else server.dispatch_fragment(self._turn)
        if look_ahead:
            server.write_ahead(start, look_ahead)
        start = start.cpu()
        try:
            data = self._codec.encode(start - self._known[self._turn] if self.adds else start)
        except CodecError:
            return None
        values = self._codec.decode(data, start.numel())
        self._known[self._turn] = self._known[self._turn] + values if self.adds else values
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def decode(self, payload: Tensor) -> Tensor:
        """Returns the worker's parameters after its last payload, ``payload``: flat, fp32; the tensor is not changed
        later. They are known here already, so nothing is decoded."""
        return self._known[self._turn]


class CompressedChanges:
    """Keeps a copy of each worker's parameters, and encodes their difference to the server's.

    ::

        r_w ← r_w + Q(θ_v − r_w);  Q(θ_v − r_w) is sent to worker w, which starts from r_w

    as the server's side of EF21-P (Gruntkowska, Tyurin and Richtárik 2022, arXiv 2209.15218). What Q loses is part of
    the next difference. A difference has a smaller range than the parameters: four bits a value are enough for it, and
    too few for parameters. This takes one copy of the parameters for each worker in the server, and one in the worker.

    The two copies must agree. A worker takes all parameters anew when it joins, comes back or connects again, and when
    it takes parameters twice without an update in between. They come in int8, or, of several fragments at once, in
    fp32, and both copies begin from what came. From then on the copies agree without further messages, because answers
    on one connection come in order, and each once.
    """

    def __init__(self, options: compression.PullOptions, fragments: Sequence[Fragment]) -> None:
        self._options, self._fragments = options, fragments
        self._known: dict[int, dict[int, Tensor]] = {}  # r_w, by worker and fragment

    def follow(self, server: ParameterServer) -> None:
        """Does nothing: changes are encoded when a worker asks."""

    def of(self, worker: int, sequence: int | None) -> WorkerFragment | None:
        """Returns the encoder for the fragment that the worker's update of this number is of; None where the worker
        takes several fragments at once, which come in fp32."""
        if sequence is None and len(self._fragments) > 1:
            return None
        turn = (sequence or 0) % len(self._fragments)
        return WorkerFragment(self._options, self._known.setdefault(worker, {}), turn)

    def note_taken(self, worker: int, values: Tensor, sequence: int | None) -> None:
        """Notes the values, of all parameters or of a fragment, that the worker has taken in fp32."""
        if sequence is None:
            parts = {turn: fragment.of(values).to("cpu", copy=True) for turn, fragment in enumerate(self._fragments)}
        else:
            parts = {sequence % len(self._fragments): values.to("cpu", copy=True)}
        self._known.setdefault(worker, {}).update(parts)

    def remove_worker(self, worker: int) -> None:
        """Forgets the parameters of a worker, which takes all of them next."""
        self._known.pop(worker, None)

    def state_dict(self) -> State:
        """Returns the parameters of each worker. A restarted server does without them: its workers connect anew."""
        return {"known": {worker: dict(parts) for worker, parts in self._known.items()}}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`."""
        given = state["known"].items()
        self._known = {
            worker: {turn: part.to("cpu", copy=True) for turn, part in parts.items()} for worker, parts in given
        }
