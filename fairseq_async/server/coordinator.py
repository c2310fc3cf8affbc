"""Decides on updates, and which worker waits for which: for the server process, the simulator and the replay."""

from dataclasses import replace

from torch import Tensor

from fairseq_async.algorithms import Region, Update
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError
from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol import SETTLED, Receipt, Report, ScheduleEvent, Status
from fairseq_async.records.event_log import ControlEvent, Settled
from fairseq_async.server.membership import Membership
from fairseq_async.server.outcome import Instruction, Outcome
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.plan import Plan
from fairseq_async.server.rounds.look_ahead import NOTHING_MEASURED, LookAhead
from fairseq_async.server.rounds.shares import Shares
from fairseq_async.server.rounds.waiting import Waiting

_MOST_EVENTS = 64  # control events between two updates; they are all kept until the next update, as a replay needs them


class Coordinator:
    """Passes updates to the parameter server, and says which workers are to be answered, and how.

    It is a plain object without sockets, threads or a clock. Its caller passes the time in, in seconds of any clock
    that does not go back, and delivers the :class:`Outcome` of each call.

    Args:
        membership: the workers; the caller notes in it who connects and who leaves.
        waiting: decides how long a round, or a step, stays open.
        look_ahead: decides how far ahead workers start whose updates are stale.
        shares: divides the micro-batches of a step among the workers.

    Attributes:
        finished: whether the run has taken its last step, or :meth:`end` was called.
        positions: each worker's position in its data at its last settled update.
        held_since: the time since when each worker's update is held, for those that are.
    """

    def __init__(
        self,
        server: ParameterServer,
        plan: Plan,
        membership: Membership,
        waiting: Waiting,
        look_ahead: LookAhead,
        shares: Shares,
    ) -> None:
        self.server, self.plan, self.membership = server, plan, membership
        self.waiting, self.look_ahead, self.shares = waiting, look_ahead, shares
        self.finished = self._ended = False
        self.positions: dict[int, JsonObject | None] = {}
        self._pending: dict[int, Report] = {}  # of each worker that waits for a receipt
        self.held_since: dict[int, float] = {}
        self._answered: dict[int, tuple[str, float]] = {}  # number and answer of each worker's last schedule event
        self._control_events: list[ControlEvent] = []
        self._merged: list[int] = []
        self._awaited = 0
        self._silent: set[int] = set()  # workers whose work was given up
        self._limit: int | None = None
        look_ahead.follow(server.version, server.parameters)

    @property
    def deadline(self) -> float | None:
        """Time when :meth:`tick` is to be called next, the end of the grace period; None without one."""
        return self.waiting.deadline

    def check(self, update: Update, report: Report) -> None:
        """Raises a RefusedError for an update or report that no worker can have sent, as the server is now."""
        self.server.check(update)
        self.plan.check(report)

    def push(self, update: Update, report: Report, now: float, norm: float | None = None) -> Outcome:
        """Settles an update, or holds it until its round is complete. Its sender waits for the receipt.

        Args:
            norm: the update's L2 norm where it is known.
        """
        receipt = self.server.push(update, norm)
        self._pending[update.worker] = report
        if self.shares.micro_batches:
            self.shares.arrive(update.worker, now)
        if receipt.status is not Status.HELD:
            return self._go_on(now, [receipt])
        self.held_since[receipt.worker] = now
        return self._go_on(now, self._complete_round(now, receipt.worker))

    def hold(self, update: Update, report: Report, since: float, version: int) -> None:
        """Holds again an update that was held when a simulation was stopped; it had arrived at this version."""
        self._pending[update.worker] = report
        self.held_since[update.worker] = since
        self.server.hold(update, version)

    def close_round(self, now: float) -> Outcome:
        """Applies the held updates without waiting for others."""
        return self._go_on(now, self._apply_round())

    def instruct(self, worker: int, receipt: Receipt | None, now: float) -> Instruction:
        """Returns the answer to a worker, with its next work; the work begins now."""
        assignment = replace(self.plan.assign(worker), look_ahead=self.look_ahead.of(worker))
        if self.shares.micro_batches:
            first, number = self.shares.deal(worker, self.server.sequences.get(worker, -1) + 1, now)
            assignment = replace(assignment, micro_batches=number, first_micro_batch=first)
        self.waiting.begin_work(worker, now, assignment.micro_batches or 1)
        return Instruction(worker, receipt, assignment, self.finished)

    def rejected(self, worker: int, now: float, sequence: int | None = None) -> Instruction:
        """Returns the answer to an update that comes after the run's last step.

        Args:
            sequence: its number, which was settled before if the answer was lost; None for the worker's next one.
        """
        version, last = self.server.version, self.server.sequences.get(worker, -1)
        number = last + 1 if sequence is None else sequence
        late = Receipt(
            worker=worker,
            sequence=number,
            base_version=version,
            weight=0.0,
            status=Status.DUPLICATE if number <= last else Status.FINISHED,
            staleness=0,
            norm=0.0,
            version=version,
        )
        return self.instruct(worker, late, now)

    # Workers come, wait and go

    def wait(self, worker: int, now: float, for_end: bool = False) -> Outcome:
        """Notes that a worker has nothing to do, and waits for work, or, after its last step, for the run's end."""
        self.membership.wait(worker, "end" if for_end else "work")
        return self._without(worker, now) if for_end else self._go_on(now, self._recounted(now, changed=True))

    def depart(self, worker: int, now: float) -> Outcome:
        """Drops the held update and the work of a worker that has left the membership. Its successor sends anew."""
        self.server.withdraw(worker)
        self._pending.pop(worker, None)
        self.held_since.pop(worker, None)
        return self._without(worker, now)

    def _without(self, worker: int, now: float) -> Outcome:
        """Goes on without a worker that takes no further step."""
        self.plan.release(worker)
        self.look_ahead.remove_worker(worker)
        self.shares.remove_worker(worker)
        self.waiting.remove_worker(worker)
        return self._go_on(now, self._recounted(now, changed=True)) + self._end_if_all_wait(now)

    def _end_if_all_wait(self, now: float) -> Outcome:
        """Ends the run if workers wait for its end, and no other is at work, or can come back."""
        over = not self.finished and self.membership.waiting("end") and self.membership.none_is_at_work(now)
        return self.end(now) if over else Outcome()

    def recount(self, now: float, changed: bool = False) -> Outcome:
        """Makes rounds wait for the workers that are at work now, or still to come, and for no others.

        Args:
            changed: whether a worker has come, gone, or run out of work; otherwise only silence is looked for.
        """
        receipts = self._recounted(now, changed)
        return Outcome() if receipts is None else self._go_on(now, receipts)

    def _recounted(self, now: float, changed: bool) -> list[Receipt] | None:
        """Returns the receipts of a round that does not wait any more; None where nothing has changed."""
        if not self.server.holds:
            return None
        awaited = len(self.waiting.awaited(self.membership, now))
        if not changed and awaited == self._awaited:
            return None
        self._awaited = awaited
        self.await_workers(max(1, awaited))
        return self._complete_round(now)

    def await_workers(self, count: int) -> None:
        """Makes rounds wait for no more than this many workers."""
        if (limit := self.waiting.limit(count)) is not None:
            self.limit_round(limit)

    def tick(self, now: float) -> Outcome:
        """Does what is due by now: gives up the work of silent workers, and ends a grace period that is over."""
        self.server.check_parts()
        outcome = self.recount(now) + self._release_silent(now)
        if self.deadline is not None and now >= self.deadline:
            outcome += self.close_round(now)
        return outcome + self._end_if_all_wait(now)

    def _release_silent(self, now: float) -> Outcome:
        """Lets others do the work of silent workers, and, if some are idle, of workers that hang.

        Idle workers would wait for a worker that hangs at the end of a run. While the others have work of their own, a
        worker that shows life keeps its work.
        """
        silent = self.membership.silent(now)
        if self.membership.idle:
            silent |= {worker for worker in self.membership.members if self._hangs(worker, now)}
        released, self._silent = silent - self._silent, silent
        for worker in released:
            self.plan.release(worker)
        return self._go_on(now) if released else Outcome()

    def _hangs(self, worker: int, now: float) -> bool:
        return self.membership.hangs(worker, now, work=self.plan.expected_seconds(worker) or 0.0)

    def end(self, now: float) -> Outcome:
        """Ends the run for all workers, as one of them has asked."""
        self.finished = self._ended = True
        return self._go_on(now, [])

    def merge(self, region: Region, above: Tensor) -> None:
        """Merges the global server's parameters ``above``: a new version, since workers start from other parameters."""
        region.merge(self.server.parameters, above)
        self.server.version += 1
        self._merged.append(self.server.version)

    def limit_round(self, updates: int) -> None:
        """Makes steps wait for this many updates at most."""
        if updates != self._limit:
            self._limit = updates
            self.server.rule.limit_round(updates)
            if self._control_events and self._control_events[-1].event == "limit_round":
                self._control_events.pop()  # the new limit replaces it: workers may come and go without an update
            self._control_events.append(ControlEvent("limit_round", updates=updates))

    def follow(self, worker: int, event: ScheduleEvent) -> float:
        """Follows the begin or end of an epoch; returns the learning rate. An event that is sent again counts once.

        Raises:
            RefusedError: there were too many control events since the last update.
        """
        number, learning_rate = self._answered.get(worker, ("", 0.0))
        if number != event.number:
            if len(self._control_events) >= _MOST_EVENTS:
                raise RefusedError(f"there were {_MOST_EVENTS} epochs since the last update")
            learning_rate = self.plan.follow(event)
            self._control_events.append(ControlEvent(event.event, epoch=event.epoch, loss=event.loss))
            self._answered[worker] = event.number, learning_rate
        return learning_rate

    # Details

    def _go_on(self, now: float, receipts: list[Receipt] | None = None) -> Outcome:
        """Settles updates, if there are any, wakes idle workers, and settles the rounds that do not wait for more than
        these, until nothing is left to do."""
        outcome = Outcome()
        while True:
            if receipts is not None:
                self._settle(receipts, now, outcome)
            if not self._wake(now, outcome):
                return outcome
            receipts = self._recounted(now, changed=True)

    def _settle(self, receipts: list[Receipt], now: float, outcome: Outcome) -> None:
        """Counts these updates, all of them before any worker gets new work, then instructs the workers that wait."""
        if not self.server.held:
            self.waiting.close()
        self.look_ahead.follow(self.server.version, self.server.parameters)
        waiting = []
        for receipt in receipts:
            waits, report = receipt.worker in self._pending, self._pending.pop(receipt.worker, Report())
            if receipt.status in SETTLED:
                try:
                    self._count(receipt, report)
                except Exception as error:  # whatever it is, the other workers of the round must get their answers
                    outcome.failures.append((receipt.worker, error))
            outcome.settled.append(self._settled(receipt, report, now))
            if waits:
                waiting.append(receipt)
        self.finished = self.finished or self.server.finished or self.plan.finished
        if waiting and self.shares.micro_batches:
            self._divide(now)
            waiting.sort(key=lambda receipt: receipt.worker)  # each gets the batches of its part, if shares are equal
        for receipt in waiting:
            try:
                outcome.instructions.append(self.instruct(receipt.worker, receipt, now))
            except Exception as error:  # as above
                outcome.failures.append((receipt.worker, error))
        if self.finished:
            outcome.instructions += self._reject_waiting(now)

    def _divide(self, now: float) -> None:
        """Divides the micro-batches of the next step among the workers that will send something."""
        members = self.membership
        here = [worker for worker, member in members.members.items() if member.ready and member.pending != "end"]
        workers = set(here) - members.silent(now)
        total = max(len(workers), min(len(members.joined), members.announced))  # the step of those that are gone stays
        self.shares.divide(workers, total, now)

    def _count(self, receipt: Receipt, report: Report) -> None:
        """Counts the work of an update that was settled; last in the plan, which may fail."""
        self.positions[receipt.worker] = report.position
        self.look_ahead.note(receipt.worker, receipt.base_version, receipt.staleness)
        self.plan.record(receipt.worker, report)

    def _settled(self, receipt: Receipt, report: Report, now: float) -> Settled:
        """Returns an update for the log. It has the merges and control events since the update before, unless its line
        is one that a replay does not read: then the next one has them."""
        held_seconds = now - self.held_since.pop(receipt.worker, now)
        if receipt.status not in SETTLED:
            return Settled(receipt, report, held_seconds=held_seconds)
        merged, self._merged = tuple(self._merged), []
        control_events, self._control_events = tuple(self._control_events), []
        return Settled(receipt, report, control_events, held_seconds, merged)

    def _complete_round(self, now: float, arrived: int | None = None) -> list[Receipt]:
        """Applies the held updates unless they wait for others; returns the receipts. The update of worker ``arrived``,
        if any, has just joined them."""
        held = self.server.held
        others = self.waiting.awaited(self.membership, now) - held
        return [] if not held or self.waiting.continues(arrived, others, now, len(held)) else self._apply_round()

    def _apply_round(self) -> list[Receipt]:
        if self.waiting.steps_together:
            self.limit_round(max(1, len(self.server.held)))  # so that the optimizer steps with the last of them
        return self.server.complete_round()

    def _reject_waiting(self, now: float) -> list[Instruction]:
        """Returns the answers to pending updates that no step will take any more."""
        waiting = list(self._pending)
        for worker in self.server.held:
            self.server.withdraw(worker)  # or a worker's leaving, or the end of the grace, would close their step
        self._pending.clear()
        self.held_since.clear()
        self.waiting.close()
        return [self.rejected(worker, now) for worker in waiting]

    def _wake(self, now: float, outcome: Outcome) -> bool:
        """Gives idle workers work where there is some again, or tells all that wait that the run is finished; returns
        whether there were any."""
        before = len(outcome.instructions)
        for worker in sorted(self.membership.idle.union(self.membership.waiting("end") if self.finished else ())):
            instruction = self.instruct(worker, None, now)
            if self.finished or not instruction.assignment.idle:
                self.membership.answered(worker, now)
                outcome.instructions.append(instruction)
        return len(outcome.instructions) > before

    def state_dict(self) -> State:
        """Returns all that another server needs to go on with the run."""
        return {
            "server": self.server.state_dict(),
            "positions": self.positions,
            "plan": self.plan.state_dict(),
            "look_ahead": self.look_ahead.state_dict(),
            "shares": self.shares.state_dict(),
            "merged": self._merged,
        }

    def state_for_waiting_workers(self) -> State:
        """Returns what a new server needs, besides :meth:`state_dict`, to go on with the same run: the answers that
        workers may ask for again, which workers have left for good, and whether one of them has ended the run."""
        return {"answered": self._answered, "left": self.membership.left_for_good, "ended": self._ended}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`, with or without :meth:`state_for_waiting_workers`."""
        self.server.load_state_dict(state["server"])
        self.plan.load_state_dict(state["plan"])
        self.positions = dict(state["positions"])
        self.look_ahead.load_state_dict(state.get("look_ahead", NOTHING_MEASURED))  # not in the first edition
        self.look_ahead.follow(self.server.version, self.server.parameters)
        if "shares" in state:  # not in an older snapshot
            self.shares.load_state_dict(state["shares"])
        self._answered, self._merged = dict(state.get("answered", {})), list(state.get("merged", []))
        self._ended = bool(state.get("ended"))
        self.finished = self._ended or self.server.finished or self.plan.finished
