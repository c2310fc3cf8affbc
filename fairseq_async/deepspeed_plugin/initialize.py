"""``initialize``: does what ``deepspeed.initialize`` does, for an asynchronous run or a synchronous method."""

import atexit
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils.data import Dataset

from fairseq_async.deepspeed_plugin import checks, server_description
from fairseq_async.deepspeed_plugin import config as configuration
from fairseq_async.deepspeed_plugin.arguments import Arguments, Config, MethodEngine
from fairseq_async.deepspeed_plugin.compat import (
    DeepSpeedOptimizer,
    check_attributes,
    check_not_started,
    copied_groups,
    listed,
    unlink_reduction_buffer,
)
from fairseq_async.deepspeed_plugin.compilation import waiting_for_compilers
from fairseq_async.deepspeed_plugin.data import Collate, ShardedLoader, fix_batch_size, length_of, sizes_of_shards
from fairseq_async.deepspeed_plugin.engines.adascale import AdaScaleEngine
from fairseq_async.deepspeed_plugin.engines.adasum import AdasumEngine, SingleRankGroups
from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.deepspeed_plugin.engines.hybrid import HybridEngine
from fairseq_async.deepspeed_plugin.engines.local_sgd import LocalEngine
from fairseq_async.deepspeed_plugin.engines.loss_scale import LossScale
from fairseq_async.deepspeed_plugin.engines.synchronous import GroupPosition, set_environment_without_launcher
from fairseq_async.deepspeed_plugin.engines.tensors import replica_of, trainable
from fairseq_async.deepspeed_plugin.exit import leave_at_exit
from fairseq_async.deepspeed_plugin.schedules import Schedule
from fairseq_async.errors import AsyncError, ConfigurationError, fail, spell_options
from fairseq_async.method.global_server import local_sgd_server
from fairseq_async.method.option_checks import check_ranks
from fairseq_async.method.spec import JsonObject, MethodSpec, hybrid_spec, local_sgd_spec
from fairseq_async.options.config import AdaScaleOptions, AdasumOptions, HybridOptions, LocalSGDOptions, Section
from fairseq_async.pytorch.copies import Copies, MovingReplica
from fairseq_async.pytorch.parameters import note_untrained
from fairseq_async.worker.buffers import with_buffers
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.overlap import local_sgd_worker
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.process import check_guard
from fairseq_async.worker.start.server_process import ServerProcess
from fairseq_async.worker.start.world import connect_rank, entered_world, start_world

_HYBRID_SERVER = "fairseq_async.deepspeed_plugin.server"  # with torch's optimizers and DeepSpeed's schedules

_made: list[AsyncEngine] = []  # of this process

AsyncOptions: TypeAlias = LocalSGDOptions | HybridOptions
Initialized: TypeAlias = tuple[MethodEngine, DeepSpeedOptimizer, ShardedLoader | None, Schedule | None]
_Engine = TypeVar("_Engine", bound=MethodEngine)


def initialize(
    args: object = None,
    model: nn.Module | None = None,
    optimizer: object = None,
    model_parameters: object = None,
    training_data: Dataset[object] | None = None,
    lr_scheduler: object = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Collate | None = None,
    config: str | Config | None = None,
    mesh_param: object = None,
    config_params: str | Config | None = None,
) -> Initialized:
    """``deepspeed.initialize`` for a worker of an asynchronous run; takes what that does, in its order, and returns
    what it does.

    The method is the section ``"async_training"`` of the DeepSpeed configuration. The engine trains as DeepSpeed's,
    alone or with the other ranks of its island, and exchanges with the server inside ``engine.step()``. The loader, if
    ``training_data`` is given, draws from the shards that the server chooses, until the run is over, or for one pass
    over the data where the run has no ``total_steps``; a scheduler follows the progress of the whole run. Besides, the
    engine has ``finished``, ``progress``, ``worker``, ``workers``, ``pull()`` and ``end()``, see
    :class:`~fairseq_async.deepspeed_plugin.engines.engine.AsyncEngine`. ``config_params`` is DeepSpeed's older name of
    ``config``.

    The synchronous methods, ``adasum`` and ``adascale``, have no server: the ranks train as one group, by
    :class:`~fairseq_async.deepspeed_plugin.engines.synchronous.SynchronousEngine`.

    A mistake in the configuration ends the process with one line.

    Example::

        engine, _, loader, _ = initialize(args=args, model=model, training_data=data)
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
    """
    others = {
        "optimizer": optimizer,
        "model_parameters": listed(model_parameters),
        "lr_scheduler": lr_scheduler,
        "distributed_port": distributed_port,
        "mpu": mpu,
        "dist_init_required": dist_init_required,
        "mesh_param": mesh_param,
    }
    spell_options(configuration.as_key)
    try:
        given, name = configuration.read(args, config if config is not None else config_params)
        return _initialize(Arguments(args, model, training_data, collate_fn, others, name), given)
    except AsyncError as error:
        fail(error)


