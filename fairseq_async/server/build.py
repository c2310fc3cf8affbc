"""Builds what a method's run has in its server, for the server process, the simulator and the replay."""

from torch import Tensor

from fairseq_async.algorithms import NormGate, Rule, StalenessPolicy
from fairseq_async.method.spec import MethodSpec
from fairseq_async.server.coordinator import Coordinator
from fairseq_async.server.membership import Membership
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.plan import Plan
from fairseq_async.server.rounds.grace import GracePeriod, Quorum
from fairseq_async.server.rounds.look_ahead import LookAhead
from fairseq_async.server.rounds.near_arrivals import NearArrivals
from fairseq_async.server.rounds.shares import Shares
from fairseq_async.server.rounds.waiting import OPEN, Waiting
from fairseq_async.server.shards.divided_server import DividedServer
from fairseq_async.server.shards.rule import ShardedRule


def build_server(spec: MethodSpec, rule: Rule, parameters: Tensor) -> ParameterServer:
    """Builds the parameter server of a method; ``parameters`` (flat) change in place."""
    divided = isinstance(rule, ShardedRule) and rule.elsewhere
    return (DividedServer if divided else ParameterServer)(
        parameters,
        rule,
        holds=spec.barrier > 0,
        last_version=spec.last_version,
        staleness=StalenessPolicy(spec.staleness_power, spec.staleness_limit, spec.delay_compensation),
        gate=NormGate(spec.server.max_update_norm_ratio),
        keeps_last_step=spec.look_ahead != 0.0,
        counts_in_rounds=spec.counts_in_rounds,
    )


def build_coordinator(
    spec: MethodSpec, rule: Rule, plan: Plan, parameters: Tensor, membership: Membership
) -> Coordinator:
    """Builds the coordinator of a method, as the server process, the simulator and the replay use it."""
    membership.waits_for_dead = spec.waits_for_dead
    server = build_server(spec, rule, parameters)
    waiting: Waiting = GracePeriod(spec.grace_period, plan, spec.barrier or OPEN)
    if spec.closes_early:
        waiting = NearArrivals(spec.grace_share, spec.grace_period, spec.micro_batches > 0)
    elif spec.quorum:
        waiting = Quorum(spec.quorum, spec.grace_period or 0.0, plan)
    shares = Shares(spec.micro_batches, membership.announced)
    return Coordinator(server, plan, membership, waiting, LookAhead(spec.look_ahead), shares)
