"""A ``Trainer`` each of whose steps accumulates as many micro-batches as the server has assigned."""

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import Trainer

from fairseq_async.errors import ConfigurationError, option
from fairseq_async.pytorch.trainer.dealt import DealtBatches, can_be_dealt
from fairseq_async.worker.hybrid import HybridWorker

_TOKENS = "num_items_in_batch"
_LENGTHS = "steps_in_epoch", "num_update_steps_per_epoch"  # of an epoch, by which the loop would end it


def follows_shares(trainer: Trainer) -> bool:
    """Whether the loop of this version of transformers is one that :class:`Accumulation` knows, and the script's own
    code does not count the micro-batches of a step itself."""
    return hasattr(trainer, "_run_epoch") and not _counts_itself(trainer)


def check_counting(trainer: Trainer) -> None:
    """Checks that a script which asks for shares does not count the micro-batches of a step itself.

    Raises:
        ConfigurationError: it does.
    """
    if name := _counts_itself(trainer):
        raise ConfigurationError(
            f"{name} reads args.gradient_accumulation_steps, and with {option('shares')} auto a step may have another "
            "number of micro-batches: take self.current_gradient_accumulation_steps, or give equal"
        )


def _counts_itself(trainer: Trainer) -> str:
    """Returns the name of what the script has written for this ``Trainer`` that reads
    ``args.gradient_accumulation_steps``, as to divide a loss by it; "" if nothing does."""
    kinds, found = type(trainer).__mro__, {"compute_loss_func": trainer.compute_loss_func}
    for kind in kinds[: kinds.index(Trainer)]:
        found |= {f"{kind.__name__}.{name}": each for name, each in vars(kind).items()}
    for name, each in found.items():
        code = getattr(inspect.unwrap(each) if callable(each) else each, "__code__", None)
        if code is not None and "gradient_accumulation_steps" in code.co_names:
            return str(name)
    return ""


def averages_over_tokens(trainer: Trainer) -> bool:
    """Whether the loss of a step is divided by the number of its tokens.

    The Trainer gives the number to ``compute_loss``, and this to ``compute_loss_func`` or to the model. One of them
    that never reads it, as in many scripts, gives the mean of each micro-batch, and synchronous ranks average these as
    they are.
    """
    own = inspect.unwrap(trainer.compute_loss)
    if getattr(own, "__func__", own) is not Trainer.compute_loss:
        return _reads_tokens(own)
    if trainer.compute_loss_func is None and trainer.label_smoother is None:
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if hasattr(model, "get_base_model"):  # of PEFT
            model = model.get_base_model()
        return _reads_tokens(inspect.unwrap(type(model).forward))
    return trainer.compute_loss_func is None or _reads_tokens(inspect.unwrap(trainer.compute_loss_func))


def is_divided_by_micro_batches(trainer: Trainer, tokens: object) -> bool:
    """Whether the Trainer divides the loss of each micro-batch by their number in the step."""
    is_whole = getattr(trainer, "loss_is_scaled_for_ga", None)  # what the script says, in newer versions
    if is_whole is not None:
        return not is_whole
    return not (trainer.model_accepts_loss_kwargs and tokens is not None or trainer.compute_loss_func is not None)


