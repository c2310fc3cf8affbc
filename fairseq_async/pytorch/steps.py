"""Notices training that the run does not see: steps of other optimizers, and parameters moved without any step."""

from collections.abc import Sequence
from typing import Any

from torch import Size, Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch.fsdp import held
from fairseq_async.worker.changes import OtherModels, ParameterWatch
from fairseq_async.worker.start.process import errors_in_one_line
from fairseq_async.worker.start.server_process import say

_STEPS_OF_COPY = 3  # in a row; fewer may be those of a network of the same shapes that belongs to no run


def watch_steps(
    optimizers: Sequence[Optimizer], named: Sequence[tuple[str, Parameter]], workers: int, of_trainer: bool
) -> list[RemovableHandle]:
    """Ends the process with one line at the first sign of training that the run does not see.

    Args:
        of_trainer: whether a ``Trainer`` has made the run, and not the script.

    Returns:
        The handles of the hooks, to be removed at the end of the block.
    """
    before_step = OtherOptimizers(optimizers, named, workers, of_trainer)
    handles = [register_optimizer_step_pre_hook(before_step)]
    handles += [each.register_step_post_hook(before_step.after) for each in optimizers]
    unseen = UnseenTraining(named, before_step)
    return handles + [each.register_post_accumulate_grad_hook(unseen) for _, each in named]


class OtherOptimizers:
    """A hook before every step of any optimizer of this process, which refuses those that step the run's parameters.

    A step inside the step of one of the run's own optimizers is that optimizer's: a wrapper, such as SAM's, calls
    another one. Several steps of parameters that have the run's shapes, with none of the run's optimizers between them,
    are named in a warning: they may be of a copy that the script trains in the model's place. So are steps of other
    parameters where there are several workers.

    Attributes:
        stepped: whether an optimizer of the run has stepped.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], named: Sequence[tuple[str, Parameter]], workers: int, of_trainer: bool
    ) -> None:
        too = "make them part of the Trainer's model" if of_trainer else "give the run their model and optimizer too"
        self._others = OtherModels(workers, too if of_trainer else f"{too} (several in a list)")
        own = "before the with block, and give it to the run (several in a list)"
        self._remedy = "before training, and give it to the Trainer as optimizers=" if of_trainer else own
        self._own = {id(each) for each in optimizers}
        self._names = {id(parameter): name for name, parameter in named}
        self._shapes = [_shapes(each) for each in optimizers]
        self._within: Optimizer | None = None
        self._of_copy = 0  # steps in a row
        self.stepped = False

    @errors_in_one_line()
    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        names = [self._names[id(each)] for each in parameters if id(each) in self._names]
        if self._within is not None:
            return
        if not names:
            self._others.count(optimizer)
            return self._warn_of_copy(optimizer)
        if id(optimizer) in self._own:
            self._within, self.stepped, self._of_copy = optimizer, True, 0
            return
        kind = type(optimizer).__name__
        raise ConfigurationError(
            f"{kind} steps {names[0]}, and is not the optimizer that the run was given: the run would not see its "
            f"steps; make the {kind} whose step() the loop calls {self._remedy}"
        )

    def _warn_of_copy(self, optimizer: Optimizer) -> None:
        self._of_copy += _shapes(optimizer) in self._shapes
        if self._of_copy == _STEPS_OF_COPY:
            say(
                f"warning: {type(optimizer).__name__} steps parameters of the same shapes as the run's, and the run's "
                "own optimizer does not step: if it trains a copy of the model, the run does not see that training"
            )

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes that a step of one of the run's optimizers is over."""
        if optimizer is self._within:
            self._within = None


def _shapes(optimizer: Optimizer) -> list[Size]:
    return [each.shape for group in optimizer.param_groups for each in group["params"]]


class UnseenTraining:
    """A hook after the gradient of a parameter is there: looks whether parameters move though the run's optimizers have
    never stepped, as in a script that moves them by hand. It looks at the second, fourth, eighth… gradient."""

    def __init__(self, named: Sequence[tuple[str, Parameter]], own: OtherOptimizers) -> None:
        self._watch, self._own = ParameterWatch(held(named)), own
        self._first: int | None = None
        self._gradients = self._changes = 0

    @errors_in_one_line()
    def __call__(self, parameter: Tensor) -> None:
        if self._own.stepped:
            return
        self._first = id(parameter) if self._first is None else self._first
        self._gradients += id(parameter) == self._first
        if id(parameter) != self._first or self._gradients & (self._gradients - 1):
            return
        changed = self._watch.changed()
        self._watch.note()
        self._changes += changed is not None
        if self._changes > 1:  # one change may be weights that the script loads before it begins
            raise ConfigurationError(
                f"{changed} is trained, and no step of the optimizer that the run was given comes: the run does not "
                "see the training; call step() of that optimizer, and change the parameters by it alone"
            )


@errors_in_one_line()
def refuse_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before the steps of an optimizer whose run this worker has left."""
    raise ConfigurationError(
        "leave() has ended this worker's part of the run, and the loop goes on: its steps would train a copy of the "
        "model that is this worker's own; end the loop first"
    )


@errors_in_one_line()
def refuse_early(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before the steps of an optimizer whose run has not begun."""
    raise ConfigurationError(
        f"{type(optimizer).__name__} was given to a run whose with block was not entered, and steps: each process "
        "would train by itself; train within the block, as in: with AsyncLocalSGD(...) as worker"
    )


def allow_steps(optimizers: Sequence[Optimizer]) -> None:
    """Takes back :func:`refuse_early`, also that of a run that was made before with these optimizers."""
    for each in optimizers:
        for key in [key for key, hook in each._optimizer_step_pre_hooks.items() if hook is refuse_early]:
            del each._optimizer_step_pre_hooks[key]
