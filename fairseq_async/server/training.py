"""What becomes of updates, and who waits for what."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Protocol

import torch

from fairseq_async.algorithms import Update
from fairseq_async.exchange import copy
from fairseq_async.server import heap
from fairseq_async.server.grace import Grace
from fairseq_async.server.job import Job
from fairseq_async.server.members import Members, Peer
from fairseq_async.server.parameter_server import Receipt, Status
from fairseq_async.server.plan import Message


class Answer(Protocol):
    """How a peer is answered."""

    def __call__(self, peer: Peer, answer: Message, tensor: torch.Tensor | None = None) -> None: ...


class Training:
    """Brings the parameter server the updates of a job, and the workers their receipts.

    Args:
        job: what is trained, and how.
        members: who is there.
        clock: seconds since 1970.
        answer: sends a peer one answer.

    Attributes:
        finished: the run has taken its last step, or a worker has ended it.
        meanwhile: what goes on while an update is applied, which changes nothing but parameters and rule.
    """

    def __init__(self, job: Job, members: Members, clock: Callable[[], float], answer: Answer) -> None:
        self.job, self.members, self.clock, self._answer = job, members, clock, answer
        self.finished = False
        self.grace = Grace(None)
        self.meanwhile: Callable[[], AbstractContextManager[object]] = nullcontext
        self._awaited = 0
        self._shown = 0  # the version that workers see

    def follow_terms(self) -> None:
        """The first worker has said what is trained, and how; or a snapshot has."""
        method = self.job.method
        self.members.timeout = float(method.get("worker_timeout", self.members.timeout))
        self.members.waits_for_dead = bool(method.get("waits_for_dead", True))
        self.grace = Grace(method.get("grace"))

    def pull(self, peer: Peer, message: Message) -> None:
        """For workers that do not read the published copy: the current parameters, in their slot or behind this answer.

        Not in the answer to an update: until that is heard, the slot must keep the update for a second attempt.
        """
        slot = self.job.memory.slot(peer.id)
        copy(slot, self.job.server.parameters)
        self.job.server.note_pull(peer.id)
        self._answer(peer, {"version": self.job.server.version}, slot if peer.remote else None)

    def push(self, peer: Peer, message: Message, accepted: bool = False) -> None:
        """Settles an update, whose sender has had its answer if it was ``accepted``."""
        if self.finished:
            if accepted:
                self.job.memory.mark_taken(peer.id, int(message["sequence"]))
            else:
                self._farewell(peer)
            return
        update = self.update(peer, message)
        # what came over a network may not be what was sent
        norm = None if peer.remote or message.get("norm") is None else float(message["norm"])
        began = time.perf_counter()
        peer.waiting = None if accepted else "push"
        peer.report = message["report"] | {"server_seconds": peer.served}
        server = self.job.server
        if self.job.terms.publishes and not message["wait"] and not server.changes() and not accepted:
            self._answer(peer, self.acceptance(update, server.version))
        receipt = server.admit(update, norm)
        if receipt.status is Status.APPLIED:
            with self.meanwhile():
                receipt = server.take(update, receipt)
                self._publish()
        if receipt.status is Status.HELD:
            self._wait_for_others(peer)
            self._settle(self.job.server.released())
        else:
            self.job.memory.mark_taken(peer.id, update.sequence)
            self._settle([receipt])
        peer.served = time.perf_counter() - began

    def update(self, peer: Peer, message: Message) -> Update:
        """What the message says of the worker's slot.

        Raises:
            RefusedError: no worker can have sent it.
        """
        update = Update(
            worker=peer.id,
            sequence=int(message["sequence"]),
            base_version=int(message["base_version"]),
            weight=float(message["weight"]),
            delta=self.job.memory.slot(peer.id),
        )
        self.job.server.check(update)
        self.job.run.plan.check(message["report"])
        return update

    def acceptance(self, update: Update, version: int) -> Message:
        """The answer to an update that is only added to others at this version: its sender need not wait for that."""
        return {"status": "accepted", "staleness": version - update.base_version} | self.state_for(update.worker)

    def _publish(self) -> None:
        """Shows the parameters if they have changed."""
        before, self._shown = self._shown, self.job.server.version
        if self._shown != before:
            self.job.publish()
            if before == 0:
                heap.trim()

    def state_for(self, worker: int) -> Message:
        """What an answer says besides the receipt."""
        self.grace.begin_work(worker, self.clock())
        return {"finished": self.finished, **self.job.run.assignment(worker)}

    def _settle(self, settled: list[Receipt]) -> None:
        """Publishes what has changed, then answers whoever waits for these receipts."""
        self._publish()
        if not self.job.server.held:
            self.grace.deadline = None
        peers = self.members.peers
        for each in settled:
            report = peers[each.worker].report if each.worker in peers else {}
            self.job.run.record(each, report, self.clock())
        self.finished = self.finished or self.job.run.finished
        for each in settled:
            peer = peers.get(each.worker)
            if peer is not None and peer.waiting == "push":
                self._reply(peer, each)
        if self.finished:
            self._release()

    def _reply(self, peer: Peer, receipt: Receipt) -> None:
        # behind a barrier the round may have gone on after this update: the worker is to pull what is there now
        self._answer(peer, asdict(receipt) | {"status": receipt.status.value} | self.state_for(receipt.worker))

    # Waiting for others

    def _wait_for_others(self, peer: Peer) -> None:
        held = self.job.server.held
        if held and not self.grace.goes_on(peer.id, self.members.awaited - held, self.job.run.plan, self.clock()):
            self.job.server.complete_round()

    def wait(self, peer: Peer, message: Message) -> None:
        """A worker for which there is nothing to do."""
        peer.waiting = "work"
        self.members.idle.add(peer.id)
        self.count_barrier()
        self._wake()

    def _wake(self) -> None:
        """Answers idle workers for whom there is work again, or the end."""
        for worker in sorted(self.members.idle):
            if worker not in self.members.idle:  # to count the barrier may have ended the run, and woken it
                continue
            state = self.state_for(worker)
            if self.finished or not state.get("idle"):
                self.members.idle.discard(worker)
                self._answer(self.members.peers[worker], state)
                self.count_barrier()

    def tick(self) -> float:
        """What time brings: the end of a grace period, a worker that is not heard of, a snapshot.

        Returns:
            Seconds until there is something to do again.
        """
        if not self.job.begun:
            return 1.0
        self.recount()
        if not self.finished:
            self.job.keep_snapshots()
        deadline = self.grace.deadline
        if deadline is None:
            return 1.0
        if self.clock() >= deadline:
            self.job.server.complete_round()
            self._settle(self.job.server.released())
            return 1.0
        return min(1.0, deadline - self.clock())

    def recount(self) -> None:
        """Counts the barrier again if somebody was silent for too long, or is heard again."""
        if self.job.begun and self.job.method["barrier"] and len(self.members.awaited) != self._awaited:
            self.count_barrier()

    def count_barrier(self) -> None:
        """A round waits for those who are at work, or are still to come."""
        self._awaited = len(self.members.awaited)
        if not self.job.begun or not self.job.method["barrier"]:
            return
        active = max(1, self._awaited)
        if self.job.method.get("grace") is None:
            self.job.run.limit_round(active)
        self.job.server.limit_barrier(active)
        self._settle(self.job.server.released())

    # The end

    def go_on_without(self, worker: int) -> None:
        """It is gone; whoever takes its place sends what is held of it anew."""
        self.job.server.withdraw(worker)
        self.job.run.plan.forget(worker)
        self.count_barrier()
        self._wake()

    def end(self) -> None:
        """A worker has ended the run, for all."""
        self.finished = True
        self._release()

    def _release(self) -> None:
        for peer in list(self.members.peers.values()):
            if peer.waiting == "push":
                self._farewell(peer)
        self._wake()

    def _farewell(self, peer: Peer) -> None:
        """The answer to an update that comes after the run's last step."""
        version = self.job.server.version
        self._reply(peer, Receipt(peer.id, -1, version, 0.0, Status.FINISHED, 0, 0.0, version))
