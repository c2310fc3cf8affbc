"""The state machine that every driver shares: the real run, the simulator and the replay."""

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms import Rule, Update


class Status(str, Enum):
    """What became of an update."""

    APPLIED = "applied"
    HELD = "held"  # behind the barrier, until its round is complete
    REFUSED = "refused"  # NaN or Inf
    DUPLICATE = "duplicate"  # its sequence number was settled before
    FINISHED = "finished"  # the run had taken its last step


@dataclass(frozen=True)
class Parameters:
    """One consistent state: ``values`` is a flat fp32 copy."""

    version: int
    values: Tensor


@dataclass(frozen=True)
class Receipt:
    """The answer to one update.

    Attributes:
        staleness: versions applied between the worker's pull and the arrival of its update.
        norm: L2 norm of the update.
        version: the server's version afterwards.
    """

    worker: int
    sequence: int
    base_version: int
    weight: float
    status: Status
    staleness: int
    norm: float
    version: int


class ParameterServer:
    """Holds the global parameters and lets a rule change them, one update at a time.

    A plain object: no threads, no clock, no socket. The version counts the rule's steps. Every update is known
    by its worker and sequence number: one that arrives twice is applied once.

    Args:
        parameters: flat fp32 tensor; changed in place.
        rule: what an update does to the parameters.
        barrier: hold the updates until this many, from different workers, are there, then apply them in the order
            of the workers' ids; 0 applies each at once.
        last_version: the run is finished when this version is reached; None for no end.
    """

    def __init__(self, parameters: Tensor, rule: Rule, barrier: int = 0, last_version: int | None = None) -> None:
        self.parameters = parameters
        self.rule = rule
        self.barrier = barrier
        self.last_version = last_version
        self.version = 0
        self.sequences: dict[int, int] = {}
        self.refused: dict[int, int] = {}
        self._held: dict[int, tuple[Update, Receipt]] = {}
        self._released: list[Receipt] = []

    @property
    def finished(self) -> bool:
        return self.last_version is not None and self.version >= self.last_version

    @property
    def changes_next(self) -> bool:
        """Whether the sender of the next update has something to wait for: a step, or the barrier."""
        return bool(self.barrier) or self.rule.steps_next

    def pull(self, worker: int) -> Parameters:
        """The current parameters, copied."""
        return Parameters(self.version, self.parameters.clone())

    def push(self, update: Update) -> Receipt:
        """Settles the update, or holds it behind the barrier (then :meth:`released` gives its receipt later)."""
        if update.sequence <= self.sequences.get(update.worker, -1):
            return self._receipt(update, Status.DUPLICATE)
        if update.worker in self._held:
            return self._receipt(update, Status.HELD)
        if self.finished:
            return self._receipt(update, Status.FINISHED)
        receipt = self._receipt(update, Status.APPLIED, float(torch.linalg.vector_norm(update.delta)))
        if not math.isfinite(receipt.norm):
            self.sequences[update.worker] = update.sequence
            self.refused[update.worker] = self.refused.get(update.worker, 0) + 1
            return replace(receipt, status=Status.REFUSED)
        if not self.barrier:
            return self._apply(update, receipt)
        self._held[update.worker] = update, receipt
        if len(self._held) == self.barrier:
            self._released += self._complete_round()
        return replace(receipt, status=Status.HELD)

    def withdraw(self, worker: int) -> None:
        """The worker is gone, and with it the memory of an update that is held: whoever takes its place sends anew."""
        self._held.pop(worker, None)

    def limit_barrier(self, workers: int) -> None:
        """Only this many workers are left: no round waits for more."""
        self.barrier = min(self.barrier, max(1, workers))
        if self._held and len(self._held) >= self.barrier:
            self._released += self._complete_round()

    def released(self) -> list[Receipt]:
        """The receipts, each given once, of held updates whose round is complete."""
        receipts, self._released = self._released, []
        return receipts

    def state_dict(self) -> dict[str, Any]:
        """Everything that a restart needs; held updates are not part of it: their workers compute them again."""
        return {
            "version": self.version,
            "parameters": self.parameters,
            "rule": self.rule.state_dict(),
            "sequences": self.sequences,
            "refused": self.refused,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]
        self.parameters.copy_(state["parameters"])
        self.rule.load_state_dict(state["rule"])
        self.sequences = dict(state["sequences"])
        self.refused = dict(state["refused"])

    def _complete_round(self) -> list[Receipt]:
        held, self._held = self._held, {}
        return [self._apply(*held[worker]) for worker in sorted(held)]

    def _apply(self, update: Update, receipt: Receipt) -> Receipt:
        self.sequences[update.worker] = update.sequence
        self.version += self.rule.apply(self.parameters, update)
        return replace(receipt, version=self.version)

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
