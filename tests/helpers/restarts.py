"""One server after the other in one directory, and two workers that speak to it, all in this process."""

import shutil
from pathlib import Path
from typing import Any

from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import (
    Hello,
    Initialise,
    Push,
    PushReply,
    Report,
    SaveState,
    ScheduleEvent,
    ScheduleReply,
    StateSaved,
    Welcome,
)
from fairseq_async.records.state_files import restored_path
from fairseq_async.server.programs import local_sgd_main as outer
from fairseq_async.server.service import Service
from scripts.faults.digest import read_snapshot
from tests.helpers import halving
from tests.helpers.halving import LAYOUT
from tests.helpers.in_process import Connection, end, new_service, slot


class Restarts:
    """One server after the other, in one directory."""

    def __init__(self, run_dir: Path, spec: MethodSpec) -> None:
        self.run_dir, self.spec = run_dir, spec
        self.build = outer.build if spec.method == "local_sgd" else halving.build
        self.service: Service | None = None

    def begin(self) -> Service:
        self.close()
        self.service = new_service(2, self.run_dir, self.build, lambda: 1000.0)
        return self.service

    def close(self) -> None:
        if self.service is not None:
            end(self.service)


class Worker(Connection):
    """Says what a worker says, and remembers the number of its next update."""

    def come(self, worker: int, spec: MethodSpec) -> Welcome:
        self.introduce(worker)
        return self.note(self.ask(Hello(spec, LAYOUT, remote=False), Welcome))

    def bring(self, state: Path | None) -> Welcome:
        slot(self.service, 0).zero_()
        if state is not None:
            shutil.copyfile(state, restored_path(self.service.run_dir))
        return self.note(self.ask(Initialise(state is not None), Welcome))

    def note(self, welcome: Welcome) -> Welcome:
        self.sequence = welcome.sequence
        return welcome

    def push(self, value: float, **report: Any) -> PushReply:
        slot(self.service, self.peer.id).fill_(value)
        said = {"position": {"epoch": 1, "seen": self.sequence}, "local_steps": 3, "step_seconds": 0.5} | report
        answer = self.ask(Push(self.sequence, 0, 1.0 + self.peer.id, Report(**said)), PushReply)
        self.sequence += 1
        return answer

    def follow(self, event: ScheduleEvent) -> float:
        return self.ask(event, ScheduleReply).learning_rate


def both(service: Service, spec: MethodSpec, state: Path | None = None) -> tuple[list[Worker], Welcome]:
    """Two workers, and what the second was told when it came."""
    first, second = Worker(service), Worker(service)
    if not first.come(0, spec).initialised:
        first.bring(state)
    return [first, second], second.come(1, spec)


def save(worker: Worker, path: Path) -> dict[str, Any]:
    shutil.move(worker.ask(SaveState(), StateSaved).path, path)
    return read_snapshot(path)
