"""The main loop of a run's server: one selector over all connections, in the thread that does all other work too."""

import selectors
import socket
import ssl
from collections.abc import Callable
from math import inf
from typing import Protocol

from fairseq_async.protocol.notices import RUN_FINISHED, RUN_OVER
from fairseq_async.server.membership import Membership
from fairseq_async.server.network.connection_loop import ConnectionLoop
from fairseq_async.server.service import Service

_LATE_SECONDS = 20.0  # that a finished server stays for workers that have not come yet
_OWNER_SECONDS = 60.0  # that it stays for a worker 0 that has died and is started again: it writes the last checkpoint


class HasFileno(Protocol):
    """A file or socket, which a selector can watch."""

    def fileno(self) -> int: ...


class EventLoop(ConnectionLoop):
    """Passes the messages of a run's workers to its service, until the run is over.

    Args:
        lifeline: a file whose other end the process that started the server holds open.
        ends_with_workers: end also an unfinished run, when its service says that it is deserted.
        encryption: the TLS context for every connection; None for no encryption.
        stays: serve on when the run is over, until the lifeline ends: a worker 0 that has died before it has saved the
            model comes back for it.

    Attributes:
        announce: tells the process that started the server that the run is finished, or over.
    """

    def __init__(
        self,
        listener: socket.socket,
        service: Service,
        lifeline: HasFileno,
        ends_with_workers: bool = False,
        encryption: ssl.SSLContext | None = None,
        stays: bool = False,
    ) -> None:
        super().__init__(listener, service, encryption)
        self.service, self.ends_with_workers = service, ends_with_workers
        self._lifelines: list[HasFileno | int] = [lifeline]
        self.stays, self._announced = stays, ""
        self.announce: Callable[[str], None] = lambda state: None
        self._selector.register(lifeline, selectors.EVENT_READ)
        if service.wakeup is not None:
            self._selector.register(service.wakeup, selectors.EVENT_READ)  # it only makes the loop tick
        self._finished_at: float | None = None

    def end_with(self, process: int) -> None:
        """Ends with the process of this descriptor too: one that was forked from it may hold the lifeline open."""
        self._lifelines.append(process)
        self._selector.register(process, selectors.EVENT_READ)

    def run(self) -> bool:
        """Serves until the run is over, or the process that started the server is gone; returns whether the run is
        finished, or over."""
        wait, read_at = 0.0, self.service.clock()
        while not self._note_end() or self.stays:
            selected = self._selector.select(timeout=wait)
            read_at = self._excuse_silence(read_at, wait)
            if any(key.fileobj in self._lifelines for key, _ in selected):
                if not self.service.busy:
                    return bool(self._announced)
                while self._lifelines:  # the run is finished: the service does what is left
                    self._selector.unregister(self._lifelines.pop())
                self.stays = False
            self._serve_selected(selected)
            # Only after the messages were read: they may be from workers that seem silent.
            wait = self.service.tick()
            self._watch()
            if self.has_turns:
                wait = 0.0
        return True

    def _excuse_silence(self, read_at: float, wait: float) -> float:
        """Excuses the workers' silence while this process was suspended or stopped: it has not read its sockets since
        ``read_at``, much longer than the ``wait`` that it meant. Returns the time."""
        membership, now = self.service.membership, self.service.clock()
        if now - read_at - wait > membership.timeout / 2:
            self.service.excuse(now - read_at)
            if self._finished_at is not None:
                self._finished_at += now - read_at
        return now

    def _note_end(self) -> bool:
        """Whether the run is over; announces that it is finished or over, and where a worker has come back after the
        end, that it is over no more."""
        over = self._over()
        state = RUN_OVER if over else RUN_FINISHED if self.service.finished or self._announced else ""
        if state != self._announced:
            self._announced = state
            self.announce(state)
        return over

    def _over(self) -> bool:
        now = self.service.clock()
        if self.service.busy:
            return False
        if not self.service.finished:
            return self.ends_with_workers and self.service.is_deserted(now)
        self._finished_at = self._finished_at or now
        membership = self.service.membership
        if self._waits_for_late(membership, now - self._finished_at):
            return False
        there = {peer.worker for peer in self.peers if peer.worker is not None} - membership.unready
        silent = there & membership.silent(now)
        # A worker that has sent no update can lose none any more: the usual timeout applies to it here.
        hanging = {
            w for w in there - silent if membership.hangs(w, now, since=self._finished_at, first_update_timeout=0.0)
        }
        if there - silent - hanging:
            return False
        if self._announced == RUN_OVER:
            return True
        for worker in sorted(silent):
            self.service.tell(f"worker {worker} was not heard of for {membership.timeout:g} s: the run ends without it")
        for worker in sorted(hanging):
            seconds = now - max(self._finished_at, membership.members[worker].turn)
            self.service.tell(f"worker {worker} has asked for nothing for {seconds:.0f} s: the run ends without it")
        return True

    def _waits_for_late(self, membership: Membership, seconds: float) -> bool:
        """Whether a run, finished for so many seconds, stays open for workers that are still to come."""
        owner_comes = membership.is_away(0) or 0 in membership.unready
        others_come = membership.unready or len(membership.joined) < membership.announced
        owner_seconds = inf if self.stays and not self.ends_with_workers else _OWNER_SECONDS
        return seconds < (owner_seconds if owner_comes else _LATE_SECONDS if others_come else 0.0)
