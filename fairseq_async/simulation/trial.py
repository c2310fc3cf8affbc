"""A trial runs one method on one cluster: it drives a :class:`Coordinator` under a virtual clock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from statistics import median

import torch
from torch import Tensor

from fairseq_async.algorithms import Update
from fairseq_async.algorithms.rule import State
from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol import Assignment, Receipt, Report
from fairseq_async.protocol.receipt import SETTLED
from fairseq_async.server.build import build_coordinator
from fairseq_async.server.compressed_starts import checksum, compressed_starts
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.membership import Membership
from fairseq_async.server.outcome import Instruction, Outcome
from fairseq_async.simulation.clock import Clock, EventKind, ScheduledEvent
from fairseq_async.simulation.cluster import Cluster, Exchange, Presence, Speed
from fairseq_async.simulation.experiment import Experiment, Method
from fairseq_async.simulation.fragments import fragmented_work
from fairseq_async.simulation.rules import AdaScaleRule, build_method
from fairseq_async.simulation.schedule import LearningRate, make_optimizer
from fairseq_async.simulation.workers import LogicalWorker, SharedModel
from fairseq_async.worker.connection.compressor import Compressor
from fairseq_async.worker.shards import place

_MOST_REFUSED = 3
Write = Callable[[float, Receipt, Report, JsonObject], None]


class Trial:
    """Runs one method on one cluster.

    A worker's update is computed at once when the worker takes the parameters, because these are the server's at that
    moment: no copy of them is kept. The clock decides when the update arrives. The coordinator decides what becomes of
    it, and which worker waits for which, as in a real server.

    Args:
        model: shared with other trials.
        start: the parameters with which this trial begins.
        write: takes virtual time, receipt, report and further fields of each settled update.
        first: number of the first worker among the workers of all regions.
    """

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        cluster: Cluster,
        model: SharedModel,
        start: Tensor,
        write: Write,
        first: int = 0,
    ) -> None:
        self.cluster, self.model, self.write, self.method = cluster, model, write, method
        self.seconds = [Speed(cluster.seconds_of(w), first + w, model.seed) for w in range(cluster.workers)]
        self.presence = [Presence(cluster.absences, w) for w in range(cluster.workers)]
        self.rate = LearningRate(experiment.schedule, method.optimizer.lr, experiment.steps)
        self.parameters = start.clone()
        built = build_method(method, experiment, cluster.workers, model.order.sizes, self.parameters, model.layout)
        self.spec, self.rule, self.sends_gradients = built.spec, built.rule, built.sends_gradients
        self._micro_batches = getattr(method.options, "micro_batches", 1)
        # no timeouts, because no simulated worker is silent: it is there, or it has died
        self.membership = Membership(cluster.workers, now=0.0, timeout=inf, arrival_timeout=inf)
        self.coordinator = build_coordinator(built.spec, built.rule, built.plan, self.parameters, self.membership)
        self.server = self.coordinator.server
        self.rounds, self.starts = built.rounds, compressed_starts(self.spec, model.layout)
        self.exchanges = [cluster.exchange_of(worker) for worker in range(cluster.workers)]
        self.clock = Clock()
        self.workers = [LogicalWorker(w, torch.zeros_like(start), number=first + w) for w in range(cluster.workers)]
        self.line_ends = 0.0  # when the server will have processed the updates that stand in line
        self.answers_at = 0.0  # when the server answers the update that it processes
        self.grace_ends = -inf  # the end of the last grace period that was put on the clock
        self.steps, self.tokens = 0, 0.0
        self._place_model()
        self.fragments = fragmented_work(method, model, self.rate)
        for worker, presence in enumerate(self.presence):
            for time in presence.arrivals():
                self.clock.schedule(ScheduledEvent(time, EventKind.JOINS, worker))
            for time in presence.departures():
                self.clock.schedule(ScheduledEvent(time, EventKind.DIES, worker))

    @property
    def finished(self) -> bool:
        return self.coordinator.finished or self.diverged

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.clock.now

    @property
    def version(self) -> int:
        """Version of the server's parameters."""
        return self.server.version

    @property
    def sequences(self) -> dict[int, int]:
        """Sequence number of the last settled update of each worker."""
        return self.server.sequences

    @property
    def diverged(self) -> bool:
        """Whether several updates of a worker were refused; in a real run this worker stops."""
        return max(self.server.refused.values(), default=0) >= _MOST_REFUSED

    def advance(self) -> bool:
        """Processes the next event; returns False if there is none: all is done, or all wait for a dead worker."""
        event = None if self.finished else self.clock.next()
        if event is None:
            return False
        worker = self.workers[event.worker]
        match event.kind:
            case EventKind.JOINS:
                self._join(worker)
            case EventKind.DIES:
                self._die(worker)
            case EventKind.ARRIVES if event.incarnation == worker.incarnation:
                self._arrive(worker)
            case EventKind.IS_TAKEN if event.incarnation == worker.incarnation:
                self._push(worker)
            case EventKind.GRACE_ENDS if self.coordinator.deadline == event.time:
                self._deliver(self.coordinator.tick(self.clock.now))
        return True

    def evaluate(self) -> float:
        """Returns the loss of the server's parameters."""
        if not self.sends_gradients:
            self.model.flat.copy_(self.parameters)
        return self.model.evaluate()

    # Workers

    def _place_model(self) -> None:
        """Puts the model's parameters where the server's are, or, for local steps, into memory of their own."""
        self.model.live_in(self.parameters if self.sends_gradients else self.model.flat)
        if not self.sends_gradients:
            for worker in self.workers:
                worker.optimizer = make_optimizer(self.method.optimizer, self.model.parameters)

    def _join(self, worker: LogicalWorker) -> None:
        worker.incarnation += 1
        worker.compressor = self._make_compressor(worker.id)  # one that comes back has lost its residual
        worker.streamed = None
        if worker.optimizer is not None and worker.incarnation > 1:
            worker.optimizer = make_optimizer(self.method.optimizer, self.model.parameters)
        now = self.clock.now
        self.membership.connect(worker.id, str(worker.incarnation), now)
        self._deliver(self.coordinator.recount(now, changed=True))
        self._begin(worker, self.coordinator.instruct(worker.id, None, now).assignment, since=now)

    def _make_compressor(self, worker: int) -> Compressor | None:
        push = self.spec.compress.push
        if push is None:
            return None
        return Compressor(push, self.spec, self.model.layout, worker, self.method.error_feedback)

    def _die(self, worker: LogicalWorker) -> None:
        """Removes a worker, as when the connection of a real worker closes."""
        worker.incarnation += 1
        self.membership.leave(worker.id, for_good=False, now=self.clock.now)
        if self.starts is not None:
            self.starts.remove_worker(worker.id)
        self._deliver(self.coordinator.depart(worker.id, self.clock.now))

    def _begin(self, worker: LogicalWorker, assignment: Assignment, since: float) -> None:
        """Lets a worker, which has waited ``since`` then, take the parameters and compute, and schedules its update."""
        if assignment.idle:
            self._deliver(self.coordinator.wait(worker.id, self.clock.now))
            return
        worker.base_version = self.server.version
        given, payload = self._given(worker, assignment)
        pulled = self._pulled_bytes(worker, payload)
        answered = max(self.clock.now, self.answers_at) + self._pulling(self.exchanges[worker.id], pulled)
        meanwhile = 0 if self.fragments is None else self.fragments.meanwhile(worker)
        steps, loss, tokens = self._compute(worker, assignment, given)
        seconds = [self.seconds[worker.id].of_step(worker.steps + step) for step in range(steps)]
        presence, ready, before = self.presence[worker.id], since, 0.0
        if meanwhile:
            ready = presence.done(worker.sent_at, sum(seconds[:meanwhile]))
            before = ready - worker.sent_at
        started = max(answered, ready)
        computed = presence.done(started, sum(seconds[meanwhile:]))
        worker.steps += steps
        worker.sent_at = computed
        worker.report = Report(
            local_steps=steps,
            step_seconds=median(seconds),
            computing_seconds=before + computed - started,
            waiting_seconds=started - ready,
            loss=loss,
            shard=worker.id if self.sends_gradients else assignment.shard,
            tokens=tokens,
            look_ahead=assignment.look_ahead or None,
            micro_batches=assignment.micro_batches or None,
            offset=assignment.first_micro_batch,
            bytes_received=pulled,
            start_payload=checksum(payload),
        )
        pushing = self.exchanges[worker.id].transfer(self._encode(worker))
        self.clock.schedule(ScheduledEvent(computed + pushing, EventKind.ARRIVES, worker.id, worker.incarnation))

    def _encode(self, worker: LogicalWorker) -> int:
        """Replaces the update by what its bytes decode to; returns how many bytes go to the server at once."""
        worker.compress()
        if self.rounds is None:
            return worker.report.bytes_sent or 0
        received = (worker.report.bytes_received or 0) + self.rounds.asked
        sent = self.rounds.first + self.rounds.second
        worker.report = replace(worker.report, bytes_sent=sent, bytes_received=received)
        return self.rounds.first

    def _pulled_bytes(self, worker: LogicalWorker, payload: Tensor | None) -> int:
        if payload is not None:
            return payload.numel()
        return 4 * (self.model.layout.size if self.fragments is None else self.fragments.pulled(worker))

    def _pulling(self, exchange: Exchange, size: int) -> float:
        """Returns the seconds until parameters of so many bytes have come."""
        seconds = exchange.transfer(size)
        if self.rounds is not None:  # the second round is between the last update and the step
            seconds += exchange.transfer(self.rounds.asked)
            seconds += exchange.transfer(self.rounds.second)
        return seconds

    def _given(self, worker: LogicalWorker, assignment: Assignment) -> tuple[Tensor | None, Tensor | None]:
        """Returns the parameters that the worker is given, and the payload in which they come. Both are None where
        nothing is compressed; the payload is None where these parameters are not."""
        if self.starts is None:
            return None, None
        sequence = None if self.fragments is None or worker.streamed is None else worker.sequence - 1
        starts = self.starts.of(worker.id, sequence)
        payload = None if starts is None else starts.payload(self.server, assignment.look_ahead)
        if starts is not None and payload is not None:
            return starts.decode(payload).to(self.parameters), payload
        whole = self._start(assignment) if sequence is None else self.server.dispatch_fragment(sequence)
        self.starts.note_taken(worker.id, whole, sequence)
        return whole, None

    def _start(self, assignment: Assignment) -> Tensor:
        """Returns the server's parameters for a worker, ahead where told; they must be copied, or used at once."""
        if not assignment.look_ahead:
            return self.server.dispatch()
        ahead = torch.empty_like(self.parameters)
        self.server.write_ahead(ahead, assignment.look_ahead)
        return ahead

    def _compute(self, worker: LogicalWorker, assignment: Assignment, given: Tensor | None) -> tuple[int, float, float]:
        """Computes the worker's next update; returns its steps, loss and tokens. ``given`` are parameters that came
        compressed."""
        if self.fragments is not None:
            return self.fragments.compute(worker, assignment, self.server, given)
        start = self._start(assignment) if given is None else given
        self.server.note_pull(worker.id, start)
        if self.sends_gradients:
            average = self._micro_batches
            if assignment.first_micro_batch is None:
                batches = [(worker.id, worker.sequence * average + each) for each in range(average)]
            else:
                dealt = range(assignment.first_micro_batch, assignment.first_micro_batch + assignment.micro_batches)
                batches = [place(number, len(self.workers), average) for number in dealt]
            with self._computing_at(start):
                loss = self.model.gradient(worker, batches, average)
            return len(batches), loss, worker.weight
        clip_norm = self.method.optimizer.clip_norm
        losses, tokens = self.model.local_steps(worker, start, assignment, self.rate, clip_norm)
        return assignment.local_steps, sum(losses) / assignment.local_steps, tokens

    @contextmanager
    def _computing_at(self, start: Tensor) -> Iterator[None]:
        """Puts ``start`` into the server's parameters inside the block, because the model computes there."""
        if start is self.parameters:
            yield
            return
        now = self.parameters.clone()
        self.parameters.copy_(start)
        yield
        self.parameters.copy_(now)

    # The server

    def _arrive(self, worker: LogicalWorker) -> None:
        begin = max(self.clock.now, self.line_ends)
        self.line_ends = begin + self.cluster.exchange.server_seconds
        if begin > self.clock.now:
            self.clock.schedule(ScheduledEvent(begin, EventKind.IS_TAKEN, worker.id, worker.incarnation))
        else:
            self._push(worker)

    def _push(self, worker: LogicalWorker) -> None:
        self.answers_at = self.clock.now + self.cluster.exchange.server_seconds
        self._deliver(self.coordinator.push(_update(worker), worker.report, self.clock.now))

    def _deliver(self, outcome: Outcome) -> None:
        """Writes all that was settled, then instructs the workers: none takes parameters before all is written."""
        for _, error in outcome.failures:
            raise error
        if self.starts is not None:
            self.starts.follow(self.server)
        deadline = self.coordinator.deadline
        if deadline is not None and deadline != self.grace_ends:
            self.grace_ends = deadline
            self.clock.schedule(ScheduledEvent(deadline, EventKind.GRACE_ENDS, 0))
        for settled in outcome.settled:
            receipt, report = settled.receipt, settled.report
            worker = self.workers[receipt.worker]
            if worker.compressor is not None:
                worker.compressor.settle(self.server.takes(receipt))
            if receipt.status in SETTLED:
                self.steps += report.local_steps or 0
                self.tokens += report.tokens or 0.0
            self.write(self.clock.now, receipt, report, settled.recorded | self._gain())
            worker.sequence += 1
        if not self.finished:
            for instruction in outcome.instructions:
                self._instruct(instruction)

    def _instruct(self, instruction: Instruction) -> None:
        worker = self.workers[instruction.worker]
        since = self.clock.now if instruction.receipt is None else worker.sent_at
        self._begin(worker, instruction.assignment, since)

    def _gain(self) -> JsonObject:
        return {"gain": self.rule.last_gain} if isinstance(self.rule, AdaScaleRule) else {}

    # Stop and go on

    _PLAIN = ("line_ends", "answers_at", "grace_ends", "steps", "tokens")

    def state_dict(self) -> State:
        """Returns the whole state, between two calls of :meth:`advance`; torch loads it with ``weights_only``."""
        state = {name: getattr(self, name) for name in self._PLAIN}
        since = self.coordinator.held_since
        return state | {
            "coordinator": self.coordinator.state_dict(),
            "membership": self.membership.state_dict(),
            "waiting": self.coordinator.waiting.state_dict(),
            "shares_begun": self.coordinator.shares.begun,
            "barrier": self.coordinator.waiting.size,
            "held": {worker: (since[worker], version) for worker, version in sorted(self.server.held_from.items())},
            "clock": self.clock.state_dict(),
            "workers": [worker.state_dict() for worker in self.workers],
            "starts": None if self.starts is None else self.starts.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned; the trial goes on from there, the same to the bit."""
        self.coordinator.load_state_dict(state["coordinator"])
        if self.starts is not None:
            self.starts.load_state_dict(state["starts"])
        self.membership.load_state_dict(state["membership"])
        if isinstance(self.coordinator.plan, LocalStepPlan):
            self.coordinator.plan.awaited.clear()  # all workers are here, and go on with their work
        self.clock.load_state_dict(state["clock"])
        for worker, own in zip(self.workers, state["workers"], strict=True):
            worker.compressor = None if own["compressor"] is None else self._make_compressor(worker.id)
            worker.load_state_dict(own)
        for name in self._PLAIN:
            setattr(self, name, state[name])
        if self.spec.full_rounds:
            self.coordinator.await_workers(state["barrier"])
        for held, (since, version) in state["held"].items():  # not in the server's state: held anew
            self.coordinator.hold(_update(self.workers[held]), self.workers[held].report, since, version)
        self.coordinator.shares.begun = dict(state.get("shares_begun", {}))
        self.coordinator.waiting.load_state_dict(state["waiting"])  # last: a period ends where no update is held


def _update(worker: LogicalWorker) -> Update:
    tokens = worker.report.tokens or 0.0
    micro_batches = worker.report.micro_batches or 1
    about = worker.id, worker.sequence, worker.base_version, worker.weight
    return Update(*about, worker.delta, tokens, micro_batches=micro_batches)
