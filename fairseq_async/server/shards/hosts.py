"""The shards of a run on other machines, as the run sees them: parts of what it gives, digests and saves."""

import zlib
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import HalfAppliedError
from fairseq_async.protocol import Pull
from fairseq_async.protocol.shard_messages import Digest, Digested, Give, Held
from fairseq_async.server.shards.remote import RemoteShard

_VECTORS: dict[str, Held] = {"parameters": "parameters", "before_last_step": "before"}


class Hosts:
    """The shards on other machines, in the order of their places, which come after the part of the server's machine.

    Without any, every method does nothing. Each raises a HalfAppliedError if a host is gone.
    """

    def __init__(self, shards: Sequence[RemoteShard] = ()) -> None:
        self.shards = shards
        self._given = 0

    def give(self, worker: int, pull: Pull) -> int:
        """Lets every host send the worker its part of the parameters; returns the number by which the worker knows
        which parts belong together."""
        self._given += 1
        for shard in self.shards:
            shard.send(Give(worker, self._given, pull.look_ahead, pull.starts))
        return self._given

    def checksum(self, own: Tensor) -> str:
        """Returns the CRC-32 of all parameters, of which ``own`` are those on the server's machine."""
        value = zlib.crc32(own.detach().cpu().numpy().data)
        for shard in self.shards:
            value = shard.ask(Digest(value), Digested).value
        return f"{value:08x}"

    def completed(self, server: State) -> State:
        """Returns the state of a parameter server with the hosts' parts of its vectors."""
        if not self.shards:
            return server
        whole = {
            name: torch.cat([server[name], *(shard.fetch(what) for shard in self.shards)])
            for name, what in _VECTORS.items()
            if server[name] is not None
        }
        return server | whole

    def restored(self, server: State, own: slice) -> State:
        """Returns the server's part of a state from :meth:`completed`, after giving the hosts theirs."""
        if not self.shards:
            return server
        given = {name: server[name] for name in _VECTORS if server.get(name) is not None}
        for shard in self.shards:
            for name, whole in given.items():
                if name == "parameters" or shard.keeps_last_step:
                    shard.store(_VECTORS[name], shard.place.of(whole))
        return server | {name: whole[own] for name, whole in given.items()}

    def check(self) -> None:
        """Notices a host that is gone: without their parts at a host, workers send no updates, which would tell."""
        for shard in self.shards:
            shard.check()

    def finish(self) -> None:
        """Tells the hosts that the run is finished, those that are still there."""
        for shard in self.shards:
            with suppress(HalfAppliedError):
                shard.finish()
