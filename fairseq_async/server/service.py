"""The server behind its door: who may come in, and what the answer to each message is."""

import hmac
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from fairseq_async.algorithms import Rule, Update
from fairseq_async.errors import AsyncError, RefusedError
from fairseq_async.exchange import Channel, SharedMemory
from fairseq_async.server import heap
from fairseq_async.server.events import EventLog
from fairseq_async.server.layout import Layout
from fairseq_async.server.parameter_server import ParameterServer, Receipt, Status

Message = dict[str, Any]


class Schedule(Protocol):
    """The learning rate, which some schedules change at the ends of epochs."""

    @property
    def learning_rate(self) -> float: ...

    def begin_epoch(self, epoch: int) -> None: ...

    def end_epoch(self, epoch: int, loss: float | None) -> None: ...


Build = Callable[[Message, Layout, torch.Tensor], tuple[Rule, Schedule]]
"""Makes rule and schedule from a method's description, the layout and the flat parameters."""


@dataclass
class Peer:
    """One connection; ``worker`` is None until it has introduced itself."""

    channel: Channel
    worker: int | None = None
    waiting: str | None = None  # the kind of a message that is not answered yet
    report: Message = field(default_factory=dict)  # what the worker said of itself with its last update


class Service:
    """Answers the workers of one run from one :class:`ParameterServer`, in the order in which they ask.

    Args:
        token: what a worker must know to come in.
        workers: how many workers there are; their ids are 0 to ``workers - 1``.
        run_dir: where ``events.jsonl`` and ``run.json`` go.
        build: makes the rule once the first worker has described model and method.
        clock: seconds since 1970.
    """

    def __init__(
        self, token: str, workers: int, run_dir: Path, build: Build, clock: Callable[[], float] = time.time
    ) -> None:
        self.token, self.workers, self.run_dir, self.build, self.clock = token, workers, run_dir, build, clock
        self.peers: dict[int, Peer] = {}
        self.joined: set[int] = set()
        self.finished = False
        self.positions: dict[int, Message] = {}
        self.epochs = 0.0
        self._server: ParameterServer | None = None

    # What a message leads to

    def receive(self, peer: Peer, message: Message) -> None:
        """Handles one message. A user's error is the answer; the peer stays, and so does the server."""
        try:
            handler = self._handlers().get(str(message.get("kind")))
            if handler is None or (peer.worker is None and message["kind"] != "hello"):
                raise RefusedError("introduce yourself first")
            answer = handler(peer, message)
        except AsyncError as error:
            answer = {"error": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            answer = {"error": f"malformed message: {error!r}"}
        if answer is not None:
            self._answer(peer, answer)

    def forget(self, peer: Peer) -> None:
        """The connection is closed."""
        if peer.worker is not None and self.peers.get(peer.worker) is peer:
            del self.peers[peer.worker]
            if self._server is not None:
                self._server.withdraw(peer.worker)

    def _handlers(self) -> dict[str, Callable[[Peer, Message], Message | None]]:
        return {
            "hello": self._hello,
            "initialise": self._initialise,
            "push": self._push,
            "begin_epoch": self._begin_epoch,
            "end_epoch": self._end_epoch,
            "snapshot": self._snapshot,
            "leave": self._leave,
        }

    def _answer(self, peer: Peer, answer: Message) -> None:
        peer.waiting = None
        try:
            peer.channel.send(answer)
        except AsyncError:
            self.forget(peer)  # it died; its connection will be closed by the loop

    # Coming in

    def _hello(self, peer: Peer, message: Message) -> Message | None:
        if not hmac.compare_digest(str(message["token"]), self.token):
            raise RefusedError("this server belongs to another run (wrong token)")
        worker = int(message["worker"])
        if not 0 <= worker < self.workers:
            raise RefusedError(f"this run has {self.workers} workers; there is no worker {worker}")
        if worker in self.peers:
            raise RefusedError(f"worker {worker} is here already")
        self._admit(worker, Layout.from_json(message["layout"]), message["method"])
        peer.worker, self.peers[worker] = worker, peer
        self.joined.add(worker)
        if self._server is None and worker != 0:
            peer.waiting = "hello"
            return None
        return self._welcome(worker)

    def _admit(self, worker: int, layout: Layout, method: Message) -> None:
        if not self.joined:
            self.layout, self.method = layout, method
            self.memory = SharedMemory.create(layout.size, self.workers)
        elif difference := layout.difference(self.layout):
            raise RefusedError(f"worker {worker} has another model than the others: {difference}")
        elif different := [key for key in self.method if self.method[key] != method.get(key)]:
            raise RefusedError(f"worker {worker} was started with another {different[0]} than the others")

    def _welcome(self, worker: int) -> Message:
        server = self._server
        return {
            "memory": self.memory.path,
            "workers": self.workers,
            "initialised": server is not None,
            "refused": server.refused.get(worker, 0) if server else 0,
            "sequence": 1 + (server.sequences.get(worker, -1) if server else -1),
            "position": self.positions.get(worker),
            "learning_rate": self.schedule.learning_rate if server else None,
        }

    def _initialise(self, peer: Peer, message: Message) -> Message:
        """Worker 0 brings the parameters, in its slot or, with all the rest of the state, in a file."""
        if self._server is not None or peer.worker != 0:
            raise RefusedError("the parameters are there already")
        parameters = self.memory.slot(0).clone()
        self.rule, self.schedule = self.build(self.method, self.layout, parameters)
        barrier = int(self.method["updates_per_step"]) if self.method["barrier"] else 0
        server = ParameterServer(parameters, self.rule, barrier, self.method["last_version"])
        if message["state"] is not None:
            self._restore(server, message["state"])
        self._server = server
        self.events = EventLog(self.run_dir / "events.jsonl", server.sequences)
        self._write_description()
        self.memory.publish(server.parameters, server.version)
        for other in list(self.peers.values()):
            if other.waiting is not None and other.worker is not None:
                self._answer(other, self._welcome(other.worker))
        return self._welcome(0)

    def _restore(self, server: ParameterServer, path: str) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        server.load_state_dict(state["server"])
        self.positions, self.epochs = state["positions"], state["epochs"]

    def _write_description(self) -> None:
        description = {"workers": self.workers, "method": self.method, "layout": self.layout.to_json()}
        (self.run_dir / "run.json").write_text(json.dumps(description, indent=1) + "\n")

    @property
    def server(self) -> ParameterServer:
        if self._server is None:
            raise RefusedError("the server has no parameters yet")
        return self._server

    # Training

    def _push(self, peer: Peer, message: Message) -> Message | None:
        assert peer.worker is not None
        if self.finished:
            return self._farewell(peer.worker)
        update = Update(
            worker=peer.worker,
            sequence=int(message["sequence"]),
            base_version=int(message["base_version"]),
            weight=float(message["weight"]),
            delta=self.memory.slot(peer.worker),
        )
        peer.waiting, peer.report = "push", message["report"]
        version = self.server.version
        if not message["wait"] and not self.server.changes_next:
            self._answer(peer, self._accepted(update))
        receipt = self.server.push(update)
        if receipt.status is not Status.HELD:
            self.memory.mark_taken(peer.worker, update.sequence)
        self._settle(version, self.server.released() + ([] if receipt.status is Status.HELD else [receipt]))
        return None

    def _accepted(self, update: Update) -> Message:
        """The answer to an update that will only be added to others: its sender need not wait for that."""
        staleness = self.server.version - update.base_version
        return {"status": "accepted", "staleness": staleness} | self._state_for(update.worker)

    def _state_for(self, worker: int) -> Message:
        """What an answer says besides the receipt."""
        return {
            "version": self.server.version,
            "refused": self.server.refused.get(worker, 0),
            "finished": self.finished,
            "learning_rate": self.schedule.learning_rate,
        }

    def _settle(self, version: int, settled: list[Receipt]) -> None:
        """Publishes what has changed since ``version``, then answers whoever waits for these receipts."""
        if self.server.version != version:
            self.memory.publish(self.server.parameters, self.server.version)
            if version == 0:
                heap.trim()
        for each in settled:
            self._record(each)
        self.finished = self.finished or self._budget_spent()
        for each in settled:
            peer = self.peers.get(each.worker)
            if peer is not None and peer.waiting == "push":
                self._answer(peer, self._reply(each))
        if self.finished:
            self._release_barrier()

    def _record(self, receipt: Receipt) -> None:
        """Notes where in its data the worker was, for its restart, and writes the event."""
        peer = self.peers.get(receipt.worker)
        report = peer.report if peer is not None else {}
        if receipt.status in (Status.APPLIED, Status.REFUSED):
            self.positions[receipt.worker] = report.get("position", {})
            self.epochs += report.get("epochs", 0.0)
        self.events.write(self.clock(), receipt, report)

    def _budget_spent(self) -> bool:
        max_epoch = self.method["max_epoch"]
        return self.server.finished or bool(max_epoch and self.epochs > max_epoch - 1e-6)

    def _reply(self, receipt: Receipt) -> Message:
        # behind a barrier the round may have gone on after this update: the worker is to pull what is there now
        return asdict(receipt) | {"status": receipt.status.value} | self._state_for(receipt.worker)

    def _farewell(self, worker: int) -> Message:
        """The answer to an update that comes after the run's last step."""
        return {"status": Status.FINISHED.value, "staleness": 0} | self._state_for(worker)

    def _release_barrier(self) -> None:
        for worker, peer in list(self.peers.items()):
            if peer.waiting == "push":
                self._answer(peer, self._farewell(worker))

    def _begin_epoch(self, peer: Peer, message: Message) -> Message:
        self.schedule.begin_epoch(int(message["epoch"]))
        return {"learning_rate": self.schedule.learning_rate}

    def _end_epoch(self, peer: Peer, message: Message) -> Message:
        self.schedule.end_epoch(int(message["epoch"]), message["loss"])
        return {"learning_rate": self.schedule.learning_rate}

    def _snapshot(self, peer: Peer, message: Message) -> Message:
        state = {"server": self.server.state_dict(), "positions": self.positions, "epochs": self.epochs}
        try:
            torch.save(state, message["path"])
        except (OSError, RuntimeError) as error:
            raise RefusedError(f"the server's state cannot be written to {message['path']}: {error}") from error
        return {"version": self.server.version}

    def _leave(self, peer: Peer, message: Message) -> Message:
        self.forget(peer)
        if self._server is None:
            return {}
        if message["finished"]:
            self.finished = True
            self._release_barrier()
        else:
            version = self.server.version
            self.server.limit_barrier(len(self.peers))
            self._settle(version, self.server.released())
        return {}
