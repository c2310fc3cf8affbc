"""Builds the rule of a server in shards, and starts the processes of its shards."""

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fairseq_async.algorithms import Fragment, FragmentedRule, Rule
from fairseq_async.algorithms.rule import State
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.division import divided, host_parts, local_part
from fairseq_async.protocol.layout import Layout
from fairseq_async.server.plan import Build, EpochPlan, Plan
from fairseq_async.server.shards.calls import OtherShard
from fairseq_async.server.shards.part import Memory, ShardPart, part_of
from fairseq_async.server.shards.process import ShardProcess
from fairseq_async.server.shards.rule import ShardedRule


def shared_copy(parameters: Tensor) -> Tensor:
    """Returns a copy of the parameters in memory that this process shares with those that it forks from now on."""
    return shared_zeros(parameters.numel()).copy_(parameters)


def shared_zeros(size: int) -> Tensor:
    """Returns fp32 zeros in memory that is shared in the same way, and takes no space before it is written to."""
    return torch.frombuffer(mmap.mmap(-1, 4 * size), dtype=torch.float32)


def build_sharded(
    build: Build,
    spec: MethodSpec,
    layout: Layout,
    parameters: Tensor,
    slot: Callable[[int], Tensor],
    directory: Path,
    read: State | None = None,
    remote: Sequence[OtherShard] = (),
) -> tuple[Rule, Plan]:
    """Builds the rule and the plan of a server in shards, and starts their processes; this process has the first shard.

    Args:
        build: builds the rule and the plan of a server that is one process.
        parameters: the parameters from :func:`shared_copy`; without those of ``remote`` shards.
        slot: returns the slot of a worker, in memory that all shards share.
        directory: where the processes exchange the states of shards, in files without a name.
        read: tensors that this process has in memory only for the start; the other processes give their copies back.
        remote: the shards on other machines; a replay has them in processes of its own, without this argument.

    Raises:
        RefusedError: the model has fewer tensors than there are shards.
        ConfigurationError: ``build`` raised it.
    """
    parts = _Parts(build, spec, layout, parameters, slot)
    first = [parts.build(fragment, 0) for fragment in range(len(parts.shards))]
    count = spec.server.server_shards if remote else spec.server.shards
    here = [ShardProcess(number, partial(parts.build_all, number), read) for number in range(1, count)]
    others: list[OtherShard] = [*here, *remote]
    measured = _measured(spec, layout, remote)
    rules = [
        ShardedRule(part, others[: len(shards) - 1], memory, directory, fragment, measured)
        for fragment, ((_, part), shards, memory) in enumerate(zip(first, parts.shards, parts.memory, strict=True))
    ]
    plan, _ = first[0]
    if isinstance(plan, EpochPlan):
        plan.schedule = rules[0]
    return rules[0] if len(rules) == 1 else FragmentedRule(parts.fragments, rules), plan


def close_shards(rule: Rule) -> None:
    """Ends the processes of a rule from :func:`build_sharded`; any other rule has none."""
    rules = rule.rules if isinstance(rule, FragmentedRule) else [rule]
    for shard in {other for each in rules if isinstance(each, ShardedRule) for other in each.others}:
        shard.close()


class _Parts:
    """The shards' parts of a model and of each of its fragments, on memory that the shards' processes share.

    Attributes:
        shards: the shards of each fragment; each counts tensors and elements from the beginning of its fragment.
        memory: that of each fragment.
    """

    def __init__(
        self, build: Build, spec: MethodSpec, layout: Layout, parameters: Tensor, slot: Callable[[int], Tensor]
    ) -> None:
        self._build, self._spec, self._layout, self._parameters = build, spec, layout, parameters
        self.fragments, self.shards = layout.fragments(spec.fragments), divided(spec, layout)
        starts_ahead = spec.method == "local_sgd" and getattr(spec.local_sgd, "start_ahead", False)
        starts = shared_zeros(parameters.numel()) if starts_ahead else None
        whole = Memory(lambda worker, number: slot(worker), shared_zeros(parameters.numel()), starts)
        self.memory = [whole.of(fragment) for fragment in self.fragments]

    def build(self, fragment: int, shard: int) -> tuple[Plan, ShardPart]:
        """Builds one shard's plan and part of a fragment."""
        whole, its = self.fragments[fragment], self.shards[fragment][shard]
        first = whole.tensors.start
        tensors = slice(first + its.tensors.start, first + its.tensors.stop)
        part = torch.from_numpy(its.of(whole.of(self._parameters)).numpy())  # a storage that begins with the shard
        rule, plan = self._build(*part_of(self._spec, self._layout, tensors), part)
        return plan, ShardPart(rule, part, its.tensors, self.memory[fragment].of(its))

    def build_all(self, shard: int) -> dict[int, ShardPart]:
        """Builds one shard's parts of the fragments in which it has any, by the fragment's number."""
        having = [number for number, shards in enumerate(self.shards) if shard < len(shards)]
        return {number: self.build(number, shard)[1] for number in having}


def _measured(spec: MethodSpec, layout: Layout, remote: Sequence[OtherShard]) -> list[Fragment]:
    """Returns the parts in memory here whose norms make up an update's, where hosts measure the others: in a replay
    these parts are here too, and the sum is the same."""
    if not spec.server.hosts:
        return []
    return [local_part(spec, layout), *(() if remote else host_parts(spec, layout))]
