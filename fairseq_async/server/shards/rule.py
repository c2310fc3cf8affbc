"""A rule whose tensors are divided among the processes of a server's shards."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment, Rule, Update
from fairseq_async.algorithms.missing import missing_here
from fairseq_async.algorithms.rule import ComparingRule, State
from fairseq_async.algorithms.threads import set_threads, thread_count
from fairseq_async.errors import HalfAppliedError
from fairseq_async.protocol.shard_messages import (
    Apply,
    BeginEpoch,
    Compare,
    Compared,
    Dispatch,
    Done,
    EndEpoch,
    LimitRound,
    Load,
    Measure,
    Measured,
    Message,
    Norm,
    NormOfAll,
    NotSaved,
    Save,
)
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule
from fairseq_async.server.shards.part import accumulation, compare, root_of_all, squared_norm
from fairseq_async.server.shards.process import nameless_file, state_from_file, state_to_file

SHARDS = "shards"


class Shard(Protocol):
    """A shard in another process.

    Attributes:
        shares_memory: whether it is on this machine, and writes into the memory that its processes share.
    """

    shares_memory: bool

    def select(self, fragment: int) -> None:
        """Tells it which fragment the next commands refer to."""
        ...

    def send(self, command: Message, file: IO[bytes] | None = None) -> None:
        """Sends a command; raises a HalfAppliedError if the shard is gone."""
        ...

    def receive(self) -> Message:
        """Returns the next answer; raises a HalfAppliedError if the shard has failed or is gone."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class ShardedRule(ComparingRule):
    """Applies each update of the model, or of one fragment of it, to every shard: to the first in this process, to the
    others in theirs.

    An update was admitted before, for all shards at once. If a shard fails, a HalfAppliedError says that the parameters
    are of no version any more.

    Args:
        own: the rule of the first shard. Counts and learning rates, the same in all shards, are read from it.
        shard: the first shard.
        others: the other shards.
        slot: returns the slot of a worker, in shared memory. It keeps the update as it came, for a record or a second
            attempt.
        weighed: shared memory for an update as staleness has changed it.
        starts: shared memory for the tensor that local steps start from; None where that is the parameters.
        directory: where the processes exchange their states.
        fragment: number of the fragment.
        measured: parts of the update, as far as it is in memory here, whose norms are added up with those that shards
            on other machines measure; empty where there are no such shards.
    """

    def __init__(
        self,
        own: Rule,
        shard: Fragment,
        others: Sequence[Shard],
        slot: Callable[[int], Tensor],
        weighed: Tensor,
        starts: Tensor | None,
        directory: Path,
        fragment: int,
        measured: Sequence[Fragment] = (),
    ) -> None:
        self.own, self.shard, self.others, self.fragment = own, shard, others, fragment
        self._here = [other for other in others if other.shares_memory]
        self._elsewhere = [other for other in others if not other.shares_memory]
        self._measured = measured
        self._slot, self._weighed, self.starts, self.directory = slot, weighed, starts, directory
        if (clips := accumulation(own)) is not None:
            clips.norm_of_all = self._norm_of_all

    def apply(self, parameters: Tensor, update: Update) -> float:
        """Applies one update to every shard; returns the share of a step that was taken."""
        weighed, threads = self._share(update), thread_count()
        each = max(1, threads // (1 + len(self._here)))
        about = update.worker, weighed, update.sequence, update.base_version, update.weight, update.tokens
        self._send(Apply(*about, each, f"{update.missing:x}"))
        part = torch.from_numpy(self.shard.of(parameters).numpy())
        set_threads(each)
        try:
            missing = missing_here(update.missing, self.shard.tensors)
            share = self.own.apply(part, replace(update, delta=self.shard.of(update.delta), missing=missing))
        finally:
            set_threads(threads)
        self._receive_done()
        return share

    def moves_parameters(self, ahead: int = 0) -> bool:
        return self.own.moves_parameters(ahead)

    def dispatch(self, parameters: Tensor) -> Tensor:
        """Returns the parameters, or the shared memory into which every shard has written its part."""
        if self.starts is None:
            return parameters
        for shard in self._here:
            self._send_to(shard, Dispatch())
        self.shard.of(self.starts).copy_(self.own.dispatch(self.shard.of(parameters)))
        for shard in self._here:
            _check_done(shard.receive())
        return self.starts

    def norm(self, update: Update) -> float:
        """Returns the L2 norm of the whole update; NaN where a part of it is missing."""
        if not self._measured:
            return super().norm(update)
        for shard in self._elsewhere:
            self._send_to(shard, Measure(update.worker, update.sequence))
        squared = [squared_norm(part.of(update.delta)) for part in self._measured]
        for answer in [shard.receive() for shard in self._elsewhere]:
            assert isinstance(answer, Measured)
            squared.append(answer.squared)
        return math.sqrt(sum(squared))

    def cosine(self, update: Update, norm: float) -> float:
        """Returns the cosine of the update, of this norm, and the momentum of all shards; NaN without momentum."""
        momentum = self.own.momentum_buffer
        if momentum is None:
            return float("nan")
        self._send(Compare(update.worker, self._share(update), update.sequence))
        parts = [compare(self.shard.of(update.delta), momentum)]
        for answer in self._receive():
            assert isinstance(answer, Compared)
            parts.append(answer)
        product = norm * sum(part.squared for part in parts) ** 0.5
        return sum(part.product for part in parts) / product if product > 0 else float("nan")

    def limit_round(self, updates: int) -> None:
        self._send(LimitRound(updates))
        self.own.limit_round(updates)
        self._receive_done()

    @property
    def steps(self) -> float:
        return self._scheduled.steps

    @property
    def learning_rate(self) -> float:
        return self._scheduled.learning_rate

    def begin_epoch(self, epoch: int) -> None:
        """Tells the schedule of every shard that worker 0 begins an epoch."""
        self._send(BeginEpoch(epoch))
        self._scheduled.begin_epoch(epoch)
        self._receive_done()

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Tells the schedule of every shard that worker 0 has ended an epoch, with this validation loss."""
        self._send(EndEpoch(epoch, loss))
        self._scheduled.end_epoch(epoch, loss)
        self._receive_done()

    def state_dict(self) -> State:
        """Returns the first shard's state, and in it those of the others, whose tensors lie in files without a name.

        Raises:
            OSError: these files cannot be written, as on a full disk.
        """
        with ExitStack() as stack:
            files = [stack.enter_context(nameless_file(self.directory)) for _ in self.others]
            for shard, file in zip(self.others, files, strict=True):
                self._send_to(shard, Save(), file)
            for answer in self._receive():
                if isinstance(answer, NotSaved):
                    raise OSError(answer.error)
            states = [state_from_file(file) for file in files]
        return self.own.state_dict() | {SHARDS: states}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`, which must have as many shards."""
        for shard, its in zip(self.others, state[SHARDS], strict=True):
            with nameless_file(self.directory) as file:
                state_to_file(_as_the_first(its, state), file)
                self._send_to(shard, Load(), file)
        self.own.load_state_dict(state)
        self._receive_done()

    @property
    def _scheduled(self) -> ScheduledRule:
        assert isinstance(self.own, ScheduledRule)
        return self.own

    def _share(self, update: Update) -> bool:
        """Copies an update that is not the one in its worker's slot into shared memory; returns whether it did."""
        weighed = update.delta.data_ptr() != self._slot(update.worker).data_ptr()
        if weighed:
            self._weighed.copy_(update.delta)
        return weighed

    def _norm_of_all(self, norm: Tensor) -> Tensor:
        """Returns the norm of the whole gradient, the same in all shards; called in the middle of an update."""
        squared = float(norm) ** 2
        for answer in self._receive():
            assert isinstance(answer, Norm)
            squared += answer.squared
        self._send(NormOfAll(squared))
        return root_of_all(squared, norm)

    def _send(self, command: Message) -> None:
        for shard in self.others:
            self._send_to(shard, command)

    def _send_to(self, shard: Shard, command: Message, file: IO[bytes] | None = None) -> None:
        shard.select(self.fragment)
        shard.send(command, file)

    def _receive(self) -> list[Message]:
        """Returns the answers of the other shards, in their order."""
        return [shard.receive() for shard in self.others]

    def _receive_done(self) -> None:
        for answer in self._receive():
            _check_done(answer)


def _check_done(answer: Message) -> None:
    if not isinstance(answer, Done):
        raise HalfAppliedError(f"a shard of the server answers {answer}")


def _as_the_first(state: State, first: State) -> State:
    """Returns a shard's state with the schedule and optimizer options of the first shard's, which a user may change."""
    if "schedule" not in first:
        return state
    groups = zip(state["optimizer"]["param_groups"], first["optimizer"]["param_groups"], strict=True)
    optimizer = state["optimizer"] | {"param_groups": [its | own | {"params": its["params"]} for its, own in groups]}
    return state | {"schedule": first["schedule"], "optimizer": optimizer}
