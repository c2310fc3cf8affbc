"""The service of a run: lets in the workers that know the run's token, and answers their requests."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import ClassVar

import torch
from torch import Tensor

from fairseq_async import protocol
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import HalfAppliedError, RefusedError
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.notices import GONE, Tell, tell_log
from fairseq_async.records.snapshots import Snapshots
from fairseq_async.records.state_files import read_state, restored_path
from fairseq_async.server.kept_state import KeptState
from fairseq_async.server.network.connections import USUAL, Connections, Peer, use_idle_cores
from fairseq_async.server.outcome import Outcome
from fairseq_async.server.plan import Build
from fairseq_async.server.resume import check_snapshot, newest_state
from fairseq_async.server.run import Run
from fairseq_async.server.shards.remote import HostConnector

# what a worker may send while its update waits in its slot; everything else could open the slot, or write into it
_WHILE_HELD = (protocol.Alive, protocol.Leave, protocol.ScheduleEvent, protocol.SaveState)


class Service(Connections):
    """Answers the workers of one run, in the order in which they ask.

    Args:
        token: what a worker must know to come in.
        workers: how many workers are expected; their ids are 0 to ``workers - 1``.
        run_dir: where ``events.jsonl``, ``run.json`` and snapshots go.
        build: makes rule and plan when worker 0 has brought the parameters.
        clock: returns seconds that do not go back; all waiting is measured by it.
        tell: passes a line to the user who runs the server.

    Attributes:
        run: the run; None until a worker has described it.
        resumes: whether the run goes on from a snapshot of an earlier run in the directory, unless worker 0 brings a
            newer state.
        reach: how to reach hosts of shards on other machines; None where that is not possible.
        wakeup: a socket that becomes readable when :meth:`tick` has something to do before its time; None without one.
        busy: whether there is something left to do when the workers of a finished run have left.
        state: keeps the run's state on disk.
    """

    run_class: ClassVar[type[Run]] = Run

    def __init__(
        self,
        token: str,
        workers: int,
        run_dir: Path,
        build: Build,
        clock: Callable[[], float] = time.monotonic,
        tell: Tell = tell_log,
    ) -> None:
        super().__init__(token, workers, clock)
        self.run_dir, self.build, self.tell = run_dir, build, tell
        self.snapshots = Snapshots(run_dir, clock, tell, self.handshake.run)
        self.journal = self.snapshots.journal
        self.run: Run | None = None
        self.state = KeptState(self.snapshots)
        self.resumes = self.busy = False
        self.reach: HostConnector | None = None
        self.wakeup: socket | None = None

    @property
    def described(self) -> Run:
        """The run.

        Raises:
            RefusedError: no worker has described it yet.
        """
        if self.run is None:
            raise RefusedError("say hello first")
        return self.run

    @property
    def begun(self) -> Run | None:
        """The run if it has parameters; else None."""
        return self.run if self.run is not None and self.run.begun else None

    @property
    def finished(self) -> bool:
        return self.begun is not None and self.begun.coordinator.finished

    # Requests

    def receive(self, peer: Peer, body: bytes) -> None:
        """Handles the bytes of one message.

        Raises:
            ProtocolError: they are not JSON.
        """
        if len(body) > USUAL:
            peer.channel.largest = USUAL  # a worker says hello once on a connection, and nothing else is as large
        try:
            request = protocol.parse_request(body)
        except protocol.MalformedMessageError as error:
            return self.refuse(peer, "malformed message", error)
        self.handle(peer, request)

    def handle(self, peer: Peer, request: protocol.Request) -> None:
        """Handles one request. A request that fails gets an error as its answer; peer and server stay.

        Raises:
            HalfAppliedError: the server's state is lost; another process has to go on from its last snapshot.
        """
        self.note_message(peer)
        if self.has(peer) and not isinstance(request, protocol.Alive):
            # before the recount: the time that this update took decides how long a round waits for others
            self.membership.ask(peer.id, self.clock(), peer.admitted and isinstance(request, protocol.Push))
        try:
            self._recount()  # a worker that was silent counts again
            answer = self._respond(peer, request)
        except HalfAppliedError:
            raise
        except Exception as error:  # of any kind: it is this worker's alone, and the run goes on
            self.answer_failure(peer, error)
        else:
            if answer is not None:
                self.answer(peer, answer)
        if peer.worker is None:
            peer.channel.end()  # a stranger has one attempt

    def disconnected(self, peer: Peer) -> None:
        """Lets the worker of a closed connection leave."""
        self._depart(peer, for_good=False)

    def excuse(self, seconds: float) -> None:
        """Moves all times on by the seconds in which this process was suspended or stopped."""
        self.membership.excuse(seconds)

    def tick(self) -> float:
        """Does what is due by now; returns the seconds until it is to be called again. Raises as :meth:`handle`."""
        try:
            return self._tick()
        except HalfAppliedError:
            raise
        except Exception as error:  # a mistake of this program's own must not end the run
            self.refusals.count_mistake("the clock", error)
            return 1.0

    def _tick(self) -> float:
        if (run := self.begun) is None:
            return 1.0
        coordinator = run.coordinator
        use_idle_cores(self.peers, self.membership, run.spec.server)
        began, outcome = time.perf_counter(), coordinator.tick(self.clock())
        self._deliver(run, outcome)
        if outcome.settled and (peer := self.peers.get(outcome.settled[-1].receipt.worker)):
            peer.server_seconds += time.perf_counter() - began  # a round that closes at its deadline has no pusher
        self.state.keep(run)
        return 1.0 if coordinator.deadline is None else max(0.0, min(1.0, coordinator.deadline - self.clock()))

    def recover(self) -> str:
        """Goes on from the newest snapshot in the run's directory, if there is one; returns what to call this start.

        Raises:
            RefusedError: there are snapshots, and none can be read.
        """
        found = self.snapshots.latest(check_snapshot, self.resumes)
        if found is None:
            return "the beginning"
        path, state = found
        described = MethodSpec.from_json(state["spec"]), Layout.from_json(state["layout"])
        run = self._describe(*described, state.get("gpu", ""))  # not in an older snapshot
        run.from_checkpoint = bool(state.get("from_checkpoint"))
        now, parameters = time.time(), torch.zeros(run.layout.size, dtype=torch.float32, device="cpu")
        run.begin(self.build, parameters, state, f"snapshot {path.name}", self.membership, now)
        self.membership.expect_back(run.coordinator.server.sequences)
        self.membership.note_left(state.get("left", ()))  # not in an older snapshot
        return path.name

    def _respond(self, peer: Peer, request: protocol.Request) -> protocol.Answer | None:
        """Returns the answer to a request; None if it has none, or is answered later."""
        if peer.worker is None:
            answer = self.introduce(peer, request)
            self.journal("connected", f"worker {peer.id} is connected, and loads its data and model")
            return answer
        if peer.push is not None and not isinstance(request, _WHILE_HELD):
            raise RefusedError("the worker waits for the answer to its update: it must not ask for anything else")
        match request:
            case protocol.Alive():
                return None
            case protocol.Hello():
                return self._hello(peer, request)
            case protocol.Leave():
                return self._leave(peer, request.finished)
        if not peer.admitted:
            raise RefusedError("say hello first")
        return self._respond_to_member(peer, request)

    def _respond_to_member(self, peer: Peer, request: protocol.Request) -> protocol.Answer | None:
        run = self.described
        match request:
            case protocol.Initialise():
                return self._initialise(peer, request)
            case protocol.Push():
                return self._push(peer, request)
            case protocol.Pull():
                self._pull(peer, request)
                return None
            case protocol.WaitForWork():
                self._deliver(run, run.coordinator.wait(peer.id, self.clock(), request.for_end))
                return None
            case protocol.ScheduleEvent():
                return self._follow(run, peer, request)
            case protocol.SaveState():
                return self._save_state(run, peer)
        raise RefusedError(f"there is no message {request.kind!r} after the introduction")

    def _deliver(self, run: Run, outcome: Outcome) -> None:
        """Publishes the parameters and logs the settled updates, then answers the workers of an outcome."""
        run.slots.publish(run.coordinator.server)
        run.log(outcome.settled, time.time())
        if run.coordinator.finished:
            self.state.keep(run)  # a worker that is told of the end may be the last that has the parameters
        for instruction in outcome.instructions:
            peer = self.peers.get(instruction.worker)
            if peer is None:
                continue
            try:
                self._instruct(run, peer, run.reply(instruction))
            except HalfAppliedError:
                raise
            except Exception as error:  # such as no memory for its parameters: the other workers must get their answers
                self.answer_failure(peer, error)
        answered = {instruction.worker for instruction in outcome.instructions}
        for worker, failure in outcome.failures:
            unanswered = None if worker in answered else self.peers.get(worker)
            if unanswered is None:
                self.refusals.count_mistake(f"worker {worker}", failure)
            else:
                unanswered.push = None
                run.slots.release(unanswered)
                self.answer_failure(unanswered, failure)

    def _instruct(self, run: Run, peer: Peer, reply: protocol.PushReply | protocol.WorkReply) -> None:
        """Answers a worker. A worker on another machine that would pull next gets the parameters behind the answer."""
        push, peer.push = peer.push, None
        run.slots.release(peer)
        if peer.remote and push is not None and isinstance(reply, protocol.PushReply):
            if (pull := run.slots.next_pull(push, reply)) is not None:
                brought, parameters = run.slots.give(run.coordinator.server, peer.id, pull)
                self.answer(peer, replace(reply, with_parameters=True))
                return self.answer(peer, brought, parameters)
        self.answer(peer, reply)

    # Coming in

    def _hello(self, peer: Peer, hello: protocol.Hello) -> protocol.Answer | None:
        self.membership.make_ready(peer.id)
        if self.run is None and peer.worker != 0:  # only worker 0 says what is trained
            peer.hello = hello
            self.membership.wait(peer.id, "hello")
            return None
        answer = self._admit(self.run or self._describe(hello.spec, hello.layout, hello.gpu), peer, hello)
        for other in list(self.peers.values()) if peer.worker == 0 else []:
            if (waiting := other.hello) is not None:
                other.hello = None
                self.handle(other, waiting)
        return answer

    def _admit(self, run: Run, peer: Peer, hello: protocol.Hello) -> protocol.Answer | None:
        try:
            run.check(peer.name, hello)
        except RefusedError:
            self._end_membership(peer, for_good=True)  # its process ends, now or later: no round waits for it
            raise
        run.slots.note_shared(peer, hello)
        run.slots.open(peer)  # before the worker is admitted: there may be no room
        peer.admitted = True
        peer.channel.largest = USUAL
        peer.channel.notice_death(self.membership.timeout)
        self.journal("joined", f"worker {peer.id} has joined, {self.membership.ready} of {run.spec.workers} are there")
        self._recount(changed=True)
        if not run.begun and peer.worker != 0:
            self.membership.wait(peer.id, "hello")
            return None
        return run.welcome(peer.id, self.membership.capacity, self.clock())

    def _describe(self, spec: MethodSpec, layout: Layout, gpu: str) -> Run:
        """Makes the run that worker 0, or a snapshot, describes."""
        self.run = self.run_class(self.run_dir, spec, layout, self.membership.capacity, self.tell, self.reach, gpu)
        self.membership.timeout = spec.server.worker_timeout
        return self.run

    def _initialise(self, peer: Peer, request: protocol.Initialise) -> protocol.Answer | None:
        """Takes the parameters that worker 0 brings: in its slot or, with the rest of the state, in a file."""
        run = self.described
        if peer.worker != 0:
            raise RefusedError("worker 0 brings the parameters")
        if run.begun:  # the answer was lost, and worker 0 asks again
            return run.welcome(0, self.membership.capacity, self.clock())
        restored = read_state(restored_path(self.run_dir)) if request.restored else None
        source, state = newest_state(run, restored, self.snapshots, self.resumes, self.tell)
        parameters = run.slots.first_parameters(peer)
        run.from_checkpoint, run.moments = request.from_checkpoint, request.moments
        return self._begin(run, parameters, state, source)

    def _begin(self, run: Run, parameters: Tensor, state: State | None, source: str) -> protocol.Answer | None:
        """Begins the run, and welcomes the workers that wait for it; returns the answer to worker 0."""
        run.begin(self.build, parameters, state, source, self.membership, time.time())
        self.journal("begin", f"the run begins at version {run.coordinator.server.version:,}, from {source}")
        self._recount(changed=True)
        self.state.keep(run)
        self.snapshots.wait()  # no worker gets parameters before: a server that dies until then begins anew
        for worker in self.membership.waiting("hello"):
            self.answer(self.peers[worker], run.welcome(worker, self.membership.capacity, self.clock()))
        return run.welcome(0, self.membership.capacity, self.clock())

    def _recount(self, changed: bool = False) -> None:
        if (run := self.begun) is not None:
            self._deliver(run, run.coordinator.recount(self.clock(), changed))

    # Updates and parameters

    def _push(self, peer: Peer, push: protocol.Push) -> protocol.Answer | None:
        run = self.described
        coordinator, now = run.coordinator, self.clock()
        if coordinator.finished:
            return run.reply(coordinator.rejected(peer.id, now, push.sequence))
        payload = run.slots.unpack(peer, push)
        update = run.checked_update(peer.id, push)
        began = time.perf_counter()
        self.membership.wait(peer.id, "push")
        use_idle_cores(self.peers, self.membership, run.spec.server)
        report = replace(push.report, server_seconds=peer.server_seconds, payload=payload)
        norm = None if peer.channel.with_tensor else push.norm  # what has arrived may differ
        outcome = coordinator.push(update, report, now, norm)
        peer.push = push  # not before: an update that has failed is answered, and its sender may ask again
        if peer.id in coordinator.server.held:
            run.slots.hold(peer)
        self._deliver(run, outcome)
        peer.server_seconds = time.perf_counter() - began
        return None

    def _pull(self, peer: Peer, pull: protocol.Pull) -> None:
        """Gives parameters to a worker that does not read the published copy: in its slot, or behind the answer.

        In shared memory they never come with the answer to an update: until the worker has that answer, its slot must
        keep the update for a second attempt.
        """
        run = self.described
        reply, parameters = run.slots.give(run.coordinator.server, peer.id, pull)
        self.answer(peer, reply, parameters if peer.remote or reply.compressed else None)

    def _follow(self, run: Run, peer: Peer, event: protocol.ScheduleEvent) -> protocol.Answer:
        if peer.worker != 0:
            raise RefusedError("worker 0 tells of its epochs, which the learning rate follows")
        return protocol.ScheduleReply(run.coordinator.follow(peer.id, event))

    # Saving and leaving

    def _save_state(self, run: Run, peer: Peer) -> protocol.Answer:
        """Writes the run's state for a checkpoint of worker 0."""
        if peer.worker != 0:
            raise RefusedError("worker 0 saves the run's state")
        return run.save_state(0)

    def _leave(self, peer: Peer, finished: bool) -> protocol.Answer:
        self._depart(peer, for_good=True)
        if self.begun is not None and finished:
            self._deliver(self.begun, self.begun.coordinator.end(self.clock()))
        return protocol.Goodbye()

    def _depart(self, peer: Peer, for_good: bool) -> None:
        if not self.has(peer):
            return
        super().disconnected(peer)
        self._end_membership(peer, for_good)

    def _end_membership(self, peer: Peer, for_good: bool) -> None:
        now = self.clock()
        self.membership.leave(peer.id, for_good, now)
        self.journal("parted", f"worker {peer.id} {'has left' if for_good else GONE}")
        if self.begun is not None:
            self._deliver(self.begun, self.begun.coordinator.depart(peer.id, now))
