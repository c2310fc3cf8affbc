"""One shard of a server in a process of its own: the server's handle on it, and the code that the process runs."""

import gc
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import IO

from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.algorithms.threads import forget_threads
from fairseq_async.exchange import Channel
from fairseq_async.exchange.linux import end_with_parent, give_back
from fairseq_async.protocol.parsing import parse_one
from fairseq_async.server.shards.calls import Answer, Call, Methods, OtherShard, ask, encode, failure
from fairseq_async.server.shards.part import CALLED, ShardPart

_METHODS = Methods(*CALLED, ShardPart.dispatch, ShardPart.save, ShardPart.load)


class ShardProcess(OtherShard):
    """A process that applies updates to its shard, on the server's calls.

    The process is forked from the server, whose shared memory and imports it has, and ends with the server. If it has
    ended, or fails at a call, the shards may be at different versions: a HalfAppliedError ends the server, and a new
    server goes on from the last snapshot, with all its shards.

    Args:
        number: number of the shard.
        build: returns the shard's part of each fragment, by the fragment's number; it is called in the process.
        forgets: tensors that the server holds only for its start; the process gives the memory of its copy back.
    """

    def __init__(self, number: int, build: Callable[[], dict[int, ShardPart]], forgets: State | None = None) -> None:
        self.name = f"shard {number} of the server"
        ours, theirs = socket.socketpair()
        server = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run(Channel(theirs), server, build, forgets)
        theirs.close()
        self.channel = Channel(ours)

    def save(self, fragment: int, file: IO[bytes]) -> Callable[[], str]:
        self.call(ShardPart.save, _path(file), fragment=fragment)
        return partial(self.result, ShardPart.save)

    def load(self, fragment: int, file: IO[bytes]) -> Callable[[], None]:
        self.call(ShardPart.load, _path(file), fragment=fragment)
        return partial(self.result, ShardPart.load)

    def close(self) -> None:
        """Ends the process and waits for its end."""
        self.channel.close()
        os.waitpid(self.pid, 0)


def _path(file: IO[bytes]) -> str:
    """Returns the path by which another process of this user opens a file that has no name."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _run(channel: Channel, server: int, build: Callable[[], dict[int, ShardPart]], forgets: State | None) -> None:
    """Runs the shard in the forked process, and ends the process: it does not return."""
    try:
        end_with_parent(signal.SIGKILL, server)
        kept = channel.connection.fileno()
        # Connections, locks and the listening socket must close when the server ends, not when this process does. Their
        # Python objects must never be freed here: they would close descriptors that have reused their numbers.
        gc.freeze()
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        forget_threads()
        _free(forgets)
        _serve(channel, build())
    except BaseException as error:  # whatever it is, the server is to know, if it is there
        channel.send(failure(error))
    finally:
        os._exit(0)


def _serve(channel: Channel, parts: dict[int, ShardPart]) -> None:
    """Carries out the server's calls; raises an ExchangeError when the server is gone."""
    for part in parts.values():
        part.clip_by(partial(ask, channel))
    while True:
        call = parse_one(channel.receive(), Call)
        part = parts[call.fragment]
        channel.send(encode(Answer(_METHODS.carry_out(call, (part, part.rule)))))


def _free(held: object) -> None:
    """Gives the memory of all tensors in a state back to the system. Nobody may read these tensors any more."""
    if isinstance(held, Tensor):
        storage = held.untyped_storage()
        give_back(storage.data_ptr(), storage.nbytes())
    elif isinstance(held, dict):
        _free(list(held.values()))
    elif isinstance(held, list | tuple):
        for each in held:
            _free(each)
