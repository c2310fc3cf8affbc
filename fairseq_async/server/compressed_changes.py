"""The parameters from which workers start, as what has changed of them since each worker took them last."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_async import compression
from fairseq_async.algorithms import Fragment
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError
from fairseq_async.server.parameter_server import ParameterServer


class WorkersChanges:
    """Encodes for one worker, and one fragment of the model, what takes it to the present version.

    Args:
        reference: the worker's parameters in this fragment, of which it has a copy; both add what is sent to them.
        turn: the number of an update of the fragment.
    """

    def __init__(self, options: compression.PullOptions, reference: Tensor, turn: int) -> None:
        self._codec, self._reference, self._turn = compression.build(options), reference, turn

    def payload(self, server: ParameterServer, look_ahead: float = 0.0) -> Tensor | None:
        """The payload (uint8), which the worker must be sent; None where something has NaN or Inf.

        Args:
            look_ahead: versions ahead of the present one.
        """
        if look_ahead:
            change = torch.empty_like(self._reference)
            server.write_ahead(change, look_ahead)
            change.sub_(self._reference)
        else:
            change = server.dispatch_fragment(self._turn) - self._reference
        try:
            data = self._codec.encode(change)
        except CodecError:
            return None
        self._reference.add_(self._codec.decode(data, change.numel()))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def decode(self, payload: Tensor) -> Tensor:
        """What the worker has after the last payload: flat, fp32; to be copied at once."""
        return self._reference


class CompressedChanges:
    """Keeps what each worker has of the parameters, and encodes what it lacks.

    ::

        r_w ← r_w + Q(θ_v − r_w);  Q(θ_v − r_w) is sent to worker w, which starts from r_w

    as the server's side of EF21-P (Gruntkowska, Tyurin and Richtárik 2022, arXiv 2209.15218). What Q loses is part of
    the next difference. A difference has a smaller range than the parameters: four bits a value are enough, which
    parameters would not survive. It takes one copy of the parameters for each worker in the server, and one in the
    worker.

    A worker takes all parameters in fp32 when it joins, comes back or connects again, and both sides begin from these.
    So they agree without a word about it: on one connection answers come in order, and each once.
    """

    def __init__(self, options: compression.PullOptions, fragments: Sequence[Fragment]) -> None:
        self._options, self._fragments = options, fragments
        self._references: dict[int, dict[int, Tensor]] = {}  # r_w, by worker and fragment

    def follow(self, server: ParameterServer) -> None:
        """Nothing is encoded before a worker asks."""

    def of(self, worker: int, sequence: int | None) -> WorkersChanges | None:
        """Those of the fragment of the worker's update of this number; None where nothing is known of what the worker
        has, or it takes several fragments at once."""
        turn = (sequence or 0) % len(self._fragments)
        reference = self._references.get(worker, {}).get(turn)
        if reference is None or (sequence is None and len(self._fragments) > 1):
            return None
        return WorkersChanges(self._options, reference, turn)

    def took(self, worker: int, values: Tensor, sequence: int | None) -> None:
        """The worker has taken these in fp32, of all parameters or of a fragment."""
        if sequence is None:
            parts = {turn: fragment.of(values).clone() for turn, fragment in enumerate(self._fragments)}
        else:
            parts = {sequence % len(self._fragments): values.clone()}
        self._references.setdefault(worker, {}).update(parts)

    def forget(self, worker: int) -> None:
        """The worker connects anew."""
        self._references.pop(worker, None)

    def state_dict(self) -> State:
        """What each worker has. A server that is started again does without: its workers connect anew."""
        return {"references": {worker: dict(parts) for worker, parts in self._references.items()}}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`."""
        given = state["references"].items()
        self._references = {worker: {turn: part.clone() for turn, part in parts.items()} for worker, parts in given}
