"""A standby: a process that has imported everything, and goes on where a server has died."""

import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

_LONGEST = 32  # bytes of a process's number
_ENDING_SECONDS = 1.0  # that a standby, which only waits, may take to end
_ANSWER_SECONDS = 10.0  # that it may take to begin: it may be stopped or suspended


class Standby:
    """The process that waits to become the server, as the process that starts servers sees it.

    A server forks its standby before it has begun, so that this takes no time and shares the memory of what is
    imported; a standby that becomes the server forks the next one first. All of them have the same end of a socket.

    Attributes:
        theirs: that end, for the process that is started with it.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process: subprocess.Popen[bytes] | None = None  # where it was started to be one

    def begin(self, report: int) -> "tuple[Adopted, int] | None":
        """Lets it become the server, which names its snapshot at the descriptor ``report``; returns its process and the
        descriptor of its notices, or None where there is no standby any more."""
        (stdin, lifeline), (notices, writer) = os.pipe(), os.pipe()
        stream = open(lifeline, "wb", buffering=0)
        try:
            socket.send_fds(self._ours, [b"begin"], [stdin, writer, report])
            process = Adopted(self._number(), stream, self.process)
        except OSError:
            stream.close()
            os.close(notices)
            return None
        finally:
            os.close(stdin)
            os.close(writer)
        self.process = None  # the next one is forked
        return process, notices

    def _number(self) -> int:
        """Returns the number of the process that begins now; 0, which no process has, where it dies."""
        if self.process is not None:
            return self.process.pid  # it may still import
        number = 0
        self._ours.settimeout(_ANSWER_SECONDS)
        try:
            number = int(self._ours.recv(_LONGEST) or 0)
            return number if self._ours.recv(_LONGEST) else 0
        except TimeoutError:
            # Hazard: it must not become a second server when it goes on and reads what it was sent. It cannot answer.
            self._ours.shutdown(socket.SHUT_RDWR)
            if number:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            return 0

    @property
    def is_gone(self) -> bool:
        """Whether no process has the other end any more."""
        poller = select.poll()
        poller.register(self._ours, 0)
        return bool(poller.poll(0))

    def end(self) -> None:
        """Ends it. A copy of this socket in a process that was forked from this one holds nothing up."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        try:
            self._ours.shutdown(socket.SHUT_WR)
            self._ours.settimeout(_ENDING_SECONDS)
            while self._ours.recv(_LONGEST):  # its number, and then its end
                pass
        except OSError:
            pass
        self._ours.close()


def is_orphan() -> bool:
    """Forks this process; returns whether this is the fork, which is no child of the other one: it outlives that, and a
    signal to all of its children or its session does not end both. There is no fork where the system has no room for
    one."""
    try:
        between = os.fork()
    except OSError:
        return False
    if between:
        os.waitpid(between, 0)
        return False
    try:
        child = os.fork()
    except OSError:
        os._exit(1)
    if child:
        os._exit(0)
    os.setsid()
    return True


def wait_to_begin(ours: socket.socket, held: Sequence[int], forked: bool, starter: int | None = None) -> list[int]:
    """Waits in a standby until it is to become the server; returns the descriptors that it then has. Otherwise, as when
    the process that has started it is gone, the process ends here.

    Args:
        ours: the socket at which it is told.
        held: descriptors of the server that has forked it, whose end must be seen although this process goes on.
        forked: whether it was forked; its number is then not known yet.
        starter: descriptor of the process that has started it: one that was forked from that may hold the socket open.
    """
    for each in held:
        os.close(each)
    if forked:
        ours.send(str(os.getpid()).encode())
    poller = select.poll()
    poller.register(ours, select.POLLIN)
    if starter is not None:
        poller.register(starter, select.POLLIN)
    if ours.fileno() not in [ready for ready, _ in poller.poll()]:
        os._exit(0)
    said, descriptors, *_ = socket.recv_fds(ours, _LONGEST, 8)
    if not said:
        os._exit(0)
    if forked:
        ours.send(b"begins")  # one that is being killed may have been sent something before
    return descriptors


class Adopted:
    """A server's process that this one has not started: the standby was forked by the server before it. Of its exit
    code nothing is known here but what it says itself; a process that says nothing was killed.

    Args:
        stdin: the writing end of its lifeline.
        child: the process where this one has started it after all, which it thus has to wait for.

    Raises:
        OSError: there is no such process.
    """

    def __init__(self, pid: int, stdin: IO[bytes], child: "subprocess.Popen[bytes] | None" = None) -> None:
        self.pid, self.stdin, self.said, self._child = pid, stdin, -int(signal.SIGKILL), child
        self._descriptor = os.pidfd_open(pid)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self.said if self._has_ended(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        if self._child is not None:
            self._child.wait()
        with suppress(ChildProcessError):  # the first process of a container is the parent of all that have none
            os.waitpid(self.pid, os.WNOHANG)
        return self.said

    def _has_ended(self, timeout: float | None) -> bool:
        """Waits for its end. Not by ``select``, which takes no descriptor above 1,023."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(None if timeout is None else 1000.0 * timeout))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
