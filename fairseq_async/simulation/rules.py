"""The methods of a simulation: rule, plan and description of each, and rules that only a simulation needs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from fairseq_async.algorithms import AdaScaleGain, HybridAccumulation, Rule, Update, adasum
from fairseq_async.algorithms.rule import State, fills
from fairseq_async.method.spec import MethodSpec, hybrid_spec, local_sgd_spec
from fairseq_async.options.config import HybridOptions, LocalSGDOptions
from fairseq_async.protocol import Layout
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule
from fairseq_async.server.plan import EpochPlan, Plan
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.simulation.experiment import Experiment, Method, SimulatedAdaScaleOptions, SimulatedAdasumOptions
from fairseq_async.simulation.ranks import RANKS_METHODS, RanksMethod, TwoRounds
from fairseq_async.simulation.schedule import LearningRate, RateSchedule, make_optimizer, set_lr


@dataclass(frozen=True)
class SimulatedMethod:
    """The parts of a method: the server's rule and plan, and the description that a real run writes into ``run.json``.

    Attributes:
        rounds: bytes of an update that is sent in two rounds; None where updates are sent in one.
    """

    rule: Rule
    plan: Plan
    spec: MethodSpec
    sends_gradients: bool
    rounds: TwoRounds | None = None


def build_method(
    method: Method, experiment: Experiment, workers: int, shards: list[int], parameters: Tensor, layout: Layout
) -> SimulatedMethod:
    """Builds the rule and the plan of a method, as the real servers do.

    Raises:
        ConfigurationError: options that do not go together.
    """
    options = method.options
    if isinstance(options, LocalSGDOptions):
        own = options.model_copy(update={"total_steps": experiment.steps, "seed": experiment.seed})
        spec = local_sgd_spec(own, workers, shards, None, {})
        return SimulatedMethod(*local_sgd_main.build(spec, layout, parameters), spec, sends_gradients=False)
    if isinstance(options, SimulatedAdasumOptions):
        plan = LocalStepPlan(
            workers,
            options.local_steps,
            total_steps=experiment.steps,
            dynamic_local_steps=False,
            shards=shards,
            seed=experiment.seed,
        )
        spec = MethodSpec("adasum", workers, options.model_dump(), barrier=workers)
        return SimulatedMethod(AdasumOfRanks(layout, workers), plan, spec, sends_gradients=False)
    inner = make_optimizer(method.optimizer, [parameters])
    if isinstance(options, SimulatedAdaScaleOptions):
        return _adascale(options, method, experiment, workers, inner)
    if not isinstance(options, HybridOptions):
        ranks = RANKS_METHODS[options.model_dump()["method"]]
        return _of_ranks(ranks, method, experiment, workers, parameters, inner)
    options = options.model_copy(update={"seed": experiment.seed})
    # as in a real run, the schedule counts the server's steps, whatever the number of gradients in one
    steps = max(1, experiment.steps * workers // ((options.updates_per_step or workers) * options.micro_batches))
    rate = LearningRate(experiment.schedule, method.optimizer.lr, steps)
    spec = hybrid_spec(options, workers, None, {}, steps)
    clip_norm = method.optimizer.clip_norm
    rule = ScheduledRule.of(options, workers, inner, RateSchedule(inner, rate), clip_norm=clip_norm)
    return SimulatedMethod(rule, EpochPlan(rule, spec.max_epoch, spec.whole_steps), spec, sends_gradients=True)


def _adascale(
    options: SimulatedAdaScaleOptions, method: Method, experiment: Experiment, workers: int, inner: Optimizer
) -> SimulatedMethod:
    spec = MethodSpec("adascale", workers, options.model_dump() | {"updates_per_step": workers}, barrier=workers)
    accumulation = HybridAccumulation(inner, workers, method.optimizer.clip_norm)
    rate = LearningRate(experiment.schedule, method.optimizer.lr, experiment.steps)
    rule = AdaScaleRule(accumulation, rate, options.smoothing)
    plan = EpochPlan(rule, max_epoch=0, total_steps=experiment.steps)
    return SimulatedMethod(rule, plan, spec, sends_gradients=True)


def _of_ranks(
    ranks: RanksMethod, method: Method, experiment: Experiment, workers: int, parameters: Tensor, optimizer: Optimizer
) -> SimulatedMethod:
    given = method.options.model_dump() | {"updates_per_step": workers}
    rate = LearningRate(experiment.schedule, method.optimizer.lr, experiment.steps)
    scheduled = ScheduledRule(optimizer, 1, RateSchedule(optimizer, rate), clip_norm=method.optimizer.clip_norm)
    rule, rounds = ranks.build(method.options, scheduled, workers, experiment.seed, parameters.numel())
    plan = EpochPlan(scheduled, max_epoch=0, total_steps=experiment.steps)
    spec = MethodSpec(ranks.name, workers, given, barrier=workers)
    return SimulatedMethod(rule, plan, spec, sends_gradients=True, rounds=rounds)


class AdaScaleRule(Rule):
    """AdaScale SGD: each step is r times as large, with r from the gradients that are summed; the schedule follows τ.

    Batches may differ in tokens: |g_i|² counts by its share of them, as in
    :meth:`~fairseq_async.collective.AdaScale.measure_sums`.

    Args:
        accumulation: the rule that sums the gradients, and steps.
        smoothing: θ in place of the paper's.

    Attributes:
        last_gain: r of the last step.
    """

    def __init__(self, accumulation: HybridAccumulation, rate: LearningRate, smoothing: float | None) -> None:
        self.accumulation, self.rate = accumulation, rate
        self.gain = AdaScaleGain(accumulation.updates_per_step, smoothing)
        self.learning_rate, self.last_gain = 0.0, 1.0
        self._square_norms: list[float] = []  # n_i|g_i|² of the step's gradients so far

    @property
    def steps(self) -> float:
        """Number of scale-invariant steps, τ."""
        return self.gain.scale_invariant_steps

    def begin_epoch(self, epoch: int) -> None:
        """Does nothing: the rate follows τ."""

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Does nothing: the rate follows τ."""

    def apply(self, parameters: Tensor, update: Update) -> float:
        self._square_norms.append(update.weight * _square_norm(update.delta))
        if self.moves_parameters():
            progress = int(self.gain.scale_invariant_steps)
            share = len(self._square_norms) / (self.accumulation.weight + update.weight)
            norms = [share * each for each in self._square_norms]
            self.last_gain = self.gain.update(norms, _square_norm(self._mean_with(update)))
            self.learning_rate, self._square_norms = self.last_gain * self.rate(progress), []
            set_lr(self.accumulation.optimizer, self.learning_rate)
        return self.accumulation.apply(parameters, update)

    def moves_parameters(self, ahead: int = 0) -> bool:
        return self.accumulation.moves_parameters(ahead)

    def limit_round(self, updates: int) -> None:
        self.accumulation.limit_round(updates)
        self.gain.scale = self.accumulation.updates_per_step

    def _mean_with(self, update: Update) -> Tensor:
        mean, weight = self.accumulation.mean, self.accumulation.weight
        if mean is None or not self.accumulation.count:
            return update.delta
        return mean.lerp(update.delta, update.weight / (weight + update.weight))

    def state_dict(self) -> State:
        own = {"gain": self.gain.state_dict(), "square_norms": self._square_norms, "last_gain": self.last_gain}
        return self.accumulation.state_dict() | own

    def load_state_dict(self, state: State) -> None:
        self.accumulation.load_state_dict(state)
        self.gain.load_state_dict(state["gain"])
        self._square_norms, self.last_gain = list(state["square_norms"]), state["last_gain"]


