"""``initialize``: what ``deepspeed.initialize`` does, and entering an asynchronous run."""

import atexit
import os
import sys
from collections.abc import Sized
from pathlib import Path
from typing import Any

import deepspeed

from fairseq_async.deepspeed_plugin import config as configuration
from fairseq_async.deepspeed_plugin.data import ShardedLoader
from fairseq_async.deepspeed_plugin.engine import HybridEngine, LocalEngine
from fairseq_async.deepspeed_plugin.island import IslandClient, become_a_world
from fairseq_async.deepspeed_plugin.leftovers import unlink_buffer
from fairseq_async.deepspeed_plugin.masters import replica_of
from fairseq_async.deepspeed_plugin.synchronous import initialize_group
from fairseq_async.errors import AsyncError, ConfigurationError, fail
from fairseq_async.server.process import ServerProcess
from fairseq_async.worker.config import AdaScaleOptions, AdasumOptions, HybridOptions, LocalSGDOptions, Section
from fairseq_async.worker.gradients import GradientWorker
from fairseq_async.worker.local_sgd import LocalSGD
from fairseq_async.worker.overlap import local_sgd
from fairseq_async.worker.place import SERVERS, Place
from fairseq_async.worker.shards import shard_sizes

Options = LocalSGDOptions | HybridOptions
_HYBRID_SERVER = "fairseq_async.deepspeed_plugin.server"  # with torch's optimizers and DeepSpeed's schedules
_GOODBYE = 60.0  # seconds for the other workers' last words to a server that is ours


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Any = None,
    config: str | dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` for a worker of an asynchronous run; takes and returns what that does.

    The method is the section ``"async_training"`` of the DeepSpeed configuration. The engine trains as DeepSpeed's,
    alone or with the other ranks of its island, and exchanges with the server inside ``engine.step()``. The loader, if
    ``training_data`` is given, is endless until the run is over, and draws from the shards that the server chooses;
    a scheduler follows the progress of the whole run. Besides, the engine has ``finished``, ``progress``, ``worker``
    and ``pull()``, see :class:`~fairseq_async.deepspeed_plugin.engine.AsyncEngine`.

    The synchronous methods, ``adasum`` and ``adascale``, have no server: the ranks train as one group, by
    :class:`~fairseq_async.deepspeed_plugin.group.GroupEngine`.

    A mistake in the configuration ends the process with one line.

    Example::

        engine, _, loader, _ = initialize(args=args, model=model, training_data=data)
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
    """
    theirs = {"optimizer": optimizer, "model_parameters": model_parameters, "lr_scheduler": lr_scheduler} | kwargs
    try:
        return _initialize(args, model, training_data, collate_fn, config, theirs)
    except AsyncError as error:
        fail(error)


def _initialize(
    args: Any, model: Any, data: Any, collate: Any, config: str | dict[str, Any] | None, theirs: dict[str, Any]
) -> tuple[Any, Any, Any, Any]:
    given, name = configuration.read(args, config)
    plain, section, options = configuration.split(given, name)
    configuration.check(plain, name)
    if isinstance(options, AdasumOptions | AdaScaleOptions):
        configuration.check_group(section, options.method, name)
        return initialize_group(options, args, model, data, collate, plain, theirs)
    hybrid = isinstance(options, HybridOptions)
    if hybrid:
        configuration.check_hybrid(plain, section, name)
    if getattr(options, "overlap", False) and section.island_size > 1:
        raise ConfigurationError(f'{name}: "overlap" is not supported with "island_size" above 1')
    place = Place.find(section.island_size)
    if not place.joins:  # a mistake is to show before anything starts
        _describe(options, plain, place, _shards(data, options, place, name))
    place, client, server = _connect(place, section, _HYBRID_SERVER if hybrid else SERVERS["local_sgd"])
    sizes = _shards(data, options, place, name)
    method = _describe(options, plain, place, sizes) | section.describe()
    become_a_world(place)
    own = configuration.own_monitor(plain, place.worker)
    if hybrid:
        own = {key: value for key, value in own.items() if key != "scheduler"}  # it is in the server
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=configuration.without_file(args), model=model, collate_fn=collate, config=own, **theirs
    )
    unlink_buffer()
    local = _half(client, engine, options, place)
    engine.__class__ = HybridEngine if hybrid else LocalEngine
    engine.enter(local, method, place)
    atexit.register(_leave, client, local, server)
    loader = None if data is None else _loader(engine, data, sizes, options, place, collate)
    return engine, optimizer, loader, scheduler


def _shards(data: Any, options: Options, place: Place, name: str) -> list[int]:
    """Samples in each: as many shards as workers, unless local SGD is to have another number."""
    wanted = options.shards if isinstance(options, LocalSGDOptions) else 0
    if data is None:
        if wanted:
            raise ConfigurationError(f'{name}: "shards" needs training_data=, of which the shards are parts')
        return []
    count = wanted or place.workers
    if _length(data) < count:
        raise ConfigurationError(f"training_data has {_length(data)} samples, too few for {count} shards")
    return shard_sizes(_length(data), count)


def _describe(options: Options, config: dict[str, Any], place: Place, sizes: list[int]) -> dict[str, Any]:
    if isinstance(options, LocalSGDOptions):
        return options.describe(place.workers, sizes)
    clip_norm = float(config.get("gradient_clipping", 0.0))
    inner = {"optimizer": config["optimizer"], "scheduler": config.get("scheduler"), "clip_norm": clip_norm}
    return options.describe(place.workers, inner)


def _half(client: Any, engine: Any, options: Options, place: Place) -> LocalSGD | GradientWorker:
    if isinstance(options, LocalSGDOptions):
        return local_sgd(client, replica_of(engine, place.rank), options)
    named = [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    return GradientWorker(client, named, options.max_refused)


def _length(data: Any) -> int:
    if not isinstance(data, Sized) or len(data) == 0:
        raise ConfigurationError("training_data must be a data set with a length above 0, to be divided into shards")
    return len(data)


def _connect(place: Place, section: Section, module: str) -> tuple[Place, Any, ServerProcess | None]:
    if place.rank > 0:
        return place, IslandClient(None, place), None
    run_dir, patience = Path(section.run_dir), section.server_timeout
    place, client, server = place.connect(module, section.server, section.token_file, run_dir, patience, on_loss=_die)
    return place, (client if place.island_size == 1 else IslandClient(client, place)), server


def _loader(engine: Any, data: Any, sizes: list[int], options: Options, place: Place, collate: Any) -> ShardedLoader:
    micro_batches, size = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    ranks = place.rank, place.island_size
    return ShardedLoader(data, sizes, size, micro_batches, *ranks, options.seed, collate, engine.join_run)


def _leave(client: Any, local: LocalSGD | GradientWorker, server: ServerProcess | None) -> None:
    """At the end of the process, however it comes; the server stays for the last words of the others."""
    try:
        local.settle()
    except AsyncError:
        pass  # it had ended before us
    client.leave(finished=False)
    if server is not None:
        server.wait(_GOODBYE)


def _die(reason: str) -> None:
    """Ends a worker that computes for a server that is no more; called from another thread."""
    sys.stderr.write(f"fairseq-async: error: {reason}\n")
    sys.stderr.flush()
    os._exit(2)
