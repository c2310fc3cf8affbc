"""What the workers of a server have in common."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fairseq_async.errors import RefusedError
from fairseq_async.exchange import SharedMemory
from fairseq_async.server.layout import Layout
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.plan import Message
from fairseq_async.server.run import Build, Run, State
from fairseq_async.server.snapshots import Snapshots
from fairseq_async.server.terms import Terms, agree


class Job:
    """Nothing, until a worker has described model and method; then terms; then a run, once there are parameters.

    Args:
        run_dir: where ``events.jsonl``, ``run.json`` and snapshots go.
        build: makes rule and plan.
        slots: how many workers there can be at one time.
        clock: seconds since 1970.
    """

    def __init__(self, run_dir: Path, build: Build, slots: int, clock: Callable[[], float]) -> None:
        self.run_dir, self.build, self.slots, self.clock = run_dir, build, slots, clock
        self.snapshots = Snapshots(run_dir, clock)
        self._terms: Terms | None = None
        self._run: Run | None = None

    @property
    def described(self) -> bool:
        return self._terms is not None

    @property
    def begun(self) -> bool:
        return self._run is not None

    @property
    def terms(self) -> Terms:
        assert self._terms is not None  # nobody is heard before hello
        return self._terms

    @property
    def method(self) -> Message:
        return self.terms.method

    @property
    def memory(self) -> SharedMemory:
        return self.terms.memory

    @property
    def run(self) -> Run:
        if self._run is None:
            raise RefusedError("the server has no parameters yet")
        return self._run

    @property
    def server(self) -> ParameterServer:
        return self.run.server

    def describe(self, layout: Layout, method: Message) -> None:
        """What the first worker trains, and how."""
        self._terms = agree(layout, method, self.slots)

    def begin(self, parameters: Tensor, state: State | None, source: str) -> None:
        """Takes the parameters, or the state that has others in it.

        Args:
            source: what the beginning is called in the log of rollbacks.
        """
        layout = self.terms.layout
        self._run = Run(self.run_dir, self.build, self.method, layout, parameters, state, source, self.clock())
        self.publish()

    def recover(self) -> str:
        """Goes on from the newest snapshot, whose name is returned; where there is none, nothing is begun.

        Raises:
            RefusedError: there are snapshots, and none can be read.
        """
        found = self.snapshots.latest(lambda state: Layout.from_json(state["layout"]))
        if found is None:
            return "the beginning"
        path, state = found
        self.describe(Layout.from_json(state["layout"]), state["description"])
        self.begin(torch.zeros(self.terms.layout.size), state, f"snapshot {path.name}")
        return path.name

    def publish(self) -> None:
        """Shows workers the parameters as they are now, where they read them by themselves."""
        if self.terms.publishes:
            self.memory.publish(self.server.parameters, self.server.version)

    def keep_snapshots(self) -> None:
        """Takes one if it is time for it."""
        seconds, updates = self.method.get("snapshot_seconds", 60.0), self.method.get("snapshot_updates")
        self.snapshots.keep_up(self.run.snapshot, self.server.version, seconds, updates)
