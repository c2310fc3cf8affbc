"""Hugging Face's ``Trainer`` and accelerate as workers of an asynchronous run.

Both call ``deepspeed.initialize`` themselves, after they have initialised torch.distributed. :func:`attach` gives the
worker its own world before that, and puts this package's ``initialize`` in the place of DeepSpeed's. Without
the section ``"async_training"`` in its configuration the same script trains synchronously, and a line says so.
"""

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import deepspeed
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSchedulerWrapper, DistributedType
from deepspeed.runtime.config import DeepSpeedConfig
from torch.optim import Optimizer
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from fairseq_async.deepspeed_plugin import config as configuration
from fairseq_async.deepspeed_plugin.compat import check_not_started
from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.deepspeed_plugin.initialize import initialize
from fairseq_async.errors import AsyncError, fail, spell_options
from fairseq_async.options.config import HybridOptions, LocalSGDOptions, divides_by_default
from fairseq_async.pytorch.trainer.accumulation import check_counting, follows_shares
from fairseq_async.pytorch.trainer.divided import Division, Place
from fairseq_async.pytorch.trainer.follow_run import FollowRun, Plan, Worker, wrap
from fairseq_async.server.optimizers.learning_rates import present_rates
from fairseq_async.worker.start.process import errors_in_one_line
from fairseq_async.worker.start.server_process import say
from fairseq_async.worker.start.world import enter_world, entered_world

Config: TypeAlias = dict[str, Any]

_SECTION = configuration.SECTION
_OPTIMIZER = '{"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}'
_deepspeed_initialize = deepspeed.initialize
_PARAMETERS = inspect.signature(deepspeed.initialize)


def attach() -> None:
    """Makes ``transformers.Trainer`` and ``accelerate.Accelerator`` train asynchronously in this process.

    To be called before ``TrainingArguments``, ``DeepSpeedPlugin`` or ``Accelerator`` is made. If the DeepSpeed
    configuration has our section, this changes:

    - Every worker is a distributed world of its own.
    - A ``Trainer``'s training data is divided among the workers; other loaders are as the script makes them.
    - Worker 0 alone validates, saves and logs. It does so with the server's parameters.
    - ``total_steps`` of the section, if it is ``"auto"`` or not there, is the Trainer's number of steps.

    Training without DeepSpeed, or by a ``deepspeed.initialize`` that was imported before, ends with one line.
    """
    if deepspeed.initialize is _initialize:
        return
    deepspeed.initialize = _initialize
    wrap(TrainingArguments, "__post_init__", _make_arguments)
    wrap(DeepSpeedPlugin, "__post_init__", _make_plugin)
    wrap(DeepSpeedConfig, "__init__", _check_configuration)
    wrap(Accelerator, "prepare", _prepare)
    wrap(HfTrainerDeepSpeedConfig, "trainer_config_finalize", _complete_configuration)
    wrap(Trainer, "set_initial_training_values", _plan_training)
    wrap(Trainer, "_load_best_model", _load_best_model)
    _divisions.append(Division(_place))
    own_index: Callable[[TrainingArguments], int] = vars(TrainingArguments)["process_index"].fget
    ranked = property(lambda arguments: _process_index(own_index(arguments)))
    setattr(TrainingArguments, "process_index", ranked)  # noqa: B010 - mypy assigns to no method


def _make_arguments(original: Callable[[TrainingArguments], None], arguments: TrainingArguments) -> None:
    _enter_world(arguments.deepspeed or _launched_with())  # before the Trainer initialises torch.distributed
    original(arguments)


def _make_plugin(original: Callable[[DeepSpeedPlugin], None], plugin: DeepSpeedPlugin) -> None:
    """Refuses a plugin of fields or flags alone, such as ``zero_stage``: nothing of ours can be in it."""
    if plugin.hf_ds_config is None and "ACCELERATE_DEEPSPEED_CONFIG_FILE" not in os.environ:
        fail(
            "attach was called, but accelerate has no DeepSpeed configuration file, and no flag can give the section "
            f'"{_SECTION}": give accelerate launch --deepspeed_config_file FILE, "deepspeed_config_file" in its '
            "configuration file, or DeepSpeedPlugin(hf_ds_config=FILE)"
        )
    original(plugin)
    _enter_world(plugin.deepspeed_config)  # before accelerate does
    section = plugin.deepspeed_config.get(_SECTION)
    if isinstance(section, dict):  # accelerate takes every "auto" for one that it is to fill in
        for key in [key for key, value in section.items() if value == "auto" and key != "total_steps"]:
            _automatic[key] = section.pop(key)


