"""A rule whose tensors are divided among the processes of a server's shards."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

import torch
from pydantic import JsonValue
from torch import Tensor

from fairseq_async.algorithms import Fragment, Rule, Update
from fairseq_async.algorithms.rule import ComparingRule, State
from fairseq_async.algorithms.threads import set_threads, thread_count
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule
from fairseq_async.server.shards.calls import Answer, OtherShard, call_first
from fairseq_async.server.shards.held_part import HeldPart
from fairseq_async.server.shards.part import Memory, ShardPart, squared_norm, state_from
from fairseq_async.server.shards.remote import RemoteShard

SHARDS = "shards"
_Result = TypeVar("_Result")


@dataclass(eq=False)
class ShardedRule(ComparingRule):
    """Applies each update of the model, or of one fragment of it, to every shard: to the first in this process, to the
    others in theirs.

    A method of the rule calls that of every shard, and puts the results together. An update was admitted before, for
    all shards at once. If a shard fails, a HalfAppliedError says that the parameters are of no version any more.

    Attributes:
        own: the first shard's part. Counts and learning rates, the same in all shards, are read from its rule.
        others: the other shards.
        memory: what the processes of this machine share.
        directory: where the processes exchange their states.
        fragment: number of the fragment.
        measured: parts of the update, as far as it is in memory here, whose norms are added up with those that shards
            on other machines measure; empty where there are no such shards.
        elsewhere: those of the others that are on other machines.
    """

    own: ShardPart
    others: Sequence[OtherShard]
    memory: Memory
    directory: Path
    fragment: int
    measured: Sequence[Fragment] = ()

    def __post_init__(self) -> None:
        self.elsewhere = [other for other in self.others if isinstance(other, RemoteShard)]
        self._here = [other for other in self.others if not isinstance(other, RemoteShard)]
        self.own.clip_by(self._sum_of_all)

    def apply(self, parameters: Tensor, update: Update) -> float:
        """Applies one update to every shard; returns the share of a step that was taken."""
        about = update.worker, self._share(update), update.sequence, update.base_version, update.weight, update.tokens
        threads = thread_count()
        each = max(1, threads // (1 + len(self._here)))
        rest = each, f"{update.missing:x}", update.micro_batches
        try:
            share, *_ = self._call(self.others, ShardPart.apply, *about, *rest)
        finally:
            set_threads(threads)
        return share

    def moves_parameters(self, ahead: int = 0) -> bool:
        return self.own.rule.moves_parameters(ahead)

    def dispatch(self, parameters: Tensor) -> Tensor:
        """Returns the parameters, or the shared memory into which every shard has written its part."""
        if self.memory.starts is None:
            return parameters
        self._call(self._here, ShardPart.dispatch)
        return self.memory.starts

    def norm(self, update: Update) -> float:
        """Returns the L2 norm of the whole update; NaN where a part of it is missing."""
        if not self.measured:
            return super().norm(update)
        for shard in self.elsewhere:
            shard.call(HeldPart.measure, update.worker, update.sequence)
        squared = [squared_norm(part.of(update.delta)) for part in self.measured]
        return math.sqrt(sum(squared + [shard.result(HeldPart.measure) for shard in self.elsewhere]))

    def cosine(self, update: Update, norm: float) -> float:
        """Returns the cosine of the update, of this norm, and the momentum of all shards; NaN without momentum."""
        if self.own.rule.momentum_buffer is None:
            return math.nan
        parts = self._call(self.others, ShardPart.compare, update.worker, self._share(update), update.sequence)
        products, squared = zip(*parts, strict=True)
        norms = norm * sum(squared) ** 0.5
        return sum(products) / norms if norms > 0 else math.nan

    def limit_round(self, updates: int) -> None:
        self._call(self.others, Rule.limit_round, updates)

    @property
    def steps(self) -> float:
        return self._scheduled.steps

    @property
    def learning_rate(self) -> float:
        return self._scheduled.learning_rate

    def begin_epoch(self, epoch: int) -> None:
        self._call(self.others, ScheduledRule.begin_epoch, epoch)

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        self._call(self.others, ScheduledRule.end_epoch, epoch, loss)

    def state_dict(self) -> State:
        """Returns the first shard's state, and in it those of the others, whose tensors lie in files without a name.

        Raises:
            OSError: these files cannot be written, as on a full disk.
        """
        with ExitStack() as stack:
            files = [stack.enter_context(TemporaryFile(dir=self.directory)) for _ in self.others]
            ends = [shard.save(self.fragment, file) for shard, file in zip(self.others, files, strict=True)]
            if errors := [error for end in ends if (error := end())]:
                raise OSError(errors[0])
            states = [state_from(f"/proc/self/fd/{file.fileno()}") for file in files]
        return self.own.rule.state_dict() | {SHARDS: states}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`, which must have as many shards."""
        with ExitStack() as stack:
            ends = []
            for shard, its in zip(self.others, state[SHARDS], strict=True):
                file = stack.enter_context(TemporaryFile(dir=self.directory))
                torch.save(_as_the_first(its, state), file)
                file.flush()
                ends.append(shard.load(self.fragment, file))
            self.own.rule.load_state_dict(state)
            for end in ends:
                end()

    @property
    def _scheduled(self) -> ScheduledRule:
        assert isinstance(self.own.rule, ScheduledRule)
        return self.own.rule

    def _share(self, update: Update) -> bool:
        """Copies an update that is not the one in its worker's slot into shared memory; returns whether it did."""
        slot = self.memory.slot(update.worker, update.sequence)
        if weighted := update.delta.data_ptr() != slot.data_ptr():
            self.memory.weighted.copy_(update.delta)
        return weighted

    def _sum_of_all(self, squared: float) -> float:
        """Adds the squared norms of the other shards up, and tells them the sum; called in the middle of an update."""
        for shard in self.others:
            norm = shard.value()
            assert isinstance(norm, float)
            squared += norm
        for shard in self.others:
            shard.send(Answer(squared))
        return squared

    def _call(self, others: Sequence[OtherShard], method: Callable[..., _Result], *given: JsonValue) -> list[_Result]:
        """Calls a method of every shard's part, or of its rule; returns the results, the first shard's first."""
        for shard in others:
            shard.call(method, *given, fragment=self.fragment)
        first = call_first((self.own, self.own.rule), method, *given)
        return [first, *(shard.result(method) for shard in others)]


def _as_the_first(state: State, first: State) -> State:
    """Returns a shard's state with the schedule and optimizer options of the first shard's, which a user may change."""
    if "schedule" not in first:
        return state
    groups = zip(state["optimizer"]["param_groups"], first["optimizer"]["param_groups"], strict=True)
    optimizer = state["optimizer"] | {"param_groups": [its | own | {"params": its["params"]} for its, own in groups]}
    return state | {"schedule": first["schedule"], "optimizer": optimizer}