def _reads_tokens(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    rest = (name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD)
    name = _TOKENS if _TOKENS in parameters else next(rest, None)
    if name is None:
        return False
    code = getattr(function, "__code__", None)
    if code is None:
        return True  # nobody can tell
    read = (each.argval for each in dis.get_instructions(code) if not each.opname.startswith(("STORE", "DELETE")))
    return any(name == value or isinstance(value, tuple) and name in value for value in read)


class AccumulationSteps(int):
    """``args.gradient_accumulation_steps`` where the number of micro-batches differs from step to step.

    The value is their average. The Trainer's loop takes the position in the epoch modulo this value, and begins and
    ends a step where the result is 0: so does this one, at the bounds of each step. A copy is a plain int.
    """

    _first: int | None = None  # position of the step's first micro-batch; None until the loop says it
    _number = 0

    def begin_step(self, number: int) -> None:
        """Begins a step of this number of micro-batches, at least 1."""
        self._first, self._number = None, number

    def __rmod__(self, position: int) -> int:
        if not self._number:
            return position % int(self)
        if self._first is None:
            self._first = position - 1  # the loop asks first whether the step ends with its first micro-batch
        return (position - self._first) % self._number

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class Accumulation:
    """Makes a ``Trainer``'s steps be of ``worker.micro_batches``, until :meth:`end`.

    Where the server can deal the batches, an epoch is a pass of all workers together. Otherwise it is a pass over the
    worker's own part, however many steps that takes: its last step is of the micro-batches that are left, and a run
    that goes on begins where the worker was in its part.

    Attributes:
        stands_in: whether the batch that was drawn last stands in for empty ones, and is to have no weight.

    Raises:
        ConfigurationError: this version of transformers has another loop.
    """

    def __init__(self, trainer: Trainer, worker: HybridWorker) -> None:
        if not follows_shares(trainer):
            raise ConfigurationError(
                f"{option('shares')} is auto, and this version of transformers has no Trainer._run_epoch: install a "
                "newer one"
            )
        self._trainer, self._worker, self.stands_in = trainer, worker, False
        self._dealt: DealtBatches | None = None
        self._further = 0  # epochs that this worker is ahead of the run's mean, as it goes on
        self._left = 0  # micro-batches until the loop ends a step by itself, where it takes an epoch to end
        self._steps = AccumulationSteps(trainer.args.gradient_accumulation_steps)
        trainer.args.gradient_accumulation_steps = self._steps
        run_epoch = partial(self._run_epoch, trainer._run_epoch)
        setattr(trainer, "_run_epoch", run_epoch)  # noqa: B010 - mypy assigns to no method

    @property
    def epoch_is_over(self) -> bool:
        """Whether the worker's next gradient is of another epoch; False where the loop sees by itself when one ends."""
        return self._dealt is not None and self._dealt.pass_is_over

    def draw(self, draw: Callable[..., tuple[list[Any], Any]], batches: Iterator[Any], device: torch.device) -> Any:
        """Returns what the Trainer's ``get_batch_samples`` does for the micro-batches of the worker's next gradient."""
        if self._dealt is not None:
            dealt, self.stands_in = self._dealt.draw()
            drawn, tokens = draw(iter(dealt), len(dealt), device)
        else:
            number = self._worker.micro_batches
            drawn, tokens = draw(batches, min(number, self._left) if self._left > 0 else number, device)
            self._left -= len(drawn)
            self._worker.micro_batches = len(drawn) or number
        if drawn:
            self._steps.begin_step(len(drawn))
        return drawn, tokens

    def _run_epoch(self, run_epoch: Callable[..., None], **given: Any) -> None:
        """Stands for the ``Trainer``'s ``_run_epoch``, which would end the epoch after as many steps as it has of the
        average, and would draw from the worker's own part."""
        goes_on = given["resume_from_checkpoint"] is not None and given["epoch"] == given["epochs_trained"]
        loader, batches = given["train_dataloader"], given["steps_in_epoch"]
        if self._dealt is None and can_be_dealt(loader, self._worker.client.workers):
            self._dealt = DealtBatches(loader, self._worker, int(self._steps))
        if self._dealt is not None:
            epoch, endless = self._dealt.begin_pass(), dict.fromkeys(_LENGTHS, sys.maxsize)
            place = {"epoch": epoch, "epochs_trained": epoch if goes_on else -1, "steps_trained_in_current_epoch": 0}
            return run_epoch(**given | place | endless | {"train_dataloader": ()})  # the batches come by draw
        if goes_on and not self._trainer.args.ignore_data_skip:
            passes, given["steps_trained_in_current_epoch"] = divmod(self._worker.drawn or 0, batches)
            self._further = passes - given["epochs_trained"]
            self._left = batches - given["steps_trained_in_current_epoch"]
        else:
            self._left = batches
        given["epoch"] += self._further
        given["epochs_trained"] += self._further
        run_epoch(**given | {"num_update_steps_per_epoch": batches})  # more than there are: nothing is left then

    def end(self) -> None:
        """Gives the ``Trainer`` its own number and method back."""
        self._trainer.args.gradient_accumulation_steps = int(self._steps)
        vars(self._trainer).pop("_run_epoch")
