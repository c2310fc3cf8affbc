"""A callback that makes the ``Trainer`` of transformers a worker of an asynchronous run, without DeepSpeed."""
# ruff: noqa: E402 - transformers is imported after a broken torchaudio is hidden from it

from fairseq_async.pytorch.trainer.torchaudio import hide_broken_torchaudio

hide_broken_torchaudio()

import os
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from fairseq_async.errors import ConfigurationError
from fairseq_async.options.config import HybridOptions, LocalSGDOptions, divides_by_default
from fairseq_async.pytorch.hybrid import HybridAsync
from fairseq_async.pytorch.local_sgd import AsyncLocalSGD
from fairseq_async.pytorch.options import parse_options
from fairseq_async.pytorch.trainer.accumulation import check_counting, follows_shares
from fairseq_async.pytorch.trainer.divided import Division, Place
from fairseq_async.pytorch.trainer.follow_run import FollowRun, Plan, RunSchedule, take_back, wrap
from fairseq_async.pytorch.training import AsyncTraining
from fairseq_async.worker.batches import note_calls
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.process import errors_in_one_line

STATE = "async_server.pt"  # in the directory of a checkpoint


class AsyncCallback(TrainerCallback):
    """Makes a ``Trainer`` one worker of an asynchronous run; the ``Trainer`` believes that it trains alone.

    Start the script with ``fairseq-async launch``. The Trainer divides the training data among the workers, as under
    torchrun. A script that reads ``callback.workers`` divides it itself:
    ``dataset.shard(callback.workers, callback.worker)``. The run ends for all workers together, after as many mean
    local steps of a worker, or steps of the server, as worker 0's Trainer counts: a fast worker takes more steps than
    that, a slow one fewer. The Trainer's steps, epochs and learning rates are those of the run.

    Worker 0 evaluates and saves, both with the server's parameters; the other workers do neither. A checkpoint has the
    server's whole state, with which a resumed run goes on. A Trainer that goes on from a checkpoint without it is an
    error: the server would begin anew.

    Example::

        callback = AsyncCallback("local_sgd", outer="diloco", local_steps=50)
        Trainer(model, arguments, train_dataset=load_dataset(...), callbacks=[callback]).train()

    Args:
        method: ``local_sgd`` or ``hybrid_async``.
        resume_from_checkpoint: what ``train`` is given under this name, which the Trainer does not tell its callbacks.
            Needed where the checkpoint is not in ``output_dir``.
        options: of :class:`~fairseq_async.torch.AsyncLocalSGD` or :class:`~fairseq_async.torch.HybridAsync`.
            ``total_steps`` takes the place of the Trainer's own number of steps, also in its schedule. With
            ``shares="auto"`` the server divides the ``gradient_accumulation_steps`` of all workers by their speeds;
            this is the default without ``barrier`` and ``updates_per_step``. ``clip_norm`` of ``hybrid_async`` is the
            Trainer's ``max_grad_norm``, unless it is given: then that clips each worker's own gradient before.
    """

    @errors_in_one_line()
    def __init__(
        self,
        method: str = "local_sgd",
        *,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        **options: Any,
    ) -> None:
        if method not in ("local_sgd", "hybrid_async"):
            raise ConfigurationError(f"AsyncCallback: method is {method!r}: give local_sgd or hybrid_async")
        if "RANK" in os.environ:
            raise ConfigurationError(
                "AsyncCallback: under torchrun the Trainer is synchronous; start the script with fairseq-async launch"
            )
        if "micro_batches" in options:
            raise ConfigurationError(
                "AsyncCallback: micro_batches is what the Trainer has as gradient_accumulation_steps: give that to "
                "TrainingArguments, and leave micro_batches out"
            )
        known: Any = LocalSGDOptions if method == "local_sgd" else HybridOptions
        later = () if method == "local_sgd" else ("clip_norm", "shares")  # which need the Trainer's, or its optimizer
        of_method = {key: value for key, value in options.items() if key not in later}
        parse_options(known, of_method, "AsyncCallback")  # a mistake is to show before the Trainer makes its own
        self.method, self.options = method, options
        self._resumed_from = None if isinstance(resume_from_checkpoint, bool) else resume_from_checkpoint
        self._context = WorkerContext.find()
        self._training: AsyncTraining | None = None
        self._trainer: Trainer | None = None
        self._flow: FollowRun | None = None
        self._divides = False  # the script, by the number of workers
        _callbacks.append(self)
        if not hasattr(Trainer.set_initial_training_values, "__wrapped__"):
            wrap(Trainer, "set_initial_training_values", _plan_training)
            _divisions.append(Division(_place))

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self._context.worker if self._training is None else self._training.worker

    @property
    def workers(self) -> int:
        """Number of workers that were announced; whoever reads it before training divides the data by it."""
        self._divides = True
        return self._context.workers if self._training is None else self._training.workers

    @property
    def training(self) -> AsyncTraining:
        """This worker's :class:`~fairseq_async.pytorch.training.AsyncTraining`, once training has begun."""
        assert self._training is not None, "training has not begun"
        return self._training

    # Events, in the Trainer's order

    @errors_in_one_line()
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Joins the run; if the Trainer goes on from a checkpoint, with the server's state in it."""
        trainer, flow = self._trainer, self._flow
        assert trainer is not None and flow is not None, "the Trainer has not planned its steps"
        if trainer.args.auto_find_batch_size and self._training is not None:  # it begins once more in the same process
            raise ConfigurationError(
                "auto_find_batch_size: there was not enough memory for the first batch size, and a process takes part "
                "in one run: give a smaller per_device_train_batch_size, and leave auto_find_batch_size out"
            )
        model: Any = trainer.model  # SetFit tells its callbacks another, and arguments of its own
        optimizer: Optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # of accelerate's wrapper
        scheduler: LRScheduler = getattr(kwargs["lr_scheduler"], "scheduler", kwargs["lr_scheduler"])
        resumed = bool(state.global_step)  # from a checkpoint; a run that is under way moves it too
        if resumed:
            take_back(scheduler)
        self._training = self._make(model, optimizer, scheduler, state.max_steps)
        self._training.of_trainer = True
        self._training.by_script = self._divides or _divisions[0].by_script
        if resumed:
            self._restore(self._training, Path(self._resumed_from or _checkpoint(args, state)) / STATE)
        self._training.__enter__()
        if trainer.model_wrapped is not model:  # compiled, so that no hook in it is called
            note_calls(trainer.model_wrapped, self._worker_side().batches)
        planned, told = state.max_steps, scheduler
        flow.begin(self._training.total_steps)
        if state.max_steps != planned and trainer._created_lr_scheduler:
            trainer.lr_scheduler = None
            scheduler = trainer.create_scheduler(num_training_steps=state.max_steps)
        schedule = RunSchedule(scheduler, optimizer, self._worker_side(), state.max_steps, resumed, told)
        trainer.lr_scheduler = schedule  # type: ignore[assignment]

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Adds the server's state to worker 0's checkpoint."""
        path = _checkpoint(args, state)
        if self.worker == 0 and path.is_dir():
            torch.save(self.training.state_dict(), path / STATE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves the run. The model has the server's last parameters, or the best ones, as the Trainer was asked.

        Where worker 0 has stopped before the end, as by ``EarlyStoppingCallback``, the run ends for all workers.
        """
        self.training.leave(for_all=self.worker == 0 and not self.training.finished)
        self.training.abandon()

    def follow(self, trainer: Trainer, plan: Plan, loader: object) -> Plan:
        """Makes a Trainer follow the run; returns its plan for as many steps as the run has."""
        _check_groups(trainer.args, 1 if self._divides else self._context.workers)
        self._trainer = trainer
        self._flow = FollowRun(trainer, self._worker_side, self._prepare, lambda: self.training.restore_parameters())
        return self._flow.plan(plan, loader, self.options.get("total_steps", 0), self._context.workers, self._divides)

    @property
    def place(self) -> Place | None:
        """This worker's place for the Trainer, which divides the data; None where the script does."""
        return None if self._divides else (self._context.workers, self._context.worker)

    def _make(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> AsyncTraining:
        if isinstance(optimizer, LayerWiseDummyOptimizer):
            raise ConfigurationError(
                "optim is one of the layerwise optimizers, which step within backward(), where the run does not see "
                "it: take the one without layerwise in its name, such as galore_adamw"
            )
        beside = self._modules_beside(model, optimizer)
        models = [model, *beside] if beside else model
        if self.method == "local_sgd":
            return AsyncLocalSGD(models, optimizer, **self.options | {"total_steps": steps})
        own = {"total_steps": steps} | self._shares()
        if not beside:  # else the Trainer clips the model alone, by its norm alone
            own |= self._clipping()
        return HybridAsync(models, optimizer, scheduler=scheduler, **self.options | own)

    def _modules_beside(self, model: nn.Module, optimizer: Optimizer) -> list[nn.Module]:
        """Returns what the Trainer holds beside its model and the optimizer trains too, such as the classifier in a
        loss of sentence-transformers, or a parameter of a loss by itself.

        Raises:
            ConfigurationError: the optimizer has a parameter that is in neither.
        """
        known = set(map(id, model.parameters()))
        others = {id(each) for group in optimizer.param_groups for each in group["params"]} - known
        if not others:
            return []
        held = [each for value in vars(self._trainer).values() for each in _values(value)]
        bare = [each for each in held if isinstance(each, nn.Parameter) and id(each) in others]
        modules = [each for each in held if isinstance(each, nn.Module) and each is not model]
        found = [each for each in modules if others & set(map(id, each.parameters()))]
        found += [nn.ParameterList(bare)] if bare else []
        if missing := others - {id(each) for module in found for each in module.parameters()}:
            raise ConfigurationError(
                f"the optimizer has {len(missing)} parameters that are neither the model's nor attributes of the "
                "Trainer, and the workers would not find them: make them one of these"
            )
        return found

    def _clipping(self) -> dict[str, object]:
        """Returns the option by which the server clips the mean gradient, as a synchronous Trainer does, and lets this
        worker's Trainer only measure its own; nothing where the script has given the server a norm. Where the script
        itself clips to another norm, as in its ``training_step``, that stays."""
        assert self._trainer is not None
        norm = float(self._trainer.args.max_grad_norm or 0.0)
        if "clip_norm" in self.options or norm <= 0:
            return {}
        accelerator: Any = self._trainer.accelerator
        clip = accelerator.clip_grad_norm_

        def measure(parameters: Any, max_norm: float, *others: Any, **named: Any) -> Any:
            return clip(parameters, inf if max_norm == norm else max_norm, *others, **named)

        accelerator.clip_grad_norm_ = measure
        return {"clip_norm": norm}

    def _shares(self) -> dict[str, object]:
        """Returns the options by which the server divides the micro-batches of a step, if it does.

        Raises:
            ConfigurationError: a step has one of each worker, which cannot be divided.
        """
        assert self._trainer is not None
        number = int(self._trainer.args.gradient_accumulation_steps)
        by_default = divides_by_default(self.options, number, self._context.workers)
        if not (self.options.get("shares") == "auto" or by_default and follows_shares(self._trainer)):
            return {}
        if number == 1:
            raise ConfigurationError(
                "AsyncCallback: shares is auto: give TrainingArguments gradient_accumulation_steps of at least 2 to be "
                "divided"
            )
        check_counting(self._trainer)
        return {"shares": "auto", "micro_batches": number}

    def _restore(self, training: AsyncTraining, path: Path) -> None:
        """Restores the server's state.

        Raises:
            ConfigurationError: it is not there, and this is worker 0, which is to bring it to the server.
        """
        if path.exists():
            training.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        elif self.worker == 0:
            raise ConfigurationError(
                f"AsyncCallback: {path}, the server's state, is not there: give resume_from_checkpoint= the directory "
                "that train() goes on from, or begin anew with from_pretrained() and without resuming"
            )

    def _prepare(self, control: TrainerControl) -> None:
        """Stops at the end, and gives worker 0 the server's parameters where it evaluates or saves.

        The last local steps are sent here: later the Trainer may load the best model, which is no step.
        """
        if control.should_training_stop:
            self.training.pull()
        if self.worker > 0:
            control.should_evaluate = control.should_save = control.should_log = False
        elif control.should_evaluate or control.should_save:
            self.training.take_server_parameters()

    def _worker_side(self) -> LocalSGDWorker | HybridWorker:
        assert isinstance(self.training, AsyncLocalSGD | HybridAsync)
        return self.training.async_worker


def _plan_training(original: Callable[..., Plan], trainer: Trainer, args: TrainingArguments, loader: object) -> Plan:
    plan = original(trainer, args, loader)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, AsyncCallback):
            return callback.follow(trainer, plan, loader)
    return plan


