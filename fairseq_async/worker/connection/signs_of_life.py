"""Sends a worker's signs of life to its server, from a second thread while the worker computes."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from fairseq_async.errors import AsyncError, ExchangeError, RefusedError

_PAUSE = 0.5  # seconds between two attempts to connect
_ENDING = 2.0  # seconds to wait for the thread's end


class Watched(Protocol):
    """The connection that is kept alive. Its lock is held for a request and its answer, or for a sign of life.

    Attributes:
        patience: seconds for which a worker waits for a server that is gone.
    """

    patience: float

    @property
    def lock(self) -> threading.RLock: ...

    @property
    def left(self) -> threading.Event:
        """Set when the worker has ended the connection."""
        ...

    @property
    def loss(self) -> str:
        """The message for the case that the server stays away."""
        ...

    def wait_for_loss(self) -> None:
        """Returns when the connection is lost, or the next sign is due."""
        ...

    def show_life(self, lost: bool) -> None:
        """Sends a sign of life, or connects again where the connection was ``lost``. Raises an ExchangeError if the
        server is away."""
        ...


class SignsOfLife:
    """Sends signs of life while this worker computes, and connects again when the connection is lost.

    Hazard: two threads use the connection. Each holds the lock for a request with its answer. This thread skips its
    turn when the lock is taken, since the other thread's request is a sign of life.

    Args:
        on_loss: called in this thread, with the reason, when the server stays away.
    """

    def __init__(self, watched: Watched, on_loss: Callable[[AsyncError], None]) -> None:
        self._watched, self._on_loss = watched, on_loss
        self._thread = threading.Thread(target=self._stay_alive, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Waits for the thread's end, once the worker has left.

        Hazard: the end of the thread may free the slot. If Python exits meanwhile, the thread is unwound through torch,
        which aborts the process: a worker that has done its work would seem to have failed.
        """
        if self._thread is not threading.current_thread():
            self._thread.join(_ENDING)

    def _stay_alive(self) -> None:
        watched, lost_at = self._watched, None
        while not watched.left.is_set():
            if lost_at is None:
                watched.wait_for_loss()
            if watched.left.wait(_PAUSE) or not watched.lock.acquire(blocking=False):
                lost_at = None  # the other thread's request is a sign of life, or that thread connects again itself
                continue
            try:
                lost_at = self._show_life(lost_at)
            except RefusedError as error:
                return self._on_loss(error)
            finally:
                watched.lock.release()
            if lost_at is not None and time.monotonic() - lost_at > watched.patience and not watched.left.is_set():
                return self._on_loss(ExchangeError(watched.loss))

    def _show_life(self, lost_at: float | None) -> float | None:
        """Shows life once; returns since when the server has been away, None if it is there."""
        try:
            self._watched.show_life(lost_at is not None)
            return None
        except ExchangeError:
            return lost_at or time.monotonic()
