"""``initialize`` for the synchronous methods."""

import os
import socket
from collections.abc import Sized
from typing import Any

import deepspeed
import torch.distributed as dist

from fairseq_async.deepspeed_plugin.adascale import AdaScaleEngine
from fairseq_async.deepspeed_plugin.adasum import AdasumEngine, Alone
from fairseq_async.deepspeed_plugin.config import without_file
from fairseq_async.deepspeed_plugin.data import ShardedLoader
from fairseq_async.deepspeed_plugin.group import GroupEngine
from fairseq_async.deepspeed_plugin.leftovers import unlink_buffer
from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.config import AdaScaleOptions, AdasumOptions


def initialize_group(
    options: AdasumOptions | AdaScaleOptions,
    args: Any,
    model: Any,
    data: Any,
    collate: Any,
    config: dict[str, Any],
    theirs: dict[str, Any],
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, and the engine it has made as one of ours."""
    _as_launched()
    deepspeed.init_distributed()
    unlink_buffer()
    if isinstance(options, AdasumOptions):
        if dist.get_world_size() == 1:
            raise ConfigurationError("adasum combines the gradients of several ranks, and this run has one")
        theirs = theirs | {"mpu": Alone()}
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=without_file(args), model=model, collate_fn=collate, config=config, **theirs
    )
    engine.__class__ = AdasumEngine if isinstance(options, AdasumOptions) else AdaScaleEngine
    engine.enter(options)
    loader = None
    if data is not None:
        if not isinstance(data, Sized) or len(data) == 0:
            raise ConfigurationError("training_data must be a data set with a length above 0")
        batch, micro_batches = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        samples: Any = data
        ranks, sizes, at = (dist.get_rank(), dist.get_world_size()), [len(data)], Position(engine)
        loader = ShardedLoader(samples, sizes, batch, micro_batches, *ranks, options.seed, collate, lambda: at)
    return engine, optimizer, loader, scheduler


class Position:
    """Where the ranks are in the data set, which is one shard: as :class:`ShardedLoader` asks a worker."""

    def __init__(self, engine: GroupEngine) -> None:
        self._engine = engine
        self.sequence = self.offset = 0
        self.shard: int | None = 0

    @property
    def done(self) -> int:
        return self._engine.global_steps

    @property
    def finished(self) -> bool:
        return self._engine.finished


def _as_launched() -> None:
    """A process that no launcher has started is alone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if "RANK" not in os.environ:
        os.environ.update({name: str(value) for name, value in alone.items()})
