"""A callback and a learning-rate schedule by which ``transformers.Trainer`` follows an asynchronous run."""

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from fairseq_async.deepspeed_plugin.compat import DeepSpeedOptimizer
from fairseq_async.deepspeed_plugin.engine import AsyncEngine


class FollowRun(TrainerCallback):
    """Ends a ``Trainer``'s training with the run, and lets worker 0 alone validate and save.

    A faster worker takes more than its share of the run's ``total_steps``, and a slower one less. So the Trainer's own
    count, ``max_steps``, ends the training only where the run has no end.

    Attributes:
        engine: the engine that the Trainer has made; None before that, and without an asynchronous run: then the
            callback does nothing.
        has_end: whether the run has ``total_steps``.
    """

    engine: AsyncEngine | None = None
    has_end = False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Moves the Trainer's ``max_steps`` ahead of its count if the run has an end, which ends the training."""
        if self.engine is not None and self.has_end:
            state.max_steps = max(state.max_steps, state.global_step + 2)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """After the last step of the run, makes the Trainer validate and save as after its own last step."""
        if self.engine is not None and self.engine.finished:
            control.should_training_stop = True
            control.should_evaluate |= args.eval_strategy == IntervalStrategy.STEPS
            control.should_save |= args.save_strategy == SaveStrategy.STEPS
        self._take_parameters(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Prepares a validation or checkpoint at the end of an epoch, as after a step."""
        self._take_parameters(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ends this worker's part; the model has the server's parameters, or those of the best checkpoint."""
        self.end()

    @classmethod
    def end(cls) -> None:
        """Ends this worker's part; worker 0 ends a run that has an end for all: its Trainer may have stopped early."""
        if cls.engine is not None:
            cls.engine.end(for_all=cls.has_end and cls.engine.worker == 0)

    def _take_parameters(self, control: TrainerControl) -> None:
        if self.engine is None:
            return
        if self.engine.worker > 0:
            control.should_evaluate = control.should_save = False
        elif control.should_evaluate or control.should_save:
            self.engine.pull()


class ServerSchedule:
    """A learning-rate schedule for the Trainer's log, where the schedule itself is in the server."""

    def __init__(self, optimizer: DeepSpeedOptimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        """Does nothing: the engine takes the rate with each answer of the server."""

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of each parameter group."""
        return [group["lr"] for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, object]:
        """Returns an empty state: the server has the schedule's."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Does nothing: the server has the schedule's state."""
