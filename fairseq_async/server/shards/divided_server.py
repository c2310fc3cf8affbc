"""The parameter server of a run with shards on other machines, which have parts of what it gives, checks and saves."""

import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import get_args

import torch
from torch import Tensor

from fairseq_async.algorithms import Update
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import HalfAppliedError
from fairseq_async.protocol.receipt import Receipt
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.shards.held_part import HeldPart, Vector
from fairseq_async.server.shards.host import ShardHost
from fairseq_async.server.shards.remote import RemoteShard
from fairseq_async.server.shards.rule import ShardedRule

_VECTORS: tuple[Vector, ...] = get_args(Vector)


class DividedServer(ParameterServer):
    """Holds the part of the parameters that is on the server's own machine; the other parts, in the order of their
    shards, come after it.

    Every method that asks the other shards raises a HalfAppliedError if one of them is gone.
    """

    _given = 0

    @property
    def shards(self) -> Sequence[RemoteShard]:
        """The shards on other machines."""
        assert isinstance(self.rule, ShardedRule)
        return self.rule.elsewhere

    def give(self, worker: int, out: Tensor, look_ahead: float = 0.0, starts: bool = False) -> int:
        """Writes this machine's part of what the worker has asked for, and lets the other shards send theirs; returns
        the number by which the worker knows which parts belong together."""
        super().give(worker, out, look_ahead, starts)
        self._given += 1
        for shard in self.shards:
            shard.call(ShardHost.give, worker, self._given, look_ahead, starts, answered=False)
        return self._given

    def admit(self, update: Update, norm: float | None = None) -> Receipt:
        """Decides what becomes of an update, by the norm of the parts that have arrived."""
        return super().admit(update)

    def checksum(self) -> str:
        value = zlib.crc32(self.parameters.numpy().data)
        for shard in self.shards:
            shard.call(HeldPart.digest, value)
            value = shard.result(HeldPart.digest)
        return f"{value:08x}"

    def state_dict(self) -> State:
        """Returns all that a restart needs, with the parts of the other shards."""
        state = super().state_dict()
        for name in (name for name in _VECTORS if state[name] is not None):
            state[name] = torch.cat([state[name], *(shard.fetch(name) for shard in self.shards)])
        return state

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`, after giving the other shards their parts."""
        here = {}
        for name in (name for name in _VECTORS if state.get(name) is not None):
            for shard in self.shards:
                if name == "parameters" or self.before_last_step is not None:
                    shard.store(name, shard.place.of(state[name]).contiguous())()
            here[name] = state[name][: self.parameters.numel()]
        super().load_state_dict(state | here)

    def check_parts(self) -> None:
        for shard in self.shards:
            if shard.channel.is_closed():
                raise HalfAppliedError(f"{shard.name} is gone")

    def finish(self) -> None:
        for shard in self.shards:
            with suppress(HalfAppliedError):  # it is gone
                shard.call(ShardHost.finish, answered=False)
