"""The parameter server as a state machine, which the real run, the simulator and the replay share."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_async.algorithms import FragmentedRule, NormGate, Rule, StalenessPolicy, Update, WorkerBuffers, in_turn
from fairseq_async.algorithms.rule import ComparingRule, State, cosine_of
from fairseq_async.algorithms.threads import copy_in_threads
from fairseq_async.errors import HalfAppliedError, RefusedError
from fairseq_async.exchange import copy
from fairseq_async.protocol.receipt import Receipt, Status
from fairseq_async.protocol.work import LARGEST
from fairseq_async.records.recording import checksum

_LOST = 1 << 32  # updates of one worker that a restart may have taken back, at most


@dataclass(frozen=True)
class Parameters:
    """The parameters at one version; ``values`` is a flat fp32 copy."""

    version: int
    values: Tensor


class ParameterServer:
    """Holds the global parameters and lets a rule change them, one update at a time.

    It is a plain object without threads, clock or socket. The version counts the changes of the parameters. Every
    update is identified by its worker and sequence number: one that arrives twice is applied once.

    Args:
        parameters: flat fp32 tensor; changed in place.
        rule: decides what an update does to the parameters.
        holds: hold the updates until :meth:`complete_round` applies them; otherwise each is applied at once.
        last_version: the run is finished when this version is reached; None for no end.
        staleness: decides how a stale update is weighed.
        gate: decides which norms are accepted.
        keeps_last_step: keep the parameters before the last step, from which :meth:`write_ahead` looks ahead; this
            takes one more copy.
        counts_in_rounds: where staleness is weighed, count an update's staleness when its turn in the round comes:
            updates from one version are then 0, 1, 2, … stale, in the order in which they are applied. Otherwise it is
            counted at the update's arrival. The receipt always has the staleness at arrival.

    Attributes:
        sequences: the sequence number of each worker's last settled update.
        refused: how many updates of each worker had NaN, Inf or a norm above the gate.
        rejected: the sequence number of each worker's last update that was settled without being applied.
        started_from: the parameters that each worker started from, where delay compensation needs them.
        before_last_step: the parameters before the last step; None where they are not kept.
    """

    def __init__(
        self,
        parameters: Tensor,
        rule: Rule,
        holds: bool = False,
        last_version: int | None = None,
        staleness: StalenessPolicy | None = None,
        gate: NormGate | None = None,
        keeps_last_step: bool = False,
        counts_in_rounds: bool = False,
    ) -> None:
        self.parameters = parameters
        self.rule = rule
        self.holds = holds
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
        self._restarted = False
        self._heard_since: set[int] = set()  # workers with an update that was settled since the restart

    @property
    def finished(self) -> bool:
        return self.last_version is not None and self.version >= self.last_version

    def pull(self, worker: int) -> Parameters:
        """Returns a copy of the current parameters, and notes that the worker starts from them."""
        self.note_pull(worker, self.parameters)
        return Parameters(self.version, self.parameters.clone())

    def write_ahead(self, out: Tensor, versions: float) -> None:
        """Writes the parameters τ = ``versions`` versions ahead, along the last step: θ_v + τ · (θ_v − θ_(v−1)).

        They are for gradients that will be applied τ versions later. Pipeline-parallel training knows this as weight
        prediction (Chen et al. 2018, arXiv 1809.02839).
        """
        if self.before_last_step is None or not versions:
            out.copy_(self.parameters)
        else:
            torch.lerp(self.before_last_step, self.parameters, 1.0 + versions, out=out)

    def dispatch(self) -> Tensor:
        """Returns the tensor that local steps start from: the parameters, or ahead of them where the rule looks ahead.

        Copy it at once: it may be the parameters themselves.
        """
        return self.rule.dispatch(self.parameters)

    def give(self, worker: int, out: Tensor, look_ahead: float = 0.0, starts: bool = False) -> int:
        """Writes the tensor that a worker has asked for: the parameters, those so many versions ahead, or the start of
        local steps. Returns the number of the parts that come from other machines; 0 where none do."""
        if look_ahead:
            self.write_ahead(out, look_ahead)
        else:
            copy(out, self.dispatch() if starts else self.parameters)
        self.note_pull(worker, out)
        return 0

    def dispatch_fragment(self, sequence: int) -> Tensor:
        """Returns the start of local steps in the fragment of the update with this sequence number. Copy it at once."""
        rule, parameters = self._part(sequence)
        return rule.dispatch(parameters)

    def changed_at(self, sequence: int) -> int:
        """Returns the version at which the fragment of the update with this sequence number changed last."""
        return in_turn(self._changed_at, sequence) if self._changed_at else self.version

    def note_pull(self, worker: int, start: Tensor) -> None:
        """Keeps a copy of the worker's start, which delay compensation compares with later parameters."""
        if self.staleness.compensation:
            self.started_from[worker] = Parameters(self.version, start.clone())

    def _start_of(self, update: Update) -> Tensor | None:
        """Returns the parameters that an update was computed from; None where they are not known.

        After a restart the server knows the starts in its snapshot. A worker that started after the snapshot did so
        from a version that is lost: its update has another base version, and is applied without compensation.
        """
        start = self.started_from.get(update.worker)
        return start.values if start is not None and start.version == update.base_version else None

    @property
    def held(self) -> set[int]:
        """The workers whose updates wait for their round."""
        return set(self._held)

    @property
    def held_from(self) -> dict[int, int]:
        """The version at which the held update of each worker arrived."""
        return {worker: receipt.version for worker, (_, receipt) in self._held.items()}

    def hold(self, update: Update, version: int) -> None:
        """Holds again an update that arrived at this version, when a simulation goes on.

        A merge since then may have made another version. It must not make the update more stale, or drop it.
        """
        receipt = self._receipt(update, Status.APPLIED, float(torch.linalg.vector_norm(update.delta)))
        receipt = replace(receipt, version=version, staleness=version - update.base_version)
        self._held[update.worker] = update, receipt

    def push(self, update: Update, norm: float | None = None) -> Receipt:
        """Settles the update, or holds it for its round: then :meth:`complete_round` returns its receipt.

        Args:
            norm: the update's L2 norm, if its sender has computed it; computing it takes one more pass over the memory.

        Raises:
            RefusedError: see :meth:`check`.
        """
        receipt = self.admit(update, norm)
        if receipt.status is not Status.APPLIED:
            return receipt
        if not self.holds:
            return self._apply(update, receipt)
        self._held[update.worker] = update, receipt
        return replace(receipt, status=Status.HELD)

    def admit(self, update: Update, norm: float | None = None) -> Receipt:
        """Decides what becomes of an update; one with status APPLIED is to be applied, or held."""
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
        receipt = self._receipt(update, Status.APPLIED, self._norm(update) if norm is None else norm)
        if not math.isfinite(receipt.norm):
            return self._refuse(update, receipt, Status.REFUSED)
        if self.gate.refuses(update.worker, receipt.norm):
            return self._refuse(update, receipt, Status.OUTLIER)
        self.gate.note(update.worker, receipt.norm)
        return receipt

    def check(self, update: Update) -> None:
        """Raises a RefusedError for an update that no worker can have sent in the server's present state."""
        if not 0 <= update.base_version <= self.version:
            raise RefusedError(f"base version {update.base_version}: the server is at {self.version}")
        if not 0 <= update.weight <= LARGEST:  # NaN neither: rules multiply by it, and by its square, in fp32
            raise RefusedError(f"weight {update.weight}: it must be a number from 0 to {LARGEST}")
        self._check_sequence(update)

    def _check_sequence(self, update: Update) -> None:
        """Checks that a worker's sequence numbers grow by one. Its first after a restart may be further on: the restart
        has taken back updates that the server had acknowledged."""
        expected = self.sequences.get(update.worker, -1) + 1
        may_skip = self._restarted and update.worker not in self._heard_since
        if not 0 <= update.sequence <= expected + (_LOST if may_skip else 0):
            raise RefusedError(f"sequence number {update.sequence}: the next of worker {update.worker} is {expected}")

    def takes(self, receipt: Receipt) -> bool:
        """Whether an update is in the parameters, or will be; a duplicate counts as its first copy did."""
        if receipt.status is Status.DUPLICATE:
            return self.rejected.get(receipt.worker) != receipt.sequence
        return receipt.status in (Status.APPLIED, Status.HELD)

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
        """Drops the held update of a worker that is gone, and its memory with it; the worker's successor sends anew."""
        self._held.pop(worker, None)

    def state_dict(self) -> State:
        """Returns all that a restart needs. Held updates are not part of it: their workers compute them again."""
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

    def checksum(self) -> str:
        """Returns the CRC-32 of the parameters."""
        return checksum(self.parameters)

    def check_parts(self) -> None:
        """Notices a part of the parameters that is gone with another machine: workers would wait for ever, as they send
        the server no updates without it.

        Raises:
            HalfAppliedError: one is gone.
        """

    def finish(self) -> None:
        """Tells those that hold parts of the parameters on other machines that the run is finished."""

    def complete_round(self) -> list[Receipt]:
        """Applies the held updates, in the order of the workers' ids; returns their receipts."""
        held, self._held = self._held, {}
        return [self._apply(*held[worker]) for worker in sorted(held)]

    def _apply(self, update: Update, receipt: Receipt) -> Receipt:
        rule, parameters = self._part(update.sequence)
        changes = rule.moves_parameters()
        try:
            cosine = self._change(rule, parameters, update, receipt, changes)
        except Exception as error:  # of any kind: out of memory, or a mistake of the rule's
            # In the middle of a round, the updates before this one are applied and their workers have no answers.
            raise HalfAppliedError(f"the update of worker {update.worker} was not applied to its end") from error
        self._use_up(update)
        self.version += changes
        if changes and self._changed_at:
            self._changed_at[update.sequence % len(self._changed_at)] = self.version
        return replace(receipt, version=self.version, cosine=cosine)

    def _change(self, rule: Rule, parameters: Tensor, update: Update, receipt: Receipt, changes: bool) -> float:
        """Applies the update by the rule; returns its cosine with the momentum before."""
        if isinstance(rule, ComparingRule):
            cosine = rule.cosine(update, receipt.norm)
        else:
            cosine = cosine_of(update.delta, receipt.norm, rule.momentum_buffer)
        staleness = self.version - update.base_version if self.counts_in_rounds else receipt.staleness
        worth = self.staleness.adjusted(update, staleness, parameters, self._start_of(update))
        if isinstance(rule, WorkerBuffers):
            rule.store_buffers(parameters, update)
        if changes and self.before_last_step is not None:
            copy_in_threads(self.before_last_step, self.parameters)
        rule.apply(parameters, worth)
        return cosine

    def _norm(self, update: Update) -> float:
        rule, _ = self._part(update.sequence)
        return rule.norm(update) if isinstance(rule, ComparingRule) else float(torch.linalg.vector_norm(update.delta))

    def _part(self, sequence: int) -> tuple[Rule, Tensor]:
        """Returns rule and parameters for the update of this number: those of its fragment, where there are several."""
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
