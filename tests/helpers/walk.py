"""A plug-in for the processes of a run: it writes which files of the package one update goes through.

``WALK`` is the folder: worker and server add a file each, with a path of the package in each line.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from fairseq_async.server.network.connection_loop import ConnectionLoop
from fairseq_async.server.service import Service
from fairseq_async.worker.hybrid import HybridWorker

FOLDER, SEQUENCE = Path(os.environ["WALK"]), 3  # everything has been built and met by then
PACKAGE = f"{Path(sys.modules['fairseq_async'].__path__[0])}/"


class Entered:
    """The files of the package whose functions are called within this context, or have led to it."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __enter__(self) -> "Entered":
        caller = sys._getframe(2)  # of the traced function
        for frame in (caller, caller.f_back):
            if frame is not None:
                self._note(frame, "call", None)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    def write(self, name: str) -> None:
        (FOLDER / name).write_text("\n".join(sorted(self.files)))


def traced(function: Callable[..., Any], name: str, is_it: Callable[..., bool]) -> Callable[..., Any]:
    """The function, which is traced where it does what ``is_it`` says when it has returned."""

    def call(*arguments: Any) -> Any:
        with Entered() as entered:
            result = function(*arguments)
        if is_it(*arguments):
            entered.write(name)
        return result

    return call


def handle(self: Any, peer: Any, request: Any) -> None:
    handled.append(getattr(request, "sequence", -1))
    original_handle(self, peer, request)


def has_served(*_: object) -> bool:
    served = SEQUENCE in handled
    handled.clear()
    return served


handled: list[int] = []
original_handle = Service.handle
Service.handle = handle  # type: ignore[method-assign]
ConnectionLoop._serve_all = traced(ConnectionLoop._serve_all, "server", has_served)  # type: ignore[method-assign]
HybridWorker.scale_into_slot = traced(  # type: ignore[method-assign]
    HybridWorker.scale_into_slot, "gradient", lambda self, *_: self.sequence == SEQUENCE
)
HybridWorker.exchange = traced(  # type: ignore[method-assign]
    HybridWorker.exchange, "exchange", lambda self, *_: self.sequence == SEQUENCE + 1
)
