"""A ``Trainer`` of transformers that counts, logs, evaluates, saves and ends by the run, not by its own steps."""

import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import has_length

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch.trainer.accumulation import (
    Accumulation,
    averages_over_tokens,
    is_divided_by_micro_batches,
)
from fairseq_async.server.optimizers.learning_rates import begin_anew, rates_by_step, steps_taken
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.start.process import errors_in_one_line
from fairseq_async.worker.start.server_process import say

Plan: TypeAlias = tuple[Any, ...]  # what ``Trainer.set_initial_training_values`` returns
Worker: TypeAlias = LocalSGDWorker | HybridWorker
_ROUNDING = 1e-6  # of progress: a third of a step, three times


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Puts ``around(original, self, …)`` in the place of a method."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(self: object, *args: object, **kwargs: object) -> object:
        return around(original, self, *args, **kwargs)

    setattr(owner, name, wrapped)


class FollowRun(DefaultFlowCallback):
    """Takes the place of a ``Trainer``'s ``DefaultFlowCallback``: steps and epochs are those of the run.

    A faster worker takes more than its share of the run's steps, and a slower one less. So ``state.global_step`` is the
    run's progress in whole steps, and ``state.epoch`` that of all workers together. What is due at a multiple of steps,
    or at the end of an epoch, is done when the run passes it. At the end of the run ``global_step`` is ``max_steps``,
    and the training of every worker ends.

    Args:
        trainer: a ``Trainer`` that is about to train.
        find: returns the worker side of the method; None while there is none.
        prepare: called with the ``Trainer``'s control before the ``Trainer`` logs, evaluates or saves.
        restore: called afterwards.
    """

    def __init__(
        self,
        trainer: Trainer,
        find: Callable[[], Worker | None],
        prepare: Callable[[TrainerControl], None],
        restore: Callable[[], None],
    ) -> None:
        self._trainer, self._find, self._prepare, self._restore = trainer, find, prepare, restore
        self._epochs = self._steps_per_epoch = self._batches_per_epoch = 0
        self._own_steps = 0  # whose losses were not logged yet
        self._by_tokens: bool | None = None  # whether the loss is a mean over tokens; None until a batch is drawn
        self._accumulation: Accumulation | None = None  # where the server divides the micro-batches of a step
        others = [each for each in trainer.callback_handler.callbacks if not isinstance(each, DefaultFlowCallback)]
        trainer.callback_handler.callbacks = [self, *others]
        log_save_evaluate = partial(self._log_save_evaluate, trainer._maybe_log_save_evaluate)
        setattr(trainer, "_maybe_log_save_evaluate", log_save_evaluate)  # noqa: B010 - mypy assigns to no method
        setattr(trainer, "get_batch_samples", partial(self._draw, trainer.get_batch_samples))  # noqa: B010

    def plan(self, plan: Plan, loader: object, total_steps: int, parts: int, is_part: bool) -> Plan:
        """Returns the ``Trainer``'s plan without an end of its epochs, which a fast worker has more of.

        Args:
            plan: the ``Trainer``'s own.
            loader: the loader of the training data.
            total_steps: the run's number of steps; 0 for that of the plan.
            parts: number of parts in which the data was divided, of which the ``Trainer`` has one.
            is_part: whether the loader's data set is such a part, not the whole.
        """
        epochs, steps_per_epoch, examples, samples, batch_size, batches, steps = plan
        total_steps = total_steps or steps
        self._epochs = epochs
        if has_length(loader):
            self._steps_per_epoch, self._batches_per_epoch = steps_per_epoch, batches
            self._epochs = -(-total_steps // steps_per_epoch)
        if is_part or self._trainer.args.max_steps > 0:  # which the Trainer multiplies by its own batches
            samples *= parts
        samples = samples * total_steps / steps
        return sys.maxsize, steps_per_epoch, examples, samples, batch_size * parts, batches, total_steps

    def begin(self, total_steps: int) -> None:
        """Takes the run's number of steps, where worker 0 has given it, and the progress of a run that is under way."""
        trainer, worker = self._trainer, self._find()
        trainer.state.max_steps = total_steps or trainer.state.max_steps
        known = trainer.state.global_step  # to the Trainer, whose data go on there
        if worker is not None:
            trainer.state.global_step = max(trainer.state.global_step, self._steps(worker))
            trainer._initial_global_step = trainer._globalstep_last_logged = trainer.state.global_step
        if isinstance(worker, HybridWorker) and worker.micro_batches:
            self._accumulation = Accumulation(trainer, worker)
        # one that comes late for the first time has its part of the data still before it
        if worker is not None and trainer.state.global_step > known and worker.sequence > 0:
            self._come_back(trainer, forgets=worker.client.worker == known == 0)

    def _come_back(self, trainer: Trainer, forgets: bool) -> None:
        """Makes a worker that was in the run before go on with its data; says what worker 0's ``Trainer`` forgets."""
        if self._steps_per_epoch and hasattr(trainer, "_run_epoch"):
            go_on = partial(self._run_epoch, trainer._run_epoch, trainer.state.global_step)
            setattr(trainer, "_run_epoch", go_on)  # noqa: B010 - mypy assigns to no method
        if forgets and trainer.args.metric_for_best_model:
            say(
                f"warning: worker 0 goes on at step {trainer.state.global_step} without a checkpoint of the Trainer: "
                "load_best_model_at_end and early stopping know of no evaluation before; give train() the last one, as "
                "resume_from_checkpoint"
            )

    def _run_epoch(self, run_epoch: Callable[..., None], steps: int, **given: Any) -> None:
        """Stands for the ``Trainer``'s ``_run_epoch`` where this worker was in the run before, as one that was started
        again, or with ``--resume``: its data go on behind the run's steps, as from a checkpoint of that step. The
        ``Trainer`` would train the first batches once more."""
        epochs, more = divmod(steps, self._steps_per_epoch)
        arguments = self._trainer.args
        place = {
            "epoch": given["epoch"] - given["epochs_trained"] + epochs,
            "epochs_trained": epochs,
            "steps_trained_in_current_epoch": more * int(arguments.gradient_accumulation_steps),
        }
        if given["resume_from_checkpoint"] is None:  # without it nothing is skipped; this has no state to be loaded
            place["resume_from_checkpoint"] = arguments.output_dir
        run_epoch(**given | place)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Says how many epochs the run has."""
        state.num_train_epochs = self._epochs

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Counts the run's steps in place of this worker's, and says what is due after them.

        Where the run has taken several, the other callbacks are told each: one that waits for a certain step, as by
        ``state.global_step % 100 == 0``, would else miss it.
        """
        before, worker = state.global_step - 1, self._find()  # the Trainer has counted this worker's step
        assert worker is not None
        self._own_steps += 1
        now = state.global_step = max(before, self._steps(worker))
        if self._steps_per_epoch:
            state.epoch = self._epoch(now, self._trainer.args.gradient_accumulation_steps)
        control.should_training_stop |= worker.finished
        control.should_epoch_stop |= self._accumulation is not None and self._accumulation.epoch_is_over
        due = partial(self._is_due, before, now, worker.finished)
        logs_at_end = args.logging_strategy == "epoch"
        if due(args.logging_strategy, state.logging_steps, logs_at_end) or (args.logging_first_step and not before):
            control.should_log = True
        position = state.epoch if args.eval_strategy == "epoch" else state.global_step
        if due(args.eval_strategy, state.eval_steps) and args.eval_delay <= (position or 0):
            control.should_evaluate = True
        control.should_save |= due(args.save_strategy, state.save_steps)
        for step in range(before + 1, now):
            state.global_step = step
            for each in self._trainer.callback_handler.callbacks:
                if each is not self:
                    control = each.on_step_end(args, state, control, **kwargs) or control
        state.global_step = now
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends what the run has changed of the ``Trainer``'s loop."""
        if self._accumulation is not None:
            self._accumulation.end()
            self._accumulation = None

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Does what is due at the end of an epoch where nobody knows how long one is, or training was stopped in it."""
        if not self._steps_per_epoch or (control.should_training_stop and state.global_step % self._steps_per_epoch):
            super().on_epoch_end(args, state, control)

    def _steps(self, worker: Worker) -> int:
        """Returns the run's progress in whole steps; only a run that is over has had all of them."""
        most = self._trainer.state.max_steps - (not worker.finished)
        return min(int(worker.run_progress + _ROUNDING), most)

    def _epoch(self, steps: int, batches_per_step: int) -> float:
        whole, more = divmod(steps, self._steps_per_epoch)
        return whole + more * batches_per_step / self._batches_per_epoch

    def _is_due(self, before: int, now: int, finished: bool, strategy: str, steps: int, at_end: bool = True) -> bool:
        """Whether the run has passed a multiple of what the strategy says, or has finished if that counts."""
        if strategy == "epoch":
            steps = self._steps_per_epoch
        elif strategy != "steps":
            return False
        return (finished and at_end) or (steps > 0 and now // steps > before // steps)

    def _log_save_evaluate(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Stands for the ``Trainer``'s method, before which every callback has said what it wants."""
        control = self._trainer.control
        self._prepare(control)
        if control.should_log or control.should_training_stop:
            self._scale_loss()
        original(*args, **kwargs)
        self._restore()

    def _draw(self, original: Callable[..., Any], batches: Iterator[Any], number: int, device: torch.device) -> Any:
        """Stands for the ``Trainer``'s ``get_batch_samples``, which draws the micro-batches of a step and counts their
        tokens. Where its loss is to be their mean over all ranks, a gradient has their number as its weight."""
        if self._accumulation is not None:
            drawn, tokens = self._accumulation.draw(original, batches, device)
        else:
            drawn, tokens = original(batches, number, device)
        worker = self._find()
        averages = self._trainer.args.average_tokens_across_devices
        if isinstance(worker, HybridWorker) and (averages or self._accumulation is not None):
            worker.weight = self._weight(worker, tokens, averages)
        return drawn, tokens

    def _weight(self, worker: HybridWorker, tokens: Any, averages: bool) -> float | None:
        """Returns the weight of the worker's next gradient, by which steps are those of a synchronous ``Trainer``; None
        for the number of its samples.

        Args:
            tokens: that the Trainer has counted in the gradient's micro-batches; None where it counts none.
            averages: whether a loss that is a mean over tokens is one over those of all ranks.
        """
        if self._accumulation is not None and self._accumulation.stands_in:
            return 0.0
        if self._by_tokens is None:
            self._by_tokens = averages_over_tokens(self._trainer)
        if self._by_tokens:
            return float(tokens) if averages and tokens is not None else None
        if self._accumulation is None or is_divided_by_micro_batches(self._trainer, tokens):
            return None
        return worker.share  # the gradient is a sum: it weighs more by itself, the more micro-batches it has

    def _scale_loss(self) -> None:
        """Scales the sum of this worker's losses, which the ``Trainer`` divides by the run's steps, not by its own."""
        steps = self._trainer.state.global_step - self._trainer._globalstep_last_logged
        if self._own_steps and (steps or self._trainer.control.should_training_stop):
            self._trainer._tr_loss *= steps / self._own_steps
            self._own_steps = 0


@errors_in_one_line()
def take_back(scheduler: Any) -> None:
    """Takes a scheduler, which a ``Trainer`` has loaded from a checkpoint of an asynchronous run, back to the run's
    beginning: its rates are then those of the run's progress. A ``LambdaLR`` needs no such thing.

    Raises:
        ConfigurationError: it had taken steps before the run began, and its first rates are not known.
    """
    if type(scheduler) is LambdaLR:
        return
    if before := getattr(scheduler, "begins_at", 0):
        raise ConfigurationError(
            f"the {type(scheduler).__name__} of the checkpoint had taken {before} steps before the run began, so that "
            "its rates cannot be found again: give the Trainer a LambdaLR, or begin anew without resuming"
        )
    scheduler.last_epoch = 0
    begin_anew(scheduler)


class RunSchedule:
    """A ``Trainer``'s learning-rate schedule by the progress of the run, in place of this worker's own steps.

    It sets the rates of this worker's optimizer, and those that the scheduler tells a callback. With ``hybrid_async``
    the optimizer steps in the server, which has the same rates, and this is for the log.

    Args:
        scheduler: the ``Trainer``'s own, which is not stepped any more.
        optimizer: the optimizer of the scheduler.
        worker: the worker side of the method.
        total_steps: number of steps of the run.
        resumed: whether the scheduler is that of a checkpoint of an asynchronous run; the position of any other one is
            where the run begins.
        told: the scheduler that callbacks and the run's checks have, where the ``Trainer`` has made another since.

    Raises:
        ConfigurationError: the rates do not follow from the number of steps alone.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizer: Optimizer,
        worker: Worker,
        total_steps: int,
        resumed: bool,
        told: Any = None,
    ) -> None:
        self._scheduler, self._optimizer, self._worker = scheduler, optimizer, worker
        self._told = [scheduler] if told is None else [scheduler, told]
        self._begins_at = getattr(scheduler, "begins_at", 0) if resumed else steps_taken(scheduler)
        self._rates_after = rates_by_step(scheduler, optimizer, total_steps, self._begins_at)
        self._count = steps_taken(scheduler)
        self.step()

    @errors_in_one_line()
    def step(self) -> None:
        """Takes the rates for the next step; where something has stepped the scheduler, the worker ends with a line."""
        if (now := steps_taken(self._scheduler)) != self._count:
            raise ConfigurationError(
                f"the script has moved the {type(self._scheduler).__name__} of the Trainer from step {self._count} to "
                f"{now}, as in a callback: its rates are those of the run's progress; leave its step() out"
            )
        self._steps = int(self._worker.run_progress + _ROUNDING)
        self._rates = self._rates_after(self._steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        for scheduler in self._told:
            scheduler._last_lr = self._rates

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of each parameter group; between a step of the optimizer and one of the schedule,
        which is when the ``Trainer`` asks, that of the step."""
        return self._rates

    def state_dict(self) -> State:
        """Returns the state of the ``Trainer``'s own scheduler, at the progress of the run."""
        position = {"last_epoch": self._begins_at + self._steps, "begins_at": self._begins_at}
        return {**self._scheduler.state_dict(), **position}

    def load_state_dict(self, state: State) -> None:
        """Does nothing: the position is that of the run."""
