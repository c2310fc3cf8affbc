"""The server behind its door: what the answer to each message is."""

import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from fairseq_async.errors import AsyncError, RefusedError
from fairseq_async.server import run as runs
from fairseq_async.server.door import Door
from fairseq_async.server.job import Job
from fairseq_async.server.layout import Layout
from fairseq_async.server.members import Members, Peer
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.plan import Message
from fairseq_async.server.refusals import Refusals
from fairseq_async.server.run import Build, Run
from fairseq_async.server.training import Training

Handler = Callable[[Peer, Message], Message | None]


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
        self.training = Training(self.job, self.members, clock, self._answer)

    @property
    def run(self) -> Run:
        return self.job.run

    @property
    def server(self) -> ParameterServer:
        return self.job.server

    @property
    def finished(self) -> bool:
        return self.training.finished

    def tick(self) -> float:
        """Does what time brings; returns the seconds until there is something to do again."""
        return self.training.tick()

    # What a message leads to

    def greet(self, peer: Peer) -> None:
        """A connection was made."""
        self._answer(peer, self.door.greet(peer))

    def receive(self, peer: Peer, message: Message, accepted: bool = False) -> None:
        """Handles one message. A mistake is answered; the peer stays, and so does the server.

        Args:
            accepted: it is an update that has had its answer.
        """
        self.members.hear(peer)
        try:
            self.training.recount()  # who was silent counts again
            handle: Handler = partial(self.training.push, accepted=True) if accepted else self._handle
            answer = handle(peer, message)
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

    def _handlers(self) -> dict[str, Handler]:
        return {
            "hello": self._hello,
            "initialise": self._initialise,
            "push": self.training.push,
            "pull": self.training.pull,
            "wait": self.training.wait,
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
            self.training.follow_terms()
        self.job.terms.check(peer.name, layout, method)
        self.job.memory.open(peer.id)
        peer.admitted, peer.remote = True, bool(message.get("remote"))
        peer.channel.room = self.job.memory.slot(peer.id) if peer.remote else None
        peer.channel.notice_death(self.members.timeout)
        self.training.count_barrier()
        if not self.job.begun and peer.worker != 0:
            peer.waiting = "hello"
            return None
        return self._welcome(peer.id)

    def _welcome(self, worker: int) -> Message:
        job = self.job
        here = {"memory": job.memory.path, "publishes": job.terms.publishes, "slots": self.members.capacity}
        if not self.job.begun:
            return here | {"initialised": False}
        return here | {
            "initialised": True,
            "sequence": 1 + self.server.sequences.get(worker, -1),
            "position": self.run.positions.get(worker),
            **self.training.state_for(worker),
        }

    def _initialise(self, peer: Peer, message: Message) -> Message:
        """Worker 0 brings the parameters, in its slot or, with all the rest of the state, in a file."""
        if peer.worker != 0:
            raise RefusedError("worker 0 brings the parameters")
        if self.job.begun:  # the answer was lost, and it asks again
            return self._welcome(0)
        state = None if message["state"] is None else runs.read(Path(message["state"]))
        self.job.begin(self.job.memory.slot(0).clone(), state, "the beginning" if state is None else "a checkpoint")
        self.training.finished = self.run.finished  # as the run of the checkpoint may be
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
            self.training.follow_terms()
            self.training.finished = self.run.finished
        return name

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
            self.training.end()
        return {}

    def _part(self, peer: Peer, for_good: bool) -> None:
        if self.members.leave(peer, for_good) and self.job.begun:
            self.training.go_on_without(peer.id)