def _initialize(arguments: Arguments, config: Config) -> Initialized:
    check_guard()
    plain, section, options = configuration.split(config, arguments.name)
    configuration.check(plain, options, section, arguments.name)
    arguments.check(plain, in_the_server=isinstance(options, HybridOptions))
    if isinstance(options, AdasumOptions | AdaScaleOptions):
        configuration.check_group(section, options.method, arguments.name)
        return _initialize_synchronous(arguments, options, plain)
    return _initialize_asynchronous(arguments, options, section, plain)


def _initialize_synchronous(
    arguments: Arguments, options: AdasumOptions | AdaScaleOptions, config: Config
) -> Initialized:
    """Makes an engine of a synchronous method: all ranks that were started are one data-parallel group."""
    set_environment_without_launcher()
    _init_distributed()
    engine: AdasumEngine | AdaScaleEngine
    if isinstance(options, AdasumOptions):
        if dist.get_world_size() == 1:
            raise ConfigurationError("adasum combines the gradients of several ranks, and this run has one")
        if arguments.others["mpu"] is not None:
            raise ConfigurationError("mpu= is not supported with method adasum, whose ranks have the whole model each")
        config = checks.worker_batch(config, dist.get_world_size(), 1, arguments.name)
        made, optimizer, schedule = arguments.make_engine(config, mpu=SingleRankGroups())
        engine = _change_class(made, AdasumEngine)
        engine.set_up(options)
    else:
        config = checks.worker_batch(config, dist.get_world_size(), dist.get_world_size(), arguments.name)
        made, optimizer, schedule = arguments.make_engine(config)
        engine = _change_class(made, AdaScaleEngine)
        engine.set_up(options)
    data, position = arguments.training_data, GroupPosition(engine)
    sizes = [] if data is None else [length_of(data)]
    ranks = dist.get_rank(), dist.get_world_size()
    return engine, optimizer, arguments.make_loader(engine, sizes, options, ranks, lambda: position, config), schedule


def _initialize_asynchronous(
    arguments: Arguments, options: AsyncOptions, section: Section, config: Config
) -> Initialized:
    """Makes an engine that is a worker, or one rank of it; starts the server if this process is to start it."""
    data, shards = arguments.training_data, options.shards if isinstance(options, LocalSGDOptions) else 0
    if _made:
        raise ConfigurationError(
            "initialize was called before in this process, and a process trains one engine in an asynchronous run: "
            "train several models together with fairseq_async.torch, or give each a process of its own"
        )
    context = entered_world()
    if context is None:
        check_not_started()
        context = WorkerContext.find(section.island_size)
    check_ranks(options, context.island_size, arguments.name)
    if not context.joins:  # a mistake is to show before anything starts
        sizes = sizes_of_shards(data, shards, context.workers, arguments.name)
        own = checks.worker_batch(config, context.ranks, context.island_size, arguments.name)
        _describe(_accumulating(options, own, context), section, context, sizes, {})
    module = local_sgd_server(options.upstream) if isinstance(options, LocalSGDOptions) else _HYBRID_SERVER
    device = get_accelerator().current_device_name()
    if context.joins and context.island_size > 1:
        _init_distributed()  # through which the other ranks learn their worker's number
    context, client, server = connect_rank(context, module, section, Path(section.run_dir), device)
    try:
        return _make_worker_engine(arguments, options, section, config, context, client, server)
    except BaseException:
        client.leave(finished=False)
        if server is not None:
            server.discard()  # nobody has brought it parameters yet
        raise


