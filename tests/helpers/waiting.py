"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def group_has_ended(group: int) -> bool:
    """Whether no process of a group runs. One that has ended may stay as a zombie for seconds under load, until whoever
    has adopted it asks for its end: signal 0 still reaches it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, of = stat.read_text().rpartition(") ")[2].split()[:3]
            if int(of) == group and state != "Z":
                return False
    return True


def has_ended(process: int) -> bool:
    """Whether a process does not run; see :func:`group_has_ended`."""
    try:
        return ") Z " in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
