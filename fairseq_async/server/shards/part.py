"""One shard's part of the model, and what it does on the server's commands, in whatever process it is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Rule, Update
from fairseq_async.algorithms.missing import missing_here
from fairseq_async.algorithms.threads import in_threads, set_threads
from fairseq_async.exchange.linux import trim
from fairseq_async.protocol.shard_messages import (
    Apply,
    BeginEpoch,
    Compare,
    Compared,
    Dispatch,
    Done,
    EndEpoch,
    LimitRound,
    Message,
)
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule

_PIECE = 1 << 14


@dataclass(frozen=True)
class ShardPart:
    """One shard's part of the model, or of one fragment of it: its rule, and its slices of the tensors that the
    shards of one machine share.

    Attributes:
        tensors: the shard's tensors among those of the model, or of the fragment.
        slots: returns the memory that holds a worker's update, given the worker and the update's number.
        weighed: memory for an update that differs from the one in its worker's slot, as staleness has changed it.
        starts: memory for the tensor that local steps start from, where that is not the parameters.
    """

    rule: Rule
    parameters: Tensor
    tensors: slice
    slots: Callable[[int, int], Tensor]
    weighed: Tensor
    starts: Tensor

    def delta(self, command: Apply | Compare) -> Tensor:
        """Returns this shard's part of the update that the command refers to."""
        return self.weighed if command.weighed else self.slots(command.worker, command.sequence)

    def carry_out(self, command: Message) -> Message:
        """Carries out a command that needs no file; returns the answer."""
        rule = self.rule
        match command:
            case Compare():
                assert rule.momentum_buffer is not None
                return compare(self.delta(command), rule.momentum_buffer)
            case Apply():
                self._apply(command)
            case LimitRound():
                rule.limit_round(command.updates)
            case Dispatch():
                self.starts.copy_(rule.dispatch(self.parameters))
            case BeginEpoch() if isinstance(rule, ScheduledRule):
                rule.begin_epoch(command.epoch)
            case EndEpoch() if isinstance(rule, ScheduledRule):
                rule.end_epoch(command.epoch, command.loss)
            case _:
                raise AssertionError(f"{command} is no command")
        return Done()

    def _apply(self, command: Apply) -> None:
        set_threads(command.threads)
        update = Update(
            command.worker,
            command.sequence,
            command.base_version,
            command.weight,
            self.delta(command),
            command.tokens,
            missing_here(int(command.missing, 16), self.tensors),
        )
        self.rule.apply(self.parameters, update)


class Trimming:
    """Gives memory back to the system once, after a process's first step.

    The first step leaves the heap in pieces between the optimizer's moments.
    """

    def __init__(self) -> None:
        self._stepped = False

    def after(self, stepped: bool) -> None:
        """Notes that an update was applied."""
        if stepped and not self._stepped:
            trim()
        self._stepped = self._stepped or stepped


def accumulation(rule: Rule) -> HybridAccumulation | None:
    """Returns the part of a rule that clips the gradient by the norm over all shards; None where nothing clips."""
    inner = rule.rule if isinstance(rule, ScheduledRule) else rule
    return inner if isinstance(inner, HybridAccumulation) else None


def compare(delta: Tensor, momentum: Tensor) -> Compared:
    """Compares an update with the momentum, in one shard's part: see :class:`Compared`."""
    return Compared(float(torch.dot(delta, momentum)), float(torch.linalg.vector_norm(momentum)) ** 2)


def squared_norm(part: Tensor) -> float:
    """Returns the squared L2 norm of a part of an update. It depends neither on the number of threads, as torch adds up
    a piece of this size on one, nor on the place in memory, as that of ``torch.dot`` does."""
    return sum(in_threads(lambda piece: float(torch.linalg.vector_norm(piece)) ** 2, part.split(_PIECE)))


def root_of_all(squared: float, norm: Tensor) -> Tensor:
    """Returns the norm over all shards, from the sum of their squares, as a tensor like this shard's own norm."""
    return torch.tensor(squared, dtype=torch.float64, device=norm.device).sqrt().to(norm.dtype)