def _make_worker_engine(
    arguments: Arguments,
    options: AsyncOptions,
    section: Section,
    config: Config,
    context: WorkerContext,
    client: ServerConnection,
    server: ServerProcess | None,
) -> Initialized:
    """Makes the engine of a worker that is connected to its server."""
    shards = options.shards if isinstance(options, LocalSGDOptions) else 0
    sizes = sizes_of_shards(arguments.training_data, shards, context.workers, arguments.name)
    if entered_world() is None:
        start_world(context)
    _init_distributed()
    own = configuration.own_monitor(config, context.worker)
    own = checks.worker_batch(own, context.ranks, context.island_size, arguments.name)
    options = _accumulating(options, own, context)
    engine: AsyncEngine
    if isinstance(options, HybridOptions):
        groups = copied_groups(arguments.others["model_parameters"])  # of which DeepSpeed changes the given ones
        made = arguments.make_engine(server_description.without_masters(server_description.without_schedule(own)))
        kind, served = server_description.half_precision(own), server_description.served_optimizer(made[0], own, groups)
        inner = server_description.leave_to_server(made[0], served, own, options.total_steps)
        engine = _change_class(made[0], HybridEngine)
        engine.serve(served, context.rank)
        engine.half_precision, engine.loss_scaler = kind, LossScale(own["fp16"] if kind is torch.float16 else None)
    else:
        made, inner = arguments.make_engine(own), {}
        engine = _change_class(made[0], LocalEngine)
    async_worker = _make_worker(client, engine, options, context)
    note_untrained(async_worker, engine.module, {id(each) for _, each in trainable(engine)})
    description = _describe(options, section, context, sizes, inner)
    engine.set_up(async_worker, description, context, Path(section.run_dir))
    if description.micro_batches:
        fix_batch_size(engine)
    atexit.register(leave_at_exit, client, engine, server)
    _made.append(engine)
    loader = arguments.make_loader(engine, sizes, options, (context.rank, context.island_size), engine.join_run, own)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _accumulating(options: AsyncOptions, config: Config, context: WorkerContext) -> AsyncOptions:
    """Returns the options with the number of micro-batches that a worker accumulates, where the server divides them."""
    if isinstance(options, HybridOptions) and options.shares == "auto":
        return options.model_copy(update={"micro_batches": checks.micro_batches(config, context.island_size)})
    return options


def _init_distributed() -> None:
    """Starts torch.distributed in this rank's world. On CPUs, DeepSpeed compiles an operator for it."""
    with waiting_for_compilers():
        deepspeed.init_distributed()
    unlink_reduction_buffer()


def _change_class(engine: DeepSpeedEngine, engine_class: type[_Engine]) -> _Engine:
    """Makes an engine of DeepSpeed's an instance of one of our engine classes, and returns the same object.

    Raises:
        ConfigurationError: this version of DeepSpeed lacks what they build on.
    """
    # Reason: deepspeed.initialize builds its engine class itself and takes no other, and calling the constructor in
    # its place would copy what it does besides. A wrapper round the engine would not be the DeepSpeedEngine that
    # DeepSpeed's and users' functions expect, and could not override _take_model_step, which the engine calls.
    # Hazards: the new class's __init__ never runs, so set_up must set every attribute, before anything else is called.
    # The engine must be of class DeepSpeedEngine itself: methods of PipelineEngine or DeepSpeedHybridEngine would be
    # lost (configuration.check refuses their keys). Methods that DeepSpeed's constructor has bound, for hooks, stay
    # those of DeepSpeedEngine: do not override one of them.
    check_attributes(engine)
    engine.__class__ = engine_class
    return cast(_Engine, engine)


def _describe(
    options: AsyncOptions, section: Section, context: WorkerContext, sizes: list[int], inner: JsonObject
) -> MethodSpec:
    """Returns the method's description, from which the server builds it and on which all workers must agree; ``inner``
    is that of the optimizer of a hybrid run."""
    if isinstance(options, LocalSGDOptions):
        return local_sgd_spec(options, context.workers, sizes, section, inner)
    return hybrid_spec(options, context.workers, section, inner, options.total_steps)


def _make_worker(
    client: ServerConnection, engine: DeepSpeedEngine, options: AsyncOptions, context: WorkerContext
) -> LocalSGDWorker | HybridWorker:
    """Makes the worker side of the method, which has not joined the run yet."""
    if isinstance(options, LocalSGDOptions):
        replica = with_buffers(replica_of(engine, context.rank), engine.module, options, context.rank == 0)
        copies = Copies([engine.basic_optimizer], context.island_size, engine.device)
        engine.basic_optimizer.register_step_post_hook(lambda *_: copies.note())  # while it has gradients
        return local_sgd_worker(client, MovingReplica(replica, copies), options)
    divided = cast(HybridEngine, engine).divided  # then a parameter without a gradient has a partition of zeros
    return HybridWorker(client, trainable(engine), divided is not None, context.rank == 0, divided)