def _launched_with() -> str | None:
    """Returns the name of the DeepSpeed configuration that was given to ``accelerate launch``."""
    uses = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    return os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") if uses else None


def _prepare(original: Callable[..., Any], accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Refuses an optimizer that would step without DeepSpeed: nothing of ours would be in that training."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED and any(isinstance(each, Optimizer) for each in args):
        fail(
            "attach was called, but this training is without DeepSpeed: give TrainingArguments(deepspeed=FILE), "
            "DeepSpeedPlugin(hf_ds_config=FILE) or accelerate launch --use_deepspeed --deepspeed_config_file FILE, and "
            "leave out use_cpu=True or --cpu, which switch DeepSpeed off"
        )
    prepared = original(accelerator, *args, **kwargs)
    if not (_engines and isinstance(prepared, tuple)):
        return prepared
    return tuple(UsedRates(each) if isinstance(each, DeepSpeedSchedulerWrapper) else each for each in prepared)


def _check_configuration(original: Callable[..., None], made: DeepSpeedConfig, *args: Any, **kwargs: Any) -> None:
    """Refuses our section where DeepSpeed reads it: it would ignore the section, and train synchronously."""
    original(made, *args, **kwargs)
    if _SECTION in made._param_dict:
        fail(f'"{_SECTION}": deepspeed.initialize was imported before attach was called: call attach before the import')


def _enter_world(given: str | Config | None) -> None:
    """Makes this process one rank of a worker, if the configuration has our section."""
    config = _read(given)
    if _SECTION not in config:
        return
    section = config[_SECTION]
    if isinstance(section, dict) and section.get("total_steps") == "auto":
        section = {key: value for key, value in section.items() if key != "total_steps"}  # the Trainer says it later
    spell_options(configuration.as_key)
    try:
        _, ours, options = configuration.split(
            config | {_SECTION: section}, given if isinstance(given, str) else "config"
        )
        if isinstance(options, LocalSGDOptions | HybridOptions):
            if entered_world() is None:
                check_not_started()
            enter_world(ours.island_size)
    except AsyncError as error:
        fail(error)


def _read(given: str | os.PathLike[str] | Config | None) -> Config:
    """Returns a configuration, given as the Trainer takes it: as a file's name, as JSON, or as a dictionary.

    If it cannot be read, the result is {}: the Trainer or DeepSpeed will say so.
    """
    if isinstance(given, str | os.PathLike):
        given = os.fspath(given)
        try:
            given = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
    return given if isinstance(given, dict) else {}


def _complete_configuration(
    original: Callable[..., None], config: HfTrainerDeepSpeedConfig, args: TrainingArguments, model: object, steps: int
) -> None:
    """Sets ``total_steps`` of our section to the number of steps of the plan, which is its own if it has one."""
    if entered_world() is not None and not {"optimizer", "scheduler"} & config.config.keys():
        # the Trainer would keep its schedule for itself, and step it by this worker's own steps
        name = args.deepspeed if isinstance(args.deepspeed, str) else _launched_with() or "config"
        fail(f'{name}: the Trainer keeps its learning-rate schedule from the run: add "optimizer": {_OPTIMIZER}')
    if entered_world() is not None:
        config.config[_SECTION]["total_steps"] = steps
    original(config, args, model, steps)


def _initialize(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Stands for ``deepspeed.initialize``: makes an engine of ours if the configuration has our section."""
    given = _PARAMETERS.bind(*args, **kwargs).arguments
    names = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    config = _read(next((name for name in names if name is not None), None))
    if _SECTION not in config:
        if os.environ.get("RANK", "0") == "0":
            say(f'attach was called, but the DeepSpeed configuration has no "{_SECTION}": this training is synchronous')
        made: tuple[Any, ...] = _deepspeed_initialize(*args, **kwargs)
        return made
    if _engines:
        fail(
            "one process trains in one asynchronous run; start another process for another, and give the batch size "
            "itself in place of auto_find_batch_size"
        )
    if {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} <= config.keys():
        # accelerate has filled in the third, too, of a world that is one worker
        config = {key: value for key, value in config.items() if key != "train_batch_size"}
    config = config | {_SECTION: config[_SECTION] | _automatic}
    engine, optimizer, loader, schedule = initialize(**given | {"config": config, "config_params": None})
    if not isinstance(engine, AsyncEngine):
        return engine, optimizer, loader, schedule
    _engines.append(engine)
    engine.async_worker.details.by_script = _divisions[0].by_script
    return engine, optimizer, loader, schedule  # for None, accelerate steps the scheduler that the script has made


def _place(trainer: Trainer | None) -> Place | None:
    """Returns this rank's place among those of all workers."""
    context = entered_world()
    return None if context is None else (context.ranks, context.global_rank)


def _plan_training(original: Callable[..., Plan], trainer: Trainer, *args: object) -> Plan:
    """Makes a Trainer of an asynchronous run follow it; returns its plan for as many steps as the run has."""
    context = entered_world()
    if context is None:
        return original(trainer, *args)
    section = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config[_SECTION]
    number = trainer.args.gradient_accumulation_steps
    can_divide = section.get("method") == "hybrid_async" and follows_shares(trainer)
    if can_divide and divides_by_default(section | _automatic, number, context.workers):
        _automatic["shares"] = "auto"
    if _automatic.get("shares") == "auto":
        with errors_in_one_line():
            check_counting(trainer)
    steps = section.get("total_steps", "auto")
    flow = FollowEngine(trainer, _worker_side, _take_parameters, lambda: None)
    return flow.plan(original(trainer, *args), args[1], 0 if steps == "auto" else steps, context.workers, False)


class FollowEngine(FollowRun):
    """Makes a ``Trainer`` follow the run of its engine."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Joins the run; a Trainer that goes on from a checkpoint has joined it when that was loaded."""
        _engines[0].join_run()
        self.begin(0)
        super().on_train_begin(args, state, control, **kwargs)
        kwargs["lr_scheduler"].step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends this worker's part; the model has the server's parameters, or those of the best checkpoint."""
        super().on_train_end(args, state, control, **kwargs)
        _end()


class UsedRates(DeepSpeedSchedulerWrapper):
    """An engine's schedule as a ``Trainer`` and accelerate see it: between the engine's step and one of the schedule,
    which is when the ``Trainer`` asks, the rates are those of the step; the engine has set the next ones already."""

    def __init__(self, wrapped: DeepSpeedSchedulerWrapper) -> None:
        super().__init__(wrapped.scheduler, wrapped.optimizers)
        self.step()

    def step(self) -> None:
        """Takes the rates for the next step."""
        self._rates = present_rates(_engines[0].optimizer)

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of each parameter group."""
        return self._rates


def _worker_side() -> Worker | None:
    return _engines[0].async_worker if _engines else None


def _take_parameters(control: TrainerControl) -> None:
    """Stops at the end, and gives worker 0 the server's parameters where it evaluates or saves."""
    engine = _engines[0]
    if engine.worker > 0:
        control.should_evaluate = control.should_save = False
    if control.should_training_stop or control.should_evaluate or control.should_save:
        engine.pull()


def _end() -> None:
    """Ends this worker's part; worker 0, whose Trainer may have stopped early, ends the run for all."""
    for engine in _engines:
        engine.end(for_all=engine.worker == 0)


def _load_best_model(original: Callable[[Trainer], None], trainer: Trainer) -> None:
    _end()  # the next exchange would replace the parameters
    original(trainer)


def _process_index(own: int) -> int:
    """Returns this process's rank among those of all workers: the Trainer saves and logs where it is 0."""
    context = entered_world()
    return own if context is None else context.global_rank


_automatic: Config = {}  # what our section has as "auto", beside total_steps, hidden from accelerate
_engines: list[AsyncEngine] = []  # of this process: one at most
_divisions: list[Division] = []  # likewise
