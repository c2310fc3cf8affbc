"""The state machine that every driver shares: the real run, the simulator and the replay."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_async.algorithms import FragmentedRule, NormGate, Rule, StalenessPolicy, Update
from fairseq_async.algorithms.rule import ComparingRule, State
from fairseq_async.algorithms.threads import copy_in_threads
from fairseq_async.errors import HalfAppliedError, RefusedError
from fairseq_async.exchange import copy
from fairseq_async.server.receipt import Receipt, Status

OPEN = 1 << 30
"""A barrier that never completes a round by itself."""

_LOST = 1 << 32  # updates of one worker that a restart may have taken back


@dataclass(frozen=True)
class Parameters:
    """One consistent state: ``values`` is a flat fp32 copy."""

    version: int
    values: Tensor


class ParameterServer:
    """Holds the global parameters and lets a rule change them, one update at a time.

    A plain object: no threads, no clock, no socket. The version counts the changes of the parameters. Every update
    is known by its worker and sequence number: one that arrives twice is applied once.

    Args:
        parameters: flat fp32 tensor; changed in place.
        rule: what an update does to the parameters.
        barrier: hold the updates until this many, from different workers, are there, then apply them in the order
            of the workers' ids; 0 applies each at once. Who has a clock makes a grace period of it, by
            :meth:`complete_round`.
        last_version: the run is finished when this version is reached; None for no end.
        staleness: what a stale update is worth.
        gate: which norms are taken.
        keeps_last_step: keep the parameters before the last step, from which :meth:`write_ahead` looks ahead; one more
            copy.
        counts_in_rounds: where staleness is weighed, an update of a round is as stale as the version at which its turn
            comes: those that were computed from one version are 0, 1, 2, … stale, in the order in which they are
            applied. Otherwise, as when it arrived. The receipt says the latter.

    Attributes:
        round_size: the barrier that was asked for; ``barrier`` may be lower while workers are away.
        sequences: the last settled update of each worker.
        refused: how many updates of each worker had NaN, Inf or a norm above the gate.
        rejected: the last update of each worker that was settled without being applied.
        started_from: what each worker started from, where delay compensation needs it.
        before_last_step: the parameters of the version before this one; None where they are not kept.
    """

    def __init__(
        self,
        parameters: Tensor,
        rule: Rule,
        barrier: int = 0,
        last_version: int | None = None,
        staleness: StalenessPolicy | None = None,
        gate: NormGate | None = None,
        keeps_last_step: bool = False,
        counts_in_rounds: bool = False,
    ) -> None:
        self.parameters = parameters
        self.rule = rule
        self.round_size = self.barrier = barrier
        self.last_version = last_version
        self.staleness = staleness or StalenessPolicy()
        self.gate = gate or NormGate()
        self.version = 0
        self.sequences: dict[int, int] = {}
        self.refused: dict[int, int] = {}
        self.rejected: dict[int, int] = {}
        self.started_from: dict[int, Parameters] = {}
        self.before_last_step = parameters.clone() if keeps_last_step else None
        self.counts_in_rounds = counts_in_rounds
        self._changed_at = [0] * (len(rule.fragments) if isinstance(rule, FragmentedRule) else 0)
        self._held: dict[int, tuple[Update, Receipt]] = {}
        self._released: list[Receipt] = []
        self._restarted = False
        self._heard_since: set[int] = set()  # workers of which an update was settled since the restart

    @property
    def finished(self) -> bool:
        return self.last_version is not None and self.version >= self.last_version

    def moves_parameters(self, ahead: int = 0) -> bool:
        """Whether the sender of the update behind ``ahead`` others has to wait: for a step, or at the barrier."""
        return bool(self.barrier) or self.rule.moves_parameters(ahead)

    def pull(self, worker: int) -> Parameters:
        """The current parameters, copied."""
        self.note_pull(worker, self.parameters)
        return Parameters(self.version, self.parameters.clone())

    def write_ahead(self, out: Tensor, versions: float) -> None:
        """Writes the parameters so many versions ahead, along the last step: θ_v + τ · (θ_v − θ_(v−1)).

        It is for gradients that will be applied τ versions later; pipelines know it as weight prediction (Chen et al.
        2018, arXiv 1809.02839).
        """
        if self.before_last_step is None or not versions:
            out.copy_(self.parameters)
        else:
            torch.lerp(self.before_last_step, self.parameters, 1.0 + versions, out=out)

    def dispatch(self) -> Tensor:
        """What local steps start from: the parameters, or ahead of them where the rule looks ahead.

        It is to be copied at once: it may be the parameters themselves.
        """
        return self.rule.dispatch(self.parameters)

    def give(self, worker: int, out: Tensor, look_ahead: float = 0.0, starts: bool = False) -> None:
        """Writes what a worker has asked for: the parameters, those so many versions ahead, or what local steps start
        from."""
        if look_ahead:
            self.write_ahead(out, look_ahead)
        else:
            copy(out, self.dispatch() if starts else self.parameters)
        self.note_pull(worker, out)

    def dispatch_fragment(self, sequence: int) -> Tensor:
        """What a worker goes on from in the fragment of its update of this number; to be copied at once."""
        rule, parameters = self._part(sequence)
        return rule.dispatch(parameters)

    def changed_at(self, sequence: int) -> int:
        """The version at which the fragment of an update of this number has changed last."""
        return self._changed_at[sequence % len(self._changed_at)] if self._changed_at else self.version

    def note_pull(self, worker: int, start: Tensor) -> None:
        """The worker starts from these, which delay compensation compares with later parameters."""
        if self.staleness.compensation:
            self.started_from[worker] = Parameters(self.version, start.clone())

    def _start_of(self, update: Update) -> Tensor | None:
        """What an update was computed from; None where that is not known.

        After a restart the server knows the starts of its snapshot. A worker that has started since then did so from a
        version that is lost: its update says another base version, and is taken without compensation.
        """
        start = self.started_from.get(update.worker)
        return start.values if start is not None and start.version == update.base_version else None

    @property
    def held(self) -> set[int]:
        """Whose updates wait for their round."""
        return set(self._held)

    def push(self, update: Update, norm: float | None = None) -> Receipt:
        """Settles the update, or holds it behind the barrier (then :meth:`released` gives its receipt later).

        Args:
            norm: the update's, where its sender has computed it; finding it is one more pass over the memory.

        Raises:
            RefusedError: see :meth:`check`.
        """
        receipt = self.admit(update, norm)
        return self.apply(update, receipt) if receipt.status is Status.APPLIED else receipt

    def admit(self, update: Update, norm: float | None = None) -> Receipt:
        """Decides what becomes of an update; one with status APPLIED is for :meth:`apply`."""
        self.check(update)
        if update.sequence <= self.sequences.get(update.worker, -1):
            return self._receipt(update, Status.DUPLICATE)
        if update.worker in self._held:
            return self._receipt(update, Status.HELD)
        if self.finished:
            return self._receipt(update, Status.FINISHED)
        if self.staleness.drops(self.version - update.base_version):
            self._use_up(update, rejected=True)
            return self._receipt(update, Status.STALE)
        norm = float(torch.linalg.vector_norm(update.delta)) if norm is None else norm
        receipt = self._receipt(update, Status.APPLIED, norm)
        if not math.isfinite(receipt.norm):
            return self._refuse(update, receipt, Status.REFUSED)
        if self.gate.refuses(update.worker, receipt.norm):
            return self._refuse(update, receipt, Status.OUTLIER)
        self.gate.note(update.worker, receipt.norm)
        return receipt

    def apply(self, update: Update, receipt: Receipt) -> Receipt:
        """Applies an admitted update, or holds it behind the barrier; ``receipt`` is from :meth:`admit`."""
        if not self.barrier:
            return self._apply(update, receipt)
        self._held[update.worker] = update, receipt
        if len(self._held) >= self.barrier:
            self.complete_round()
        return replace(receipt, status=Status.HELD)

    def check(self, update: Update) -> None:
        """Raises a RefusedError for an update that no worker can have sent, in the state that this server is in."""
        if not 0 <= update.base_version <= self.version:
            raise RefusedError(f"base version {update.base_version}: the server is at {self.version}")
        if not (math.isfinite(update.weight) and update.weight >= 0):
            raise RefusedError(f"weight {update.weight}: it must be a finite number, not below 0")
        self._check_sequence(update)

    def _check_sequence(self, update: Update) -> None:
        """Numbers grow by one. After a restart a worker's first may be further on: the server has taken back what it
        had acknowledged."""
        expected = self.sequences.get(update.worker, -1) + 1
        may_skip = self._restarted and update.worker not in self._heard_since
        if not 0 <= update.sequence <= expected + (_LOST if may_skip else 0):
            raise RefusedError(f"sequence number {update.sequence}: the next of worker {update.worker} is {expected}")

    def takes(self, receipt: Receipt) -> bool:
        """Whether an update is in the parameters, or will be; one that comes twice counts as it did the first time."""
        if receipt.status is Status.DUPLICATE:
            return self.rejected.get(receipt.worker) != receipt.sequence
        return receipt.status in (Status.APPLIED, Status.ACCEPTED, Status.HELD)

    def _use_up(self, update: Update, rejected: bool = False) -> None:
        self.sequences[update.worker] = update.sequence
        if rejected:
            self.rejected[update.worker] = update.sequence
        self._heard_since.add(update.worker)

    def _refuse(self, update: Update, receipt: Receipt, status: Status) -> Receipt:
        self._use_up(update, rejected=True)
        self.refused[update.worker] = self.refused.get(update.worker, 0) + 1
        return replace(receipt, status=status)

    def withdraw(self, worker: int) -> None:
        """The worker is gone, and with it the memory of an update that is held: whoever takes its place sends anew."""
        self._held.pop(worker, None)

    def limit_barrier(self, workers: int) -> None:
        """Only this many workers are there now: no round waits for more."""
        if self.round_size:
            self.barrier = min(self.round_size, max(1, workers))
            if len(self._held) >= self.barrier:
                self.complete_round()

    def released(self) -> list[Receipt]:
        """The receipts, each given once, of held updates whose round is complete."""
        receipts, self._released = self._released, []
        return receipts

    def state_dict(self) -> State:
        """Everything that a restart needs; held updates are not part of it: their workers compute them again."""
        return {
            "version": self.version,
            "parameters": self.parameters,
            "rule": self.rule.state_dict(),
            "sequences": self.sequences,
            "refused": self.refused,
            "rejected": self.rejected,
            "norms": self.gate.state_dict(),
            "before_last_step": self.before_last_step,
            "changed_at": self._changed_at,
            "started_from": {worker: (start.version, start.values) for worker, start in self.started_from.items()},
        }

    def load_state_dict(self, state: State) -> None:
        self._restarted, self._heard_since = True, set()
        self.version = state["version"]
        self.parameters.copy_(state["parameters"])
        self.rule.load_state_dict(state["rule"])
        self.sequences = dict(state["sequences"])
        self.refused = dict(state["refused"])
        self.rejected = dict(state.get("rejected", {}))  # not in a state of version 0.1
        self.gate.load_state_dict(state["norms"])
        if self.before_last_step is not None:  # a state without them has no last step to look along
            before = state.get("before_last_step")
            self.before_last_step.copy_(state["parameters"] if before is None else before)
        self._changed_at = list(state.get("changed_at", [self.version] * len(self._changed_at)))
        starts = state.get("started_from", {})  # not in a state of the first edition
        self.started_from = {worker: Parameters(*start) for worker, start in starts.items()}

    def complete_round(self) -> None:
        """Applies the updates that are held, in the order of the workers' ids, and waits for no other."""
        held, self._held = self._held, {}
        self._released += [self._apply(*held[worker]) for worker in sorted(held)]

    def _apply(self, update: Update, receipt: Receipt) -> Receipt:
        rule, parameters = self._part(update.sequence)
        if isinstance(rule, ComparingRule):
            cosine = rule.cosine(update, receipt.norm)
        else:
            cosine = _cosine(update.delta, receipt.norm, rule.momentum_buffer)
        staleness = self.version - update.base_version if self.counts_in_rounds else receipt.staleness
        worth = self.staleness.adjusted(update, staleness, parameters, self._start_of(update))
        changes = rule.moves_parameters()
        if changes and self.before_last_step is not None:
            copy_in_threads(self.before_last_step, self.parameters)
        try:
            rule.apply(parameters, worth)
        except Exception as error:  # whatever it is: no memory, or a mistake of the rule's
            raise HalfAppliedError(f"the update of worker {update.worker} was not applied to its end") from error
        self._use_up(update)
        self.version += changes
        if changes and self._changed_at:
            self._changed_at[update.sequence % len(self._changed_at)] = self.version
        return replace(receipt, version=self.version, cosine=cosine)

    def _part(self, sequence: int) -> tuple[Rule, Tensor]:
        """Rule and parameters that an update of this number is for: of its fragment, where there are several."""
        if isinstance(self.rule, FragmentedRule):
            return self.rule.of(sequence, self.parameters)
        return self.rule, self.parameters

    def _receipt(self, update: Update, status: Status, norm: float = math.nan) -> Receipt:
        return Receipt(
            worker=update.worker,
            sequence=update.sequence,
            base_version=update.base_version,
            weight=update.weight,
            status=status,
            staleness=self.version - update.base_version,
            norm=norm,
            version=self.version,
        )


def _cosine(delta: Tensor, norm: float, direction: Tensor | None) -> float:
    if direction is None:
        return math.nan
    product = norm * float(torch.linalg.vector_norm(direction))
    return float(torch.dot(delta, direction)) / product if product > 0 else math.nan
