"""One method on one cluster: the driver of a :class:`ParameterServer` under a virtual clock."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms import Lateness, Rule, Update
from fairseq_async.server import Layout, ParameterServer, Receipt, Status
from fairseq_async.server.grace import Grace
from fairseq_async.server.plan import Passes, Plan
from fairseq_async.server.rounds import Rounds
from fairseq_async.simulation.clock import Clock, Happening, Kind
from fairseq_async.simulation.cluster import Cluster, Presence, Speed
from fairseq_async.simulation.experiment import (
    AdaScaleOptions,
    AdasumOptions,
    Experiment,
    HybridOptions,
    LocalSGDOptions,
    Method,
)
from fairseq_async.simulation.rules import AdaScaleSteps, AdasumOfRanks, ScheduledSteps
from fairseq_async.simulation.schedule import LearningRate, make_optimizer
from fairseq_async.simulation.workers import LogicalWorker, Message, SharedModel
from fairseq_async.worker import outer

_MOST_REFUSED = 3
Write = Callable[[float, Receipt, Message], None]


@dataclass(frozen=True)
class Deal:
    """What a method is made of: the server's parts, and the description that a real run writes as its method."""

    rule: Rule
    plan: Plan
    description: Message
    sends_gradients: bool


def deal(
    method: Method, experiment: Experiment, workers: int, shards: list[int], parameters: Tensor, layout: Layout
) -> Deal:
    """Builds rule and plan as the real servers do.

    Raises:
        ConfigurationError: options that do not go together.
    """
    options, optimizer, steps = method.options, method.optimizer, experiment.steps
    rate = LearningRate(experiment.schedule, optimizer.lr, steps)
    if isinstance(options, LocalSGDOptions):
        own = options.model_copy(update={"total_steps": steps, "seed": experiment.seed})
        description = own.describe(workers, shards)
        return Deal(*outer.build(description, layout, parameters), description, sends_gradients=False)
    if isinstance(options, AdasumOptions):
        rounds = Rounds(workers, options.local_steps, steps, dynamic=False, shards=shards, seed=experiment.seed)
        description = options.model_dump() | {"barrier": workers}
        return Deal(AdasumOfRanks(layout, workers), rounds, description, sends_gradients=False)
    inner = make_optimizer(optimizer, [parameters])
    rule: ScheduledSteps
    if isinstance(options, AdaScaleOptions):
        rule = AdaScaleSteps(
            inner, workers, optimizer.clip_norm, rate, 1.0, smoothing=options.smoothing, last=float(steps)
        )
        description = options.model_dump() | {"barrier": workers, "last_version": None, "updates_per_step": workers}
    else:
        assert isinstance(options, HybridOptions)
        description = options.model_copy(update={"total_steps": 1}).describe(workers, {})
        size = description["updates_per_step"]
        description |= {"last_version": max(1, steps * workers // size)}
        rule = ScheduledSteps(inner, size, optimizer.clip_norm, rate, size / workers)
    return Deal(rule, Passes(rule, max_epoch=0), description, sends_gradients=True)


class Trial:
    """Runs one method on one cluster.

    What a worker will send is computed at once when it takes the parameters, for they are the server's then: no copy of
    them is kept. The clock says when it arrives.

    Args:
        model: shared with other trials; ``start`` are the parameters with which this one begins.
        write: takes virtual time, receipt and report of each settled update.
    """

    def __init__(
        self, experiment: Experiment, method: Method, cluster: Cluster, model: SharedModel, start: Tensor, write: Write
    ) -> None:
        self.cluster, self.model, self.write, self.method = cluster, model, write, method
        self.seconds = [Speed(cluster.seconds_of(w), w, experiment.seed) for w in range(cluster.workers)]
        self.presence = [Presence(cluster.absences, w) for w in range(cluster.workers)]
        self.rate = LearningRate(experiment.schedule, method.optimizer.lr, experiment.steps)
        self.parameters = start.clone()
        self.deal = deal(method, experiment, cluster.workers, model.order.sizes, self.parameters, model.layout)
        described = self.deal.description
        lateness = Lateness(**described.get("lateness", {}))
        self.server = ParameterServer(
            self.parameters, self.deal.rule, described["barrier"], described.get("last_version"), lateness
        )
        self.grace = Grace(described.get("grace"))
        self.transfer = cluster.exchange.transfer(model.layout.size)
        self.clock = Clock()
        self.workers = [LogicalWorker(w, torch.zeros_like(start)) for w in range(cluster.workers)]
        self.departed: set[int] = set()
        self.idle: set[int] = set()
        self.held: list[int] = []  # whose updates are behind the barrier, in the order of their arrival
        self.line_ends = 0.0  # when the server will have worked off the updates that stand in line
        self.answers_at = 0.0  # when it answers what it is at
        self.steps, self.tokens = 0, 0.0
        self._enter()
        for worker, presence in enumerate(self.presence):
            for time in presence.arrivals():
                self.clock.schedule(Happening(time, Kind.JOINS, worker))
            for time in presence.departures():
                self.clock.schedule(Happening(time, Kind.DIES, worker))

    @property
    def finished(self) -> bool:
        ended = isinstance(self.deal.rule, AdaScaleSteps) and self.deal.rule.finished
        return self.server.finished or self.deal.plan.finished or ended or self.diverged

    @property
    def diverged(self) -> bool:
        """A worker's updates keep having NaN or Inf; in a real run it stops."""
        return max(self.server.refused.values(), default=0) >= _MOST_REFUSED

    def advance(self) -> bool:
        """The next thing that happens; False when nothing will: the run is finished, or all wait for a dead worker."""
        happening = None if self.finished else self.clock.next()
        if happening is None:
            return False
        worker = self.workers[happening.worker]
        match happening.kind:
            case Kind.JOINS:
                self._join(worker)
            case Kind.DIES:
                self._die(worker)
            case Kind.ARRIVES if happening.life == worker.life:
                self._arrive(worker)
            case Kind.IS_TAKEN if happening.life == worker.life:
                self._take(worker)
            case Kind.GRACE_ENDS if self.grace.deadline == happening.time:
                self.server.complete_round()
                self._settle(self.server.released())
        return True

    def evaluate(self) -> float:
        """The loss of the server's parameters."""
        if not self.deal.sends_gradients:
            self.model.flat.copy_(self.parameters)
        return self.model.evaluate()

    # Workers

    def _enter(self) -> None:
        """The model computes where the server's parameters are, or, for local steps, beside them."""
        self.model.live_in(self.parameters if self.deal.sends_gradients else self.model.flat)
        if not self.deal.sends_gradients:
            for worker in self.workers:
                worker.optimizer = make_optimizer(self.method.optimizer, self.model.parameters)

    def _join(self, worker: LogicalWorker) -> None:
        worker.life += 1
        self.departed.discard(worker.id)
        if worker.optimizer is not None and worker.life > 1:
            worker.optimizer = make_optimizer(self.method.optimizer, self.model.parameters)
        self._count_barrier()
        self._begin(worker, self.deal.plan.assign(worker.id), since=self.clock.now)

    def _die(self, worker: LogicalWorker) -> None:
        """As where the connection of a real one closes."""
        worker.life += 1
        self.idle.discard(worker.id)
        self.server.withdraw(worker.id)
        self.held = [each for each in self.held if each != worker.id]
        self.deal.plan.forget(worker.id)
        if not self.deal.description.get("waits_for_dead", True):
            self.departed.add(worker.id)
            self._count_barrier()
        self._wake()

    def _begin(self, worker: LogicalWorker, place: Message, since: float) -> None:
        """The worker takes the parameters and computes; its update is on its way. It waited ``since`` then."""
        if place.get("idle"):
            self.idle.add(worker.id)
            self._count_barrier()
            return
        self.server.note_pull(worker.id)
        self.grace.begin_work(worker.id, self.clock.now)
        worker.base_version = self.server.version
        started = max(self.clock.now, self.answers_at) + self.transfer
        if self.deal.sends_gradients:
            steps, loss = 1, self.model.gradient(worker, worker.id, worker.sequence)
            tokens = worker.weight
        else:
            steps = place["local_steps"]
            clip_norm = self.method.optimizer.clip_norm
            losses, tokens = self.model.local_steps(worker, self.parameters, place, self.rate, clip_norm)
            loss = sum(losses) / steps
        seconds = [self.seconds[worker.id].of_step(worker.steps + step) for step in range(steps)]
        computed = self.presence[worker.id].done(started, sum(seconds))
        worker.steps += steps
        worker.sent_at = computed
        worker.report = {
            "local_steps": steps,
            "step_seconds": median(seconds),
            "computing_seconds": computed - started,
            "waiting_seconds": started - since,
            "loss": loss,
            "shard": place.get("shard", worker.id),
            "epochs": 0.0,
            "tokens": tokens,
        }
        self.clock.schedule(Happening(computed + self.transfer, Kind.ARRIVES, worker.id, worker.life))

    # The server

    def _arrive(self, worker: LogicalWorker) -> None:
        begin = max(self.clock.now, self.line_ends)
        self.line_ends = begin + self.cluster.exchange.server_seconds
        if begin > self.clock.now:
            self.clock.schedule(Happening(begin, Kind.IS_TAKEN, worker.id, worker.life))
        else:
            self._take(worker)

    def _take(self, worker: LogicalWorker) -> None:
        early = self.deal.sends_gradients and not self.server.changes()  # answered before it is added to others
        self.answers_at = self.clock.now + (0.0 if early else self.cluster.exchange.server_seconds)
        receipt = self._push(worker)
        if receipt.status is Status.HELD:
            self._wait_for_others(worker)
            self._settle(self.server.released())
        else:
            self._settle([receipt])

    def _push(self, worker: LogicalWorker) -> Receipt:
        update = Update(worker.id, worker.sequence, worker.base_version, worker.weight, worker.delta)
        receipt = self.server.push(update)
        if receipt.status is Status.HELD:
            self.held.append(worker.id)
        return receipt

    def _wait_for_others(self, worker: LogicalWorker) -> None:
        if not self.server.held:  # the round is complete
            return
        before = self.grace.deadline
        if not self.grace.goes_on(worker.id, self._active - self.server.held, self.deal.plan, self.clock.now):
            self.server.complete_round()
        elif self.grace.deadline is not None and before is None:
            self.clock.schedule(Happening(self.grace.deadline, Kind.GRACE_ENDS, 0))

    def _settle(self, settled: list[Receipt]) -> None:
        """All that was applied is applied before anyone takes parameters."""
        if not self.server.held:
            self.grace.deadline, self.held = None, []
        for receipt in settled:
            worker = self.workers[receipt.worker]
            report = worker.report
            if receipt.status in (Status.APPLIED, Status.REFUSED, Status.STALE):
                self.deal.plan.record(receipt.worker, receipt.weight, report)
                self.steps += report["local_steps"]
                self.tokens += report["tokens"]
            self.write(self.clock.now, receipt, report | self._gain())
            worker.sequence += 1
        if self.finished:
            return
        for receipt in settled:
            worker = self.workers[receipt.worker]
            self._begin(worker, self.deal.plan.assign(worker.id), since=worker.sent_at)
        self._wake()

    def _gain(self) -> dict[str, float]:
        rule = self.deal.rule
        return {"gain": rule.gain.gain} if isinstance(rule, AdaScaleSteps) else {}

    def _wake(self) -> None:
        """Idle workers for whom there is work again: one that died has left it."""
        for worker in sorted(self.idle):
            place = self.deal.plan.assign(worker)
            if not place.get("idle"):
                self.idle.discard(worker)
                self._count_barrier()
                self._begin(self.workers[worker], place, since=self.clock.now)

    @property
    def _active(self) -> set[int]:
        return set(range(self.cluster.workers)) - self.departed - self.idle

    def _count_barrier(self) -> None:
        """A round waits for those who are at work, or are still to come for the first time."""
        if not self.deal.description["barrier"]:
            return
        active = max(1, len(self._active))
        if self.grace.seconds is None:
            self.deal.rule.limit_round(active)
        self.server.limit_barrier(active)
        released = self.server.released()
        if released:
            self._settle(released)

    # Stop and go on

    _PLAIN = ("departed", "idle", "held", "line_ends", "answers_at", "steps", "tokens")

    def state_dict(self) -> dict[str, Any]:
        """All of it, between two calls of :meth:`advance`, in types that torch loads without trust."""
        state = {name: getattr(self, name) for name in self._PLAIN}
        return state | {
            "server": self.server.state_dict(),
            "started_from": self.server.started_from,
            "barrier": self.server.barrier,
            "plan": self.deal.plan.state_dict(),
            "clock": self.clock.state_dict(),
            "grace": self.grace.state_dict(),
            "workers": [worker.state_dict() for worker in self.workers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was taken, to the bit."""
        self.server.load_state_dict(state["server"])
        self.server.started_from = dict(state["started_from"])
        self.deal.plan.load_state_dict(state["plan"])
        if isinstance(self.deal.plan, Rounds):
            self.deal.plan.awaited.clear()  # the workers are all here, at what they were at
        self.clock.load_state_dict(state["clock"])
        self.grace.load_state_dict(state["grace"])
        for worker, own in zip(self.workers, state["workers"], strict=True):
            worker.load_state_dict(own)
        for name in self._PLAIN:
            setattr(self, name, state[name])
        if self.deal.description["barrier"] and self.grace.seconds is None:
            self.deal.rule.limit_round(state["barrier"])
        self.server.limit_barrier(state["barrier"])
        held, self.held = self.held, []
        for each in held:  # the server does not keep them: they are pushed again, and meet what they met
            self._push(self.workers[each])
