"""One shard's part of the model, and what it does on the server's calls, in whatever process it is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment, HybridAccumulation, Rule, Update
from fairseq_async.algorithms.missing import missing_here
from fairseq_async.algorithms.rule import State
from fairseq_async.algorithms.threads import in_threads, set_threads
from fairseq_async.errors import disk_error
from fairseq_async.exchange.linux import trim
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.layout import Layout
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule
from fairseq_async.server.optimizers.torch_optimizer import of_tensors

_PIECE = 1 << 14


@dataclass(frozen=True)
class Memory:
    """Vectors that the shards of one machine share, or one part of them.

    Attributes:
        slot: returns the memory that holds a worker's update, given the worker and the update's number. It keeps the
            update as it came, for a record or a second attempt.
        weighted: memory for a staleness-weighted update.
        starts: memory for the tensor that local steps start from; None where that is the parameters.
    """

    slot: Callable[[int, int], Tensor]
    weighted: Tensor
    starts: Tensor | None

    def of(self, part: Fragment) -> "Memory":
        """Returns this part of the vectors."""
        starts = None if self.starts is None else part.of(self.starts)
        return Memory(lambda worker, number: part.of(self.slot(worker, number)), part.of(self.weighted), starts)


@dataclass(eq=False)
class ShardPart:
    """One shard's part of the model, or of one fragment of it: its rule, and its part of the memory.

    Attributes:
        tensors: the shard's tensors among those of the model, or of the fragment.
    """

    rule: Rule
    parameters: Tensor
    tensors: slice
    memory: Memory
    _stepped = False

    def apply(
        self,
        worker: int,
        weighted: bool,
        sequence: int,
        base_version: int,
        weight: float,
        tokens: float,
        threads: int,
        missing: str,
        micro_batches: int,
    ) -> float:
        """Applies an update, on so many threads; returns as :meth:`Rule.apply`.

        Args:
            weighted: whether the update is the staleness-weighted one, and not that in the worker's slot.
            missing: tensors of the whole model without a gradient, as in a worker's report.
        """
        steps = self.rule.moves_parameters()
        self._prepare(threads, steps)
        delta, here = self._delta(worker, weighted, sequence), missing_here(int(missing, 16), self.tensors)
        update = Update(worker, sequence, base_version, weight, delta, tokens, here, micro_batches)
        share = float(self.rule.apply(self.parameters, update))
        if steps and not self._stepped:
            trim()  # the first step leaves the heap in pieces between the optimizer's moments
        self._stepped = self._stepped or steps
        return share

    def _prepare(self, threads: int, steps: bool) -> None:
        """Prepares for an update, with which the rule ``steps`` or waits for others."""
        set_threads(threads)

    def compare(self, worker: int, weighted: bool, sequence: int) -> list[float]:
        """Returns the scalar product of an update and the momentum here, and the squared norm of this momentum."""
        momentum = self.rule.momentum_buffer
        assert momentum is not None
        product = torch.dot(self._delta(worker, weighted, sequence), momentum)
        return [float(product), float(torch.linalg.vector_norm(momentum)) ** 2]

    def dispatch(self) -> None:
        """Writes the tensor that local steps start from into the shared memory for it."""
        assert self.memory.starts is not None
        self.memory.starts.copy_(self.rule.dispatch(self.parameters))

    def save(self, path: str) -> str:
        """Writes the rule's state into a file; returns why it could not, or an empty string."""
        try:
            with open(path, "wb") as file:
                torch.save(self.rule.state_dict(), file)
        except (OSError, RuntimeError) as error:  # torch makes one of the other when the disk is full
            return str(disk_error(error))[:1000]
        return ""

    def load(self, path: str) -> None:
        """Lets the rule go on from the state in a file."""
        self.rule.load_state_dict(state_from(path))

    def clip_by(self, sum_of_all: Callable[[float], float]) -> None:
        """Lets the rule, if it clips, do so by the norm over all shards.

        Args:
            sum_of_all: returns the sum of the squared norms of all shards, given this one's, in the middle of a step.
        """
        if isinstance(self.rule, HybridAccumulation):
            self.rule.norm_of_all = lambda norm: _root(sum_of_all(float(norm) ** 2), norm)

    def _delta(self, worker: int, weighted: bool, sequence: int) -> Tensor:
        return self.memory.weighted if weighted else self.memory.slot(worker, sequence)


CALLED = (ShardPart.apply, ShardPart.compare, Rule.limit_round, ScheduledRule.begin_epoch, ScheduledRule.end_epoch)
"""What is called of every shard, or of its rule."""


def part_of(spec: MethodSpec, layout: Layout, tensors: slice) -> tuple[MethodSpec, Layout]:
    """Returns method and layout as if these tensors of the model were all of it."""
    own = replace(spec.of_a_fragment(), framework=of_tensors(spec.framework, tensors))
    return own, Layout(layout.segments[tensors])


def state_from(path: str) -> State:
    """Returns a rule's state. Its tensors stay in the file until they are read; nothing is unpickled but tensors."""
    return cast(State, torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def squared_norm(part: Tensor) -> float:
    """Returns the squared L2 norm of a part of an update. It depends neither on the number of threads, as torch adds up
    a piece of this size on one, nor on the place in memory, as that of ``torch.dot`` does."""
    return sum(in_threads(lambda piece: float(torch.linalg.vector_norm(piece)) ** 2, part.split(_PIECE)))


def _root(squared: float, norm: Tensor) -> Tensor:
    """Returns the norm over all shards, from the sum of their squares, as a tensor like this shard's own norm."""
    return torch.tensor(squared, dtype=torch.float64, device=norm.device).sqrt().to(norm.dtype)
