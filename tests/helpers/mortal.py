"""A server in a thread that dies at any line of its code, and is there again from its last snapshot."""

import os
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import fairseq_async
from fairseq_async.exchange.authentication import new_token
from fairseq_async.records.snapshots import Snapshots
from fairseq_async.server.kept_state import KeptState
from fairseq_async.server.network.event_loop import EventLoop
from fairseq_async.server.plan import Build
from fairseq_async.server.service import Service

_CODE = tuple(f"{Path(fairseq_async.__file__).parent / floor}{os.sep}" for floor in ("server", "exchange"))


class Killed(BaseException):
    """Nothing catches it."""


class InlineSnapshots(Snapshots):
    """Written by the server itself: a process with many threads must not fork."""

    def take(self, state: dict[str, Any], version: int) -> None:
        self.directory.mkdir(exist_ok=True)
        self._write(state, version)


class MortalServer:
    """Serves at one address through all its lives.

    Args:
        deaths: how many lines of the server's code it executes before each of its deaths, counted from
            :meth:`begin_to_die` and from each new life on; after the last it lives.

    Attributes:
        lives: so far.
        lines: executed in this life.
    """

    def __init__(self, workers: int, run_dir: Path, host: str, build: Build, deaths: list[int]) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.workers, self.run_dir, self.build, self.deaths = workers, run_dir, build, list(deaths)
        self.token = new_token()
        with socket.create_server((host, 0)) as listener:
            self.address = "{}:{}".format(*listener.getsockname())
        self.lives = self.lines = 0
        self.places: list[str] = []
        self._mortal = threading.Event()
        self._lifeline, self._other = socket.socketpair()
        self.service: Service
        ready = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def begin_to_die(self) -> None:
        self.lines = 0
        self._mortal.set()

    def stop(self) -> None:
        self._lifeline.close()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._other.close()

    def _live(self, ready: threading.Event) -> None:
        while True:
            self.lives += 1
            self.lines = 0
            host, _, port = self.address.rpartition(":")
            listener = socket.create_server((host, int(port)))
            peers: list[Any] = []
            sys.settrace(self._trace)
            try:
                service = Service(self.token, self.workers, self.run_dir, self.build)
                service.snapshots = InlineSnapshots(self.run_dir)
                service.state = KeptState(service.snapshots)
                service.recover()
                loop = EventLoop(listener, service, self._other)
                peers, self.service = loop.peers, service
                ready.set()
                loop.run()
                return
            except Killed:
                continue
            finally:
                sys.settrace(None)
                listener.close()
                for peer in peers:
                    peer.channel.close()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(_CODE):
            return None
        if event == "line" and self._mortal.is_set():
            self.lines += 1
            if self.deaths and self.lines > self.deaths[0]:
                self.deaths.pop(0)
                self.places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                raise Killed
        return self._trace
