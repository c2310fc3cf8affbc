"""The server behind its door: who may come in, and what the answer to each message is."""

import hmac
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from fairseq_async.algorithms import Lateness, Rule, Update
from fairseq_async.errors import AsyncError, RefusedError
from fairseq_async.exchange import Channel, SharedMemory, copy
from fairseq_async.server import heap
from fairseq_async.server.events import EventLog
from fairseq_async.server.layout import Layout
from fairseq_async.server.parameter_server import ParameterServer, Receipt, Status
from fairseq_async.server.plan import Message, Plan
from fairseq_async.server.recording import Recorder

Build = Callable[[Message, Layout, torch.Tensor], tuple[Rule, Plan]]
"""Makes rule and plan from a method's description, the layout and the flat parameters."""


@dataclass
class Peer:
    """One connection; ``worker`` is None until it has introduced itself."""

    channel: Channel
    worker: int | None = None
    remote: bool = False  # tensors come and go behind the messages, not in shared memory
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
        self.departed: set[int] = set()  # they were here
        self.idle: set[int] = set()  # nothing is left for them to do
        self.deadline: float | None = None  # of the grace period, by the clock
        self._server: ParameterServer | None = None
        self.recorder: Recorder | None = None

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
            self.idle.discard(peer.worker)
            if self._server is not None:
                self._server.withdraw(peer.worker)
                self.plan.forget(peer.worker)
                if not self.method.get("waits_for_dead", True):
                    self._depart(peer.worker)
                self._wake()

    def _handlers(self) -> dict[str, Callable[[Peer, Message], Message | None]]:
        return {
            "hello": self._hello,
            "initialise": self._initialise,
            "push": self._push,
            "pull": self._pull,
            "wait": self._wait,
            "plan": self._hear,
            "snapshot": self._snapshot,
            "leave": self._leave,
        }

    def _answer(self, peer: Peer, answer: Message, tensor: torch.Tensor | None = None) -> None:
        peer.waiting = None
        peer.channel.queue(answer, tensor)
        try:
            peer.channel.flush()
        except AsyncError:
            self.forget(peer)  # it died; its connection will be closed by the loop

    def _answer_with_parameters(self, peer: Peer, answer: Message) -> None:
        """The answer, with the current parameters in the worker's slot or behind the message."""
        assert peer.worker is not None
        slot = self.memory.slot(peer.worker)
        copy(slot, self.server.parameters)
        self.server.note_pull(peer.worker)
        self._answer(peer, answer, slot if peer.remote else None)

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
        peer.remote = bool(message.get("remote"))
        peer.channel.room = self.memory.slot(worker) if peer.remote else None
        self.joined.add(worker)
        self.departed.discard(worker)
        self._count_barrier()
        if self._server is None and worker != 0:
            peer.waiting = "hello"
            return None
        return self._welcome(worker)

    def _admit(self, worker: int, layout: Layout, method: Message) -> None:
        if not self.joined:
            self.layout, self.method = layout, method
            self.memory = SharedMemory.create(layout.size, self.workers, self._publishes)
        elif difference := layout.difference(self.layout):
            raise RefusedError(f"worker {worker} has another model than the others: {difference}")
        elif different := [key for key in self.method if self.method[key] != method.get(key)]:
            raise RefusedError(f"worker {worker} was started with another {different[0]} than the others")

    @property
    def _publishes(self) -> bool:
        """Whether there is a copy of the parameters that workers read when they like; else they come with answers."""
        return bool(self.method.get("publishes", True))

    def _welcome(self, worker: int) -> Message:
        here = {"memory": self.memory.path, "publishes": self._publishes, "workers": self.workers}
        server = self._server
        if server is None:
            return here | {"initialised": False}
        return here | {
            "initialised": True,
            "sequence": 1 + server.sequences.get(worker, -1),
            "position": self.positions.get(worker),
            **self._state_for(worker),
        }

    def _initialise(self, peer: Peer, message: Message) -> Message:
        """Worker 0 brings the parameters, in its slot or, with all the rest of the state, in a file."""
        if self._server is not None or peer.worker != 0:
            raise RefusedError("the parameters are there already")
        parameters = self.memory.slot(0).clone()
        self.rule, self.plan = self.build(self.method, self.layout, parameters)
        lateness = Lateness(**self.method.get("lateness", {}))
        barrier, last_version = int(self.method["barrier"]), self.method.get("last_version")
        server = ParameterServer(parameters, self.rule, barrier, last_version, lateness)
        if message["state"] is not None:
            self._restore(server, message["state"])
        self._server = server
        if self.method.get("record"):
            self.recorder = Recorder(self.run_dir, server, resumed=message["state"] is not None)
        self.events = EventLog(self.run_dir / "events.jsonl", server.sequences)
        self._write_description()
        self._publish()
        for other in list(self.peers.values()):
            if other.waiting is not None and other.worker is not None:
                self._answer(other, self._welcome(other.worker))
        return self._welcome(0)

    def _restore(self, server: ParameterServer, path: str) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["method"] != self._name(self.method):
            raise RefusedError(f"the checkpoint is of {state['method']}, this run is of {self._name(self.method)}")
        server.load_state_dict(state["server"])
        self.positions = state["positions"]
        self.plan.load_state_dict(state["plan"])

    @staticmethod
    def _name(method: Message) -> str:
        return " with outer ".join(str(method[key]) for key in ("method", "outer") if key in method)

    def _write_description(self) -> None:
        description = {"workers": self.workers, "method": self.method, "layout": self.layout.to_json()}
        (self.run_dir / "run.json").write_text(json.dumps(description, indent=1) + "\n")

    @property
    def server(self) -> ParameterServer:
        if self._server is None:
            raise RefusedError("the server has no parameters yet")
        return self._server

    def _publish(self) -> None:
        if self._publishes:
            self.memory.publish(self.server.parameters, self.server.version)

    # Training

    def _pull(self, peer: Peer, message: Message) -> None:
        """For workers that do not read the published copy."""
        self._answer_with_parameters(peer, {"version": self.server.version})

    def _push(self, peer: Peer, message: Message) -> None:
        assert peer.worker is not None
        if self.finished:
            self._farewell(peer)
            return
        update = Update(
            worker=peer.worker,
            sequence=int(message["sequence"]),
            base_version=int(message["base_version"]),
            weight=float(message["weight"]),
            delta=self.memory.slot(peer.worker),
        )
        peer.waiting, peer.report = "push", message["report"]
        version = self.server.version
        if self._publishes and not message["wait"] and not self.server.changes_next:
            self._answer(peer, self._accepted(update))
        receipt = self.server.push(update)
        if receipt.status is Status.HELD:
            self._begin_grace()
            self._settle(version, self.server.released())
        else:
            self.memory.mark_taken(peer.worker, update.sequence)
            self._settle(version, [receipt])
        return None

    def _wait(self, peer: Peer, message: Message) -> None:
        """A worker for which there is nothing to do."""
        assert peer.worker is not None
        peer.waiting = "work"
        self.idle.add(peer.worker)
        self._count_barrier()
        self._wake()

    def _wake(self) -> None:
        """Answers idle workers for whom there is work again, or the end."""
        for worker in sorted(self.idle):
            state = self._state_for(worker)
            if self.finished or not state.get("idle"):
                self.idle.discard(worker)
                self._count_barrier()
                self._answer_with_parameters(self.peers[worker], state)

    # Rounds

    def _begin_grace(self) -> None:
        grace = self.method.get("grace")
        if grace is not None and self.deadline is None:
            self.deadline = self.clock() + grace

    def tick(self) -> float:
        """Ends a grace period that is over; returns the seconds until there is something to do again."""
        if self.deadline is None:
            return 1.0
        if self.clock() >= self.deadline:
            version = self.server.version
            self.server.complete_round()
            self._settle(version, self.server.released())
            return 1.0
        return min(1.0, self.deadline - self.clock())

    def _depart(self, worker: int) -> None:
        self.departed.add(worker)
        self._count_barrier()

    def _count_barrier(self) -> None:
        """A round waits for those who are at work, or are still to come for the first time."""
        if self._server is None or not self.method["barrier"]:
            return
        active = max(1, self.workers - len(self.departed | self.idle))
        if self.method.get("grace") is None:
            self.rule.limit_round(active)
            if self.recorder is not None:
                self.recorder.note(event="limit_round", updates=active)
        version = self.server.version
        self.server.limit_barrier(active)
        self._settle(version, self.server.released())

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
            **self.plan.assign(worker),
        }

    def _settle(self, version: int, settled: list[Receipt]) -> None:
        """Publishes what has changed since ``version``, then answers whoever waits for these receipts."""
        if self.server.version != version:
            self._publish()
            if version == 0:
                heap.trim()
        if not self.server.held:
            self.deadline = None
        for each in settled:
            self._record(each, last=each is settled[-1])
        self.finished = self.finished or self.server.finished or self.plan.finished
        for each in settled:
            peer = self.peers.get(each.worker)
            if peer is not None and peer.waiting == "push":
                self._reply(peer, each)
        if self.finished:
            self._release()

    def _record(self, receipt: Receipt, last: bool) -> None:
        """Notes where in its data the worker was, for its restart, and writes the event."""
        peer = self.peers.get(receipt.worker)
        report = peer.report if peer is not None else {}
        if receipt.status in (Status.APPLIED, Status.REFUSED, Status.STALE):
            self.positions[receipt.worker] = report.get("position", {})
            self.plan.record(receipt.worker, receipt.weight, report)
        recorded = {} if self.recorder is None else self.recorder.of(receipt, last)
        self.events.write(self.clock(), receipt, report | recorded)

    def _reply(self, peer: Peer, receipt: Receipt) -> None:
        # behind a barrier the round may have gone on after this update: the worker is to pull what is there now
        answer = asdict(receipt) | {"status": receipt.status.value} | self._state_for(receipt.worker)
        if self._publishes:
            self._answer(peer, answer)
        else:
            self._answer_with_parameters(peer, answer)

    def _farewell(self, peer: Peer) -> None:
        """The answer to an update that comes after the run's last step."""
        assert peer.worker is not None
        self._reply(peer, _late(peer.worker, self.server.version))

    def _release(self) -> None:
        for peer in list(self.peers.values()):
            if peer.waiting == "push":
                self._farewell(peer)
        self._wake()

    def _hear(self, peer: Peer, message: Message) -> Message:
        assert peer.worker is not None
        if self._server is None:
            raise RefusedError("the server has no plan yet")
        if self.recorder is not None:
            self.recorder.note(**{key: value for key, value in message.items() if key != "kind"})
        return self.plan.hear(peer.worker, message)

    def _snapshot(self, peer: Peer, message: Message) -> Message:
        state = {
            "method": self._name(self.method),
            "server": self.server.state_dict(),
            "positions": self.positions,
            "plan": self.plan.state_dict(),
        }
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
            self._release()
        else:
            assert peer.worker is not None
            self._depart(peer.worker)
        return {}


def _late(worker: int, version: int) -> Receipt:
    return Receipt(worker, -1, version, 0.0, Status.FINISHED, 0, 0.0, version)
