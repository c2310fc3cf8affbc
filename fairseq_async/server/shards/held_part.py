"""The memory of a shard that another machine holds, and what is done with it."""

import io
import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fairseq_async.algorithms import Rule
from fairseq_async.algorithms.threads import copy_in_threads
from fairseq_async.errors import ProtocolError
from fairseq_async.protocol.shard_messages import Apply, Give, Held, Measure, Message, Store
from fairseq_async.server.shards.part import ShardPart, Trimming, accumulation, root_of_all, squared_norm
from fairseq_async.server.shards.process import state_to_file


class HeldPart:
    """A shard's part of the parameters, its rule, and its parts of the workers' updates.

    A worker may be answered before its update is applied, and then sends the next one: there is room for two of each
    worker. The one after that comes only when the first is applied.

    Args:
        tensors: the shard's tensors among those of the model.
        keeps_last_step: whether to keep the parameters before the last step, for starts ahead of the present ones.
        squared_of_all: returns the squared norm over all shards, given the norm of this one.
    """

    def __init__(
        self,
        rule: Rule,
        parameters: Tensor,
        tensors: slice,
        keeps_last_step: bool,
        squared_of_all: Callable[[Tensor], float],
    ) -> None:
        self.rule, self.parameters = rule, parameters
        self.before = parameters.clone() if keeps_last_step else None
        self._updates: dict[tuple[int, int], Tensor] = {}  # by worker, and whether its number is odd
        self._numbers: dict[tuple[int, int], int] = {}  # of the updates that are whole
        nothing = parameters[:0]
        self._part = ShardPart(rule, parameters, tensors, self._update, weighed=nothing, starts=nothing)
        self._trimming = Trimming()
        if (clips := accumulation(rule)) is not None:
            clips.norm_of_all = lambda norm: root_of_all(squared_of_all(norm), norm)

    def place_for(self, worker: int, sequence: int) -> Tensor:
        """Returns the memory for a worker's part of an update, which is whole when :meth:`note_placed` is called.

        Hazard: where a part before was never whole, its lost connection may still write to its memory. So the memory
        of such a part is not used again.
        """
        key = worker, sequence % 2
        if self._numbers.pop(key, None) is None:
            self._updates[key] = torch.empty_like(self.parameters)
        return self._updates[key]

    def note_placed(self, worker: int, sequence: int) -> int:
        """Notes that the part of this update is whole; returns its number."""
        self._numbers[worker, sequence % 2] = sequence
        return sequence

    def _update(self, worker: int, sequence: int) -> Tensor:
        key = worker, sequence % 2
        if self._numbers.get(key) != sequence:
            raise ProtocolError(f"update {sequence} of worker {worker} is not here")
        return self._updates[key]

    def measure(self, command: Measure) -> float:
        """Returns the squared norm of this shard's part of an update; NaN if it is not here."""
        try:
            return squared_norm(self._update(command.worker, command.sequence))
        except ProtocolError:
            return float("nan")

    def carry_out(self, command: Message) -> Message:
        """Carries out a command on the rule, on all cores of this machine; returns the answer."""
        if not isinstance(command, Apply):
            return self._part.carry_out(command)
        steps = self.rule.moves_parameters()
        if steps and self.before is not None:
            copy_in_threads(self.before, self.parameters)
        answer = self._part.carry_out(replace(command, threads=len(os.sched_getaffinity(0))))
        self._trimming.after(steps)
        return answer

    def start(self, give: Give) -> Tensor:
        """Returns a copy of the parameters, or of what local steps start from, or so many versions ahead of them; as
        :meth:`~fairseq_async.server.parameter_server.ParameterServer.give` does."""
        if give.look_ahead and self.before is not None:
            return torch.lerp(self.before, self.parameters, 1.0 + give.look_ahead)
        return (self.rule.dispatch(self.parameters) if give.starts else self.parameters).clone()

    def restore(self, store: Store, content: Tensor) -> None:
        """Goes on from what the server has sent, which is in the memory that :meth:`room` has given."""
        if store.what == "state":
            loaded = torch.load(io.BytesIO(content.numpy().data), map_location="cpu", weights_only=True)
            self.rule.load_state_dict(loaded)
        elif store.what == "parameters" and self.before is not None:
            self.before.copy_(self.parameters)  # those before the last step come next, if there was one

    def room(self, store: Store) -> Tensor:
        """Returns the memory for what the server sends: a vector in its place, or the bytes of a state."""
        if store.what == "state":
            return torch.empty(store.size, dtype=torch.uint8, device="cpu")
        return self._vector(store.what)

    def content(self, what: Held) -> Tensor:
        """Returns the bytes of a vector, or of the rule's state."""
        if what == "state":
            file = io.BytesIO()
            state_to_file(self.rule.state_dict(), file)
            return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        return self._vector(what).view(torch.uint8)

    def _vector(self, what: Held) -> Tensor:
        vector = self.parameters if what == "parameters" else self.before
        if vector is None:
            raise ProtocolError("the parameters before the last step are not kept")
        return vector
