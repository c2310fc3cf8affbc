"""fairseq's optimizer and schedule over the flat parameters of a ``hybrid_async`` run's server."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from fairseq.optim import OPTIMIZER_REGISTRY, FairseqOptimizer, build_optimizer
from fairseq.optim.adam import Adam
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY, FairseqLRScheduler, build_lr_scheduler
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.algorithms.pieces import pieces
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.muon import divide_for_muon
from fairseq_async.fairseq_plugin.compat.optimizers import FusedAdam, component_config
from fairseq_async.method.option_flags import check_inner_optimizer
from fairseq_async.method.spec import JsonObject, MethodSpec
from fairseq_async.protocol.layout import Layout
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule
from fairseq_async.server.plan import EpochPlan


class FairseqSchedule:
    """fairseq's learning-rate schedule for the optimizer in the server, by the server's steps."""

    def __init__(self, optimizer: FairseqOptimizer, scheduler: FairseqLRScheduler) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler

    @property
    def learning_rate(self) -> float:
        """The present learning rate, for workers' logs."""
        return float(self.optimizer.get_lr())

    def follow(self, steps: int) -> None:
        """Sets the learning rate of the step that comes after ``steps`` steps."""
        self.scheduler.step_update(steps)

    def begin_epoch(self, epoch: int) -> None:
        """Tells the schedule that worker 0 begins an epoch."""
        self.scheduler.step_begin_epoch(epoch)

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Tells the schedule that worker 0 has ended an epoch, with this validation loss."""
        self.scheduler.step(epoch, loss)

    def state_dict(self) -> State:
        """Returns the state of fairseq's schedule."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: State) -> None:
        self.scheduler.load_state_dict(state)


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[ScheduledRule, EpochPlan]:
    """Builds the rule of a run, with its schedule, and its plan.

    Raises:
        ConfigurationError: fairseq does not take the configuration.
    """
    views = [Parameter(view) for view in layout.views(parameters)]
    divide_for_muon(zip([segment.name for segment in layout.segments], views, strict=True))
    inner, scheduler = _component(spec, "inner_optimizer"), _component(spec, "lr_scheduler")
    check_inner_optimizer(spec.method, str(inner["_name"]), OPTIMIZER_REGISTRY)
    _check_scheduler(str(scheduler["_name"]))
    with _fairseqs_errors(inner, scheduler):
        optimizer = build_optimizer(component_config(inner, "optimizer"), views)
        if type(optimizer).step is not FairseqOptimizer.step:  # of a plug-in; the server steps what is in it
            raise ValueError("it has a step() of its own: use --optimizer local_sgd, whose workers step")
        if optimizer.supports_flat_params:
            optimizer = build_optimizer(component_config(inner, "optimizer"), pieces(parameters))
        if spec.framework.get("fused") and type(optimizer.optimizer) is Adam and not inner.get("use_old_adam"):
            optimizer._optimizer = FusedAdam(optimizer.params, **optimizer.optimizer_config)
        schedule = build_lr_scheduler(component_config(scheduler, "lr_scheduler"), optimizer)
    clip_norm, elementwise = float(str(spec.framework["clip_norm"])), bool(optimizer.supports_flat_params)
    rest = {"clip_norm": clip_norm, "tensors": views, "elementwise": elementwise}
    options, own = spec.hybrid, FairseqSchedule(optimizer, schedule)
    with _fairseqs_errors(inner, scheduler):
        rule = ScheduledRule.of(options, spec.workers, optimizer.optimizer, own, **rest)
    return rule, EpochPlan(rule, spec.max_epoch, spec.whole_steps)


def _check_scheduler(name: str) -> None:
    known = sorted(set(LR_SCHEDULER_REGISTRY) - {"pass_through"})
    if name not in LR_SCHEDULER_REGISTRY:
        raise ConfigurationError(
            f"--lr-scheduler {name}: the server, which does not load your --user-dir, has {', '.join(known)}; "
            "--optimizer local_sgd, whose workers have the schedule, takes others too"
        )


@contextmanager
def _fairseqs_errors(inner: JsonObject, scheduler: JsonObject) -> Iterator[None]:
    """Turns an error of fairseq's, which checks little, into one of one line: a mistake raises whatever it leads to."""
    try:
        yield
    except Exception as error:
        says = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # an assertion names what it asserts
        raise ConfigurationError(
            f"--inner-optimizer {inner['_name']} with --lr-scheduler {scheduler['_name']}: {says}"
        ) from error


def _component(spec: MethodSpec, name: str) -> JsonObject:
    """Returns the description of an optimizer or schedule, as the worker's flags gave it."""
    component = spec.framework[name]
    if not isinstance(component, dict):
        raise ConfigurationError(f"{name} is {component!r}: not a description of one of fairseq's")
    return component