@errors_in_one_line()
def _check_groups(arguments: Any, workers: int) -> None:
    """Checks the arguments of a trainer of TRL that generates completions in groups, each of which is one worker's.

    Raises:
        ConfigurationError: they have counted another number of workers when they were made, by which the sampler
            repeats prompts: workers would have the same ones, and leave out others. Or a group would be divided.
    """
    if getattr(arguments, "generation_batch_size", None) is None:
        return
    own, kind = arguments.per_device_train_batch_size * arguments.steps_per_generation, type(arguments).__name__
    counted = arguments.generation_batch_size // own
    if arguments.generation_batch_size != own * workers:
        raise ConfigurationError(
            f"{kind} has counted {counted} processes, and the run has {workers} workers: make AsyncCallback before "
            f"{kind}, which asks for their number"
        )
    if own % arguments.num_generations:
        raise ConfigurationError(
            f"a worker generates {own} completions at a time, which are no whole groups of num_generations "
            f"{arguments.num_generations}: make per_device_train_batch_size times steps_per_generation a multiple of it"
        )


def _values(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else [value]


def _place(trainer: Trainer | None) -> Place | None:
    """Returns this worker's place; a ``Trainer`` without a callback of ours has none."""
    callbacks = _callbacks[-1:] if trainer is None else trainer.callback_handler.callbacks
    return next((each.place for each in callbacks if isinstance(each, AsyncCallback)), None)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


_callbacks: list[AsyncCallback] = []  # of this process
_divisions: list[Division] = []  # one, with the first callback
