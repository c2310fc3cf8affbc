"""The memory of a shard that another machine holds, and what is done with it."""

import io
import os
import zlib
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fairseq_async.algorithms import Rule
from fairseq_async.algorithms.threads import copy_in_threads
from fairseq_async.errors import ProtocolError
from fairseq_async.server.shards.part import Memory, ShardPart, squared_norm

Vector: TypeAlias = Literal["parameters", "before_last_step"]
Held: TypeAlias = Vector | Literal["state"]


class HeldPart(ShardPart):
    """A shard's part of the parameters, its rule, and its part of an update of each worker, which sends the next one
    when that is settled.

    Args:
        tensors: the shard's tensors among those of the model.
        keeps_last_step: whether to keep the parameters before the last step, for starts ahead of the present ones.
    """

    def __init__(self, rule: Rule, parameters: Tensor, tensors: slice, keeps_last_step: bool) -> None:
        super().__init__(rule, parameters, tensors, Memory(self._update, weighted=parameters[:0], starts=None))
        self.before_last_step = parameters.clone() if keeps_last_step else None
        self._updates: dict[int, Tensor] = {}  # by worker
        self._numbers: dict[int, int] = {}  # of the updates that are whole

    def place_for(self, worker: int) -> Tensor:
        """Returns the memory for a worker's part of an update, which is whole when :meth:`note_placed` is called.

        Hazard: where a part before was never whole, its lost connection may still write to its memory. So the memory
        of such a part is not used again.
        """
        if self._numbers.pop(worker, None) is None:
            self._updates[worker] = torch.empty_like(self.parameters)
        return self._updates[worker]

    def note_placed(self, worker: int, sequence: int) -> None:
        """Notes that the part of this update is whole."""
        self._numbers[worker] = sequence

    def _update(self, worker: int, sequence: int) -> Tensor:
        if self._numbers.get(worker) != sequence:
            raise ProtocolError(f"update {sequence} of worker {worker} is not here")
        return self._updates[worker]

    def _prepare(self, threads: int, steps: bool) -> None:
        """Prepares for an update, on all cores of this machine."""
        if steps and self.before_last_step is not None:
            copy_in_threads(self.before_last_step, self.parameters)
        super()._prepare(len(os.sched_getaffinity(0)), steps)

    def start(self, look_ahead: float, starts: bool) -> Tensor:
        """Returns a copy of the parameters, or of what local steps start from, or so many versions ahead of them; as
        :meth:`~fairseq_async.server.parameter_server.ParameterServer.give` does."""
        if look_ahead and self.before_last_step is not None:
            return torch.lerp(self.before_last_step, self.parameters, 1.0 + look_ahead)
        return (self.rule.dispatch(self.parameters) if starts else self.parameters).clone()

    def measure(self, worker: int, sequence: int) -> float:
        """Returns the squared norm of this shard's part of an update; NaN if it is not here."""
        try:
            return squared_norm(self._update(worker, sequence))
        except ProtocolError:
            return float("nan")

    def digest(self, before: int) -> int:
        """Returns the CRC-32 of the shards before and this one, given that of the shards before."""
        return zlib.crc32(self.parameters.numpy().data, before)

    def fetch(self, what: Held) -> Tensor:
        """Returns the bytes of a vector, or of the rule's state."""
        if what != "state":
            return self._vector(what).view(torch.uint8)
        file = io.BytesIO()
        torch.save(self.rule.state_dict(), file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

    def replace(self, what: Held, content: Tensor) -> None:
        """Goes on from the bytes of a vector, or of a state."""
        if what == "state":
            loaded = torch.load(io.BytesIO(content.numpy().data), map_location="cpu", weights_only=True)
            return self.rule.load_state_dict(loaded)
        self._vector(what).copy_(content.view(torch.float32))
        if what == "parameters" and self.before_last_step is not None:
            self.before_last_step.copy_(self.parameters)  # those before the last step come next, if there was one

    def _vector(self, what: Held) -> Tensor:
        vector = self.parameters if what == "parameters" else self.before_last_step
        if vector is None:
            raise ProtocolError("the parameters before the last step are not kept")
        return vector