def _square_norm(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))


class AdasumOfRanks(Rule):
    """Subtracts the Adasum of a round's deltas: θ ← θ − Adasum(δ₁ … δ_k), tensor by tensor, for k ranks.

    At the end of a run, when the steps that are left are not for all ranks, a round has the deltas of those that they
    are for. Keeps references to the deltas until the round is complete; the workers must not overwrite them before.
    """

    def __init__(self, layout: Layout, ranks: int) -> None:
        self.layout, self.round_size = layout, ranks
        self._deltas: list[Tensor] = []

    def apply(self, parameters: Tensor, update: Update) -> bool:
        self._deltas.append(update.delta)
        if len(self._deltas) < self.round_size:
            return False
        views = [list(self.layout.views(delta)) for delta in self._deltas]
        for parameter, tensors in zip(self.layout.views(parameters), zip(*views, strict=True), strict=True):
            parameter.sub_(adasum(tensors))
        self._deltas = []
        return True

    def moves_parameters(self, ahead: int = 0) -> bool:
        return fills(len(self._deltas), self.round_size, ahead)

    def limit_round(self, updates: int) -> None:
        self.round_size = updates

    def state_dict(self) -> State:
        """Returns nothing: between two rounds there is nothing to keep."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Does nothing: nothing was kept."""
