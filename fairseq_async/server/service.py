"""The server behind its door: what the answer to each message is."""

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from fairseq_async.algorithms import Update
from fairseq_async.errors import AsyncError, RefusedError
from fairseq_async.exchange import copy
from fairseq_async.server import heap
from fairseq_async.server import run as runs
from fairseq_async.server.door import Door
from fairseq_async.server.grace import Grace
from fairseq_async.server.job import Job
from fairseq_async.server.layout import Layout
from fairseq_async.server.members import Members, Peer
from fairseq_async.server.parameter_server import ParameterServer, Receipt, Status
from fairseq_async.server.plan import Message
from fairseq_async.server.refusals import Refusals
from fairseq_async.server.run import Build, Run


class Service:
    """Answers the workers of one run, in the order in which they ask.

    Args:
        token: what a worker must know to come in.
        workers: how many workers are expected; their ids are 0 to ``workers - 1``.
        run_dir: where ``events.jsonl``, ``run.json`` and snapshots go.
        build: makes the rule once the first worker has described model and method.
        clock: seconds since 1970.
    """

    def __init__(
        self, token: str, workers: int, run_dir: Path, build: Build, clock: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self.door = Door(token)
        self.members = Members(workers, clock)
        self.job = Job(run_dir, build, self.members.capacity, clock)
        self.refusals = Refusals()
        self.finished = False
        self.grace = Grace(None)
        self._awaited = 0

    @property
    def run(self) -> Run:
        return self.job.run

    @property
    def server(self) -> ParameterServer:
        return self.job.server

    # What a message leads to

    def greet(self, peer: Peer) -> None:
        """A connection was made."""
        self._answer(peer, self.door.greet(peer))

    def receive(self, peer: Peer, message: Message) -> None:
        """Handles one message. A mistake is answered; the peer stays, and so does the server."""
        self.members.hear(peer)
        try:
            self._recount()  # who was silent counts again
            answer = self._handle(peer, message)
        except AsyncError as error:
            self.refusals.count(type(error).__name__, peer.name, error)
            answer = {"error": str(error)}
        except OSError as error:
            self.refusals.count("files", peer.name, error)
            answer = {"error": f"the server cannot use its directory: {error}"}
        except Exception as error:  # whatever a message leads to, it must not end the others' run
            if not isinstance(error, KeyError | TypeError | ValueError):
                traceback.print_exc()
            self.refusals.count("malformed message", peer.name, repr(error))
            answer = {"error": f"malformed message: {error!r}"}
        if answer is not None:
            self._answer(peer, answer)
        if peer.worker is None:
            peer.channel.end()  # a stranger has one attempt

    def forget(self, peer: Peer) -> None:
        """The connection is closed."""
        self._part(peer, for_good=False)

    def _handle(self, peer: Peer, message: Message) -> Message | None:
        if peer.worker is None:
            return self._introduce(peer, message)
        kind = str(message.get("kind"))
        if kind == "alive":
            return None
        handler = self._handlers().get(kind)
        if handler is None:
            raise RefusedError(f"there is no message {kind!r}")
        if not peer.admitted and kind not in ("hello", "leave"):
            raise RefusedError("say hello first")
        return handler(peer, message)

    def _handlers(self) -> dict[str, Callable[[Peer, Message], Message | None]]:
        return {
            "hello": self._hello,
            "initialise": self._initialise,
            "push": self._push,
            "pull": self._pull,
            "wait": self._wait,
            "plan": lambda peer, message: self.run.hear(peer.id, message),
            "snapshot": self._snapshot,
            "leave": self._leave,
        }

    def _answer(self, peer: Peer, answer: Message, tensor: torch.Tensor | None = None) -> None:
        peer.waiting = None
        self.members.hear(peer)  # from now on it is its turn
        peer.channel.queue(answer, tensor)
        try:
            peer.channel.flush()
        except AsyncError:
            self.forget(peer)  # it died; its connection will be closed by the loop

    # Coming in

    def _introduce(self, peer: Peer, message: Message) -> Message:
        answer = self.door.introduce(peer, message, self.members)
        before = self.members.peers.get(peer.id)
        if before is not None:  # its connection broke, or it is another in the place of one that is silent
            self.forget(before)
            before.channel.end()
        self.members.enter(peer)
        return answer

    def _hello(self, peer: Peer, message: Message) -> Message | None:
        layout, method = Layout.from_json(message["layout"]), dict(message["method"])
        if not self.job.described:
            self.job.describe(layout, method)
            self._follow_terms()
        self.job.terms.check(peer.name, layout, method)
        self.job.memory.open(peer.id)
        peer.admitted, peer.remote = True, bool(message.get("remote"))
        peer.channel.room = self.job.memory.slot(peer.id) if peer.remote else None
        peer.channel.notice_death(self.members.timeout)
        self._count_barrier()
        if not self.job.begun and peer.worker != 0:
            peer.waiting = "hello"
            return None
        return self._welcome(peer.id)

    def _follow_terms(self) -> None:
        method = self.job.method
        self.members.timeout = float(method.get("worker_timeout", self.members.timeout))
        self.members.waits_for_dead = bool(method.get("waits_for_dead", True))
        self.grace = Grace(method.get("grace"))

    def _welcome(self, worker: int) -> Message:
        job = self.job
        here = {"memory": job.memory.path, "publishes": job.terms.publishes, "slots": self.members.capacity}
        if not self.job.begun:
            return here | {"initialised": False}
        return here | {
            "initialised": True,
            "sequence": 1 + self.server.sequences.get(worker, -1),
            "position": self.run.positions.get(worker),
            **self._state_for(worker),
        }

    def _initialise(self, peer: Peer, message: Message) -> Message:
        """Worker 0 brings the parameters, in its slot or, with all the rest of the state, in a file."""
        if peer.worker != 0:
            raise RefusedError("worker 0 brings the parameters")
        if self.job.begun:  # the answer was lost, and it asks again
            return self._welcome(0)
        state = None if message["state"] is None else runs.read(Path(message["state"]))
        self.job.begin(self.job.memory.slot(0).clone(), state, "the beginning" if state is None else "a checkpoint")
        self.job.keep_snapshots()
        self.job.snapshots.wait()  # until it is there nobody is told of parameters, and a server that dies begins anew
        for other in list(self.members.peers.values()):
            if other.waiting == "hello":
                self._answer(other, self._welcome(other.id))
        return self._welcome(0)

    def recover(self) -> str:
        """Goes on from the newest snapshot in the run's directory, whose name is returned.

        Raises:
            RefusedError: there are snapshots, and none can be read.
        """
        name = self.job.recover()
        if self.job.begun:
            self._follow_terms()
            self.finished = self.run.finished
        return name

    # Training

    def _pull(self, peer: Peer, message: Message) -> None:
        """For workers that do not read the published copy: the current parameters, in their slot or behind this answer.

        Not in the answer to an update: until that is heard, the slot must keep the update for a second attempt.
        """
        slot = self.job.memory.slot(peer.id)
        copy(slot, self.server.parameters)
        self.server.note_pull(peer.id)
        self._answer(peer, {"version": self.server.version}, slot if peer.remote else None)

    def _push(self, peer: Peer, message: Message) -> None:
        if self.finished:
            self._farewell(peer)
            return
        update = Update(
            worker=peer.id,
            sequence=int(message["sequence"]),
            base_version=int(message["base_version"]),
            weight=float(message["weight"]),
            delta=self.job.memory.slot(peer.id),
        )
        # what came over a network may not be what was sent
        norm = None if peer.remote or message.get("norm") is None else float(message["norm"])
        self.server.check(update)
        self.run.plan.check(message["report"])
        began = time.perf_counter()
        peer.waiting, peer.report = "push", message["report"] | {"server_seconds": peer.served}
        version = self.server.version
        if self.job.terms.publishes and not message["wait"] and not self.server.changes_next:
            self._answer(peer, self._accepted(update))
        receipt = self.server.push(update, norm)
        if receipt.status is Status.HELD:
            self._wait_for_others(peer)
            self._settle(version, self.server.released())
        else:
            self.job.memory.mark_taken(peer.id, update.sequence)
            self._settle(version, [receipt])
        peer.served = time.perf_counter() - began

    def _accepted(self, update: Update) -> Message:
        """The answer to an update that will only be added to others: its sender need not wait for that."""
        staleness = self.server.version - update.base_version
        return {"status": "accepted", "staleness": staleness} | self._state_for(update.worker)

    def _state_for(self, worker: int) -> Message:
        """What an answer says besides the receipt."""
        self.grace.begin_work(worker, self.clock())
        return {"finished": self.finished, **self.run.assignment(worker)}

    def _settle(self, version: int, settled: list[Receipt]) -> None:
        """Publishes what has changed since ``version``, then answers whoever waits for these receipts."""
        if self.server.version != version:
            self.job.publish()
            if version == 0:
                heap.trim()
        if not self.server.held:
            self.grace.deadline = None
        peers = self.members.peers
        for each in settled:
            report = peers[each.worker].report if each.worker in peers else {}
            self.run.record(each, report, self.clock())
        self.finished = self.finished or self.run.finished
        for each in settled:
            peer = peers.get(each.worker)
            if peer is not None and peer.waiting == "push":
                self._reply(peer, each)
        if self.finished:
            self._release()

    def _reply(self, peer: Peer, receipt: Receipt) -> None:
        # behind a barrier the round may have gone on after this update: the worker is to pull what is there now
        self._answer(peer, asdict(receipt) | {"status": receipt.status.value} | self._state_for(receipt.worker))

    # Waiting for others

    def _wait_for_others(self, peer: Peer) -> None:
        held = self.server.held
        if held and not self.grace.goes_on(peer.id, self.members.awaited - held, self.run.plan, self.clock()):
            self.server.complete_round()

    def _wait(self, peer: Peer, message: Message) -> None:
        """A worker for which there is nothing to do."""
        peer.waiting = "work"
        self.members.idle.add(peer.id)
        self._count_barrier()
        self._wake()

    def _wake(self) -> None:
        """Answers idle workers for whom there is work again, or the end."""
        for worker in sorted(self.members.idle):
            if worker not in self.members.idle:  # to count the barrier may have ended the run, and woken it
                continue
            state = self._state_for(worker)
            if self.finished or not state.get("idle"):
                self.members.idle.discard(worker)
                self._answer(self.members.peers[worker], state)
                self._count_barrier()

    def tick(self) -> float:
        """What time brings: the end of a grace period, a worker that is not heard of, a snapshot.

        Returns:
            Seconds until there is something to do again.
        """
        if not self.job.begun:
            return 1.0
        self._recount()
        if not self.finished:
            self.job.keep_snapshots()
        deadline = self.grace.deadline
        if deadline is None:
            return 1.0
        if self.clock() >= deadline:
            version = self.server.version
            self.server.complete_round()
            self._settle(version, self.server.released())
            return 1.0
        return min(1.0, deadline - self.clock())

    def _recount(self) -> None:
        if self.job.begun and self.job.method["barrier"] and len(self.members.awaited) != self._awaited:
            self._count_barrier()

    def _count_barrier(self) -> None:
        """A round waits for those who are at work, or are still to come."""
        self._awaited = len(self.members.awaited)
        if not self.job.begun or not self.job.method["barrier"]:
            return
        active = max(1, self._awaited)
        if self.job.method.get("grace") is None:
            self.run.limit_round(active)
        version = self.server.version
        self.server.limit_barrier(active)
        self._settle(version, self.server.released())

    # Saving and leaving

    def _snapshot(self, peer: Peer, message: Message) -> Message:
        """For a checkpoint that a worker writes."""
        try:
            torch.save(self.run.state_dict(), message["path"])
        except (OSError, RuntimeError) as error:
            raise RefusedError(f"the server's state cannot be written to {message['path']}: {error}") from error
        return {"version": self.server.version}

    def _leave(self, peer: Peer, message: Message) -> Message:
        self._part(peer, for_good=True)
        if self.job.begun and message["finished"]:
            self.finished = True
            self._release()
        return {}

    def _part(self, peer: Peer, for_good: bool) -> None:
        if not self.members.leave(peer, for_good) or not self.job.begun:
            return
        self.server.withdraw(peer.id)
        self.run.plan.forget(peer.id)
        self._count_barrier()
        self._wake()

    def _release(self) -> None:
        for peer in list(self.members.peers.values()):
            if peer.waiting == "push":
                self._farewell(peer)
        self._wake()

    def _farewell(self, peer: Peer) -> None:
        """The answer to an update that comes after the run's last step."""
        version = self.server.version
        self._reply(peer, Receipt(peer.id, -1, version, 0.0, Status.FINISHED, 0, 0.0, version))
