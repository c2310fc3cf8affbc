"""Injects the faults of a schedule into processes and messages when they are due."""

import signal
import time
from collections import Counter
from collections.abc import Callable

from scripts.faults.proxy import Proxy
from scripts.faults.schedule import Fault, Schedule

Signal = Callable[[int | str, signal.Signals], None]
"""Sends a signal to a worker or to the ``"server"``."""


class Injector:
    """Injects each fault when it is due; a driver calls :meth:`poll` often.

    Args:
        send: sends signals to processes; None if no fault needs it.
        version: returns the server's current version; None if no fault waits for a version.
        clock: returns seconds; the schedule starts when the injector is made.

    Attributes:
        happened: each fault with the time at which it struck.
    """

    def __init__(
        self,
        schedule: Schedule,
        proxy: Proxy | None = None,
        send: Signal | None = None,
        version: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.proxy, self.send, self.version, self.clock = proxy, send, version, clock
        self.happened: list[tuple[float, Fault]] = []
        self._began = clock()
        self._waiting = [fault for fault in schedule.faults if fault.message is None]
        self._paused: list[tuple[float, int | str]] = []
        for fault in schedule.faults:
            if fault.message is not None:
                assert proxy is not None
                proxy.plan(fault)

    @property
    def counts(self) -> Counter[str]:
        return Counter(fault.kind for _, fault in self.happened)

    def poll(self) -> None:
        """Injects the faults that are due, and continues processes whose pause is over."""
        now = self.clock()
        for fault in [fault for fault in self._waiting if self._is_due(fault, now)]:
            self._waiting.remove(fault)
            self.happened.append((now, fault))
            self._strike(fault, now)
        for until, target in list(self._paused):
            if now >= until:
                self._paused.remove((until, target))
                self._signal(target, signal.SIGCONT)

    def _is_due(self, fault: Fault, now: float) -> bool:
        if fault.at is not None:
            return now - self._began >= fault.at
        assert self.version is not None and fault.version is not None
        return self.version() >= fault.version

    def _strike(self, fault: Fault, now: float) -> None:
        if not fault.concerns_process:
            assert self.proxy is not None
            return self.proxy.strike(fault)
        self._signal(fault.target, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if fault.seconds is not None:
            self._paused.append((now + fault.seconds, fault.target))

    def _signal(self, target: int | str, number: signal.Signals) -> None:
        assert self.send is not None
        self.send(target, number)
