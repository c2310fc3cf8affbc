"""One shard of a server in a process of its own: the server's handle on it, and the code that the process runs."""

import gc
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.algorithms.threads import forget_threads
from fairseq_async.errors import HalfAppliedError, disk_error
from fairseq_async.exchange.linux import end_with_parent, give_back
from fairseq_async.protocol.shard_messages import (
    LARGEST,
    Apply,
    Done,
    Failed,
    Load,
    Message,
    Norm,
    NormOfAll,
    NotSaved,
    Save,
    Select,
    encode,
    parse,
)
from fairseq_async.server.shards.part import ShardPart, Trimming, accumulation, root_of_all


class ShardProcess:
    """A process that applies updates to its shard, on the server's commands.

    The process is forked from the server, whose shared memory and imports it has, and ends with the server. If it has
    ended, or fails at a command, the shards may be at different versions: a HalfAppliedError ends the server, and a new
    server goes on from the last snapshot, with all its shards.

    Args:
        number: number of the shard.
        build: returns the shard's part of each fragment, by the fragment's number; it is called in the process.
        forgets: tensors that the server holds only for its start; the process gives the memory of its copy back.
    """

    shares_memory = True

    def __init__(self, number: int, build: Callable[[], dict[int, ShardPart]], forgets: State | None = None) -> None:
        self.number = number
        self._fragment: int | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run(theirs, server, build, forgets)
        theirs.close()

    def select(self, fragment: int) -> None:
        """Tells the process which fragment the next commands refer to."""
        if fragment != self._fragment:
            self.send(Select(fragment))
            self._fragment = fragment

    def send(self, command: Message, file: IO[bytes] | None = None) -> None:
        """Sends a command, with the file that it refers to, if any."""
        try:
            socket.send_fds(self._socket, [encode(command)], [] if file is None else [file.fileno()])
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Message:
        """Returns the next answer of the process; raises a HalfAppliedError if the process has failed or ended."""
        try:
            body = self._socket.recv(LARGEST)
        except OSError as error:
            raise self._ended() from error
        if not body:
            raise self._ended()
        answer = parse(body)
        if isinstance(answer, Failed):
            raise HalfAppliedError(f"shard {self.number} of the server: {answer.error}")
        return answer

    def close(self) -> None:
        """Ends the process and waits for its end."""
        with suppress(OSError):  # the process has ended
            self._socket.shutdown(socket.SHUT_RDWR)  # closing is not enough: processes forked later have it open too
        self._socket.close()
        os.waitpid(self.pid, 0)

    def _ended(self) -> HalfAppliedError:
        return HalfAppliedError(f"the process of shard {self.number} of the server has ended")


def state_to_file(state: State, file: IO[bytes]) -> None:
    """Writes a rule's state into the file."""
    torch.save(state, file)
    file.flush()


def state_from_file(file: IO[bytes]) -> State:
    """Returns a rule's state. Its tensors stay in the file until they are read; nothing is unpickled but tensors."""
    path = f"/proc/self/fd/{file.fileno()}"  # the file has no name of its own
    return cast(State, torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def nameless_file(directory: Path) -> IO[bytes]:
    """Opens an empty file without a name, which is gone when no process has it open any more."""
    return cast(IO[bytes], tempfile.TemporaryFile(dir=directory))


def _run(
    connection: socket.socket, server: int, build: Callable[[], dict[int, ShardPart]], forgets: State | None
) -> None:
    """Runs the shard in the forked process, and ends the process: it does not return."""
    try:
        end_with_parent(signal.SIGKILL, server)
        kept = connection.fileno()
        # Connections, locks and the listening socket must close when the server ends, not when this process does. Their
        # Python objects must never be freed here: they would close descriptors that have reused their numbers.
        gc.freeze()
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        forget_threads()
        _free(forgets)
        _Shard(connection, build()).serve()
    except BaseException as error:  # whatever it is, the server is to know
        connection.send(encode(Failed(f"{type(error).__name__}: {error}"[:1000])))
    finally:
        os._exit(0)


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


class _Shard:
    """Carries out the server's commands until the server is gone."""

    def __init__(self, connection: socket.socket, parts: dict[int, ShardPart]) -> None:
        self.connection, self.parts, self._trimming = connection, parts, Trimming()
        self._part: ShardPart
        for part in parts.values():
            if (clips := accumulation(part.rule)) is not None:
                clips.norm_of_all = self._norm_of_all

    def serve(self) -> None:
        while True:
            body, files, _, _ = socket.recv_fds(self.connection, LARGEST, 1)
            if not body:
                return
            command = parse(body)
            if isinstance(command, Select):
                self._part = self.parts[command.fragment]
            else:
                self.connection.send(encode(self._answer(command, files)))

    def _answer(self, command: Message, files: list[int]) -> Message:
        part, rule = self._part, self._part.rule
        match command:
            case Save():
                try:
                    with open(files[0], "wb") as file:
                        state_to_file(rule.state_dict(), file)
                except (OSError, RuntimeError) as error:  # torch makes one of the other when the disk is full
                    return NotSaved(str(disk_error(error))[:1000])
            case Load():
                with open(files[0], "rb") as file:
                    rule.load_state_dict(state_from_file(file))
            case _:
                steps = isinstance(command, Apply) and rule.moves_parameters()
                answer = part.carry_out(command)
                self._trimming.after(steps)
                return answer
        return Done()

    def _norm_of_all(self, norm: Tensor) -> Tensor:
        self.connection.send(encode(Norm(float(norm) ** 2)))
        answer = parse(self.connection.recv(LARGEST))
        assert isinstance(answer, NormOfAll)
        return root_of_all(answer.squared, norm)
