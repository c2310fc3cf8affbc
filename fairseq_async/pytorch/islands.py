"""A worker of several ranks: how a script makes them one worker, and the models that may wait for each other."""

from torch import nn
from torch.distributed import get_world_size, is_initialized
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fairseq_async.errors import ConfigurationError, as_argument, spell_options
from fairseq_async.worker.start.context import WorkerContext, ranks_of_launcher
from fairseq_async.worker.start.process import errors_in_one_line
from fairseq_async.worker.start.world import check_not_started, enter_world, entered_world

_OF_RANKS = (DistributedDataParallel, FSDPModule)


@errors_in_one_line()
def enter_island(size: int | None = None) -> None:
    """Makes this process one of the ``size`` ranks of a worker, and these ranks ``torch.distributed``'s whole world.

    Call it before ``init_process_group``, in each process that torchrun has started on one machine or on several, and
    put the model into ``DistributedDataParallel`` or ``fully_shard`` then. A worker's ranks have neighbouring numbers.

    Example::

        enter_island(2)  # of torchrun's ranks 0 and 1, 2 and 3, …
        torch.distributed.init_process_group("nccl")
        model = DistributedDataParallel(model)
        with HybridAsync(model, optimizer, total_steps=1000) as worker:
            ...
    """
    spell_options(as_argument)
    size = ranks_of_launcher() if size is None else size
    if not (isinstance(size, int) and size >= 1):
        raise ConfigurationError(f"enter_island({size!r}): give the number of a worker's ranks, 1 or more")
    if entered_world() is None:
        check_not_started("call enter_island before init_process_group")
    enter_world(size)


def check_model(model: nn.Module, ranks: int, alone: bool) -> None:
    """Checks that the ranks of a worker, and no others, wait for each other in each step.

    Args:
        alone: whether torch.distributed has no other ranks than this worker's.

    Raises:
        ConfigurationError: one rank has a model that waits for others, or several have one that does not.
    """
    models = model if isinstance(model, nn.ModuleList) else [model]
    for each in models:
        if any(isinstance(module, FullyShardedDataParallel) for module in each.modules()):
            raise ConfigurationError(
                "the model is in FullyShardedDataParallel, of whose flat parameters each rank has a part: use "
                "fully_shard, of which accelerate's name is fsdp_version 2"
            )
        waits = next((module for module in each.modules() if isinstance(module, _OF_RANKS)), None)  # or in a wrapper
        if waits is not None and ranks == 1 and not alone:
            _refuse("fully_shard" if isinstance(waits, FSDPModule) else "DistributedDataParallel")
        if ranks > 1 and not isinstance(each, _OF_RANKS):
            raise ConfigurationError(
                f"this worker has {ranks} ranks, and the model is a {type(each).__name__}: put it into "
                "DistributedDataParallel or fully_shard, which give all ranks the mean of their gradients"
            )


def check_alone(context: WorkerContext) -> None:
    """Checks that a process without a launcher, which is the run's only worker, is alone in torch.distributed, too.

    Raises:
        ConfigurationError: a library or the script has started other ranks, each of which would be a run of its own.
    """
    if context.ranks == 1 and not context.joins and is_initialized() and get_world_size() > 1:
        raise ConfigurationError(
            f"torch.distributed has {get_world_size()} ranks, and no launcher has made them workers of one run: a "
            "worker is one process, so give Lightning's Trainer devices=1, do not spawn ranks, and start the workers "
            "by fairseq-async launch or torchrun"
        )


def refuse_within_ranks(model: nn.Module) -> list[RemovableHandle]:
    """From now on, ends the process with one line where the model of a worker of one rank is called by a
    DistributedDataParallel, which a script has unwrapped for the run alone: the workers would wait for each other."""

    @errors_in_one_line()
    def check(*_: object) -> None:
        if DistributedDataParallel._active_ddp_module is not None:
            _refuse("DistributedDataParallel")

    if not (is_initialized() and get_world_size() > 1):
        return []
    models = model if isinstance(model, nn.ModuleList) else [model]
    return [each.register_forward_pre_hook(check) for each in models]


def _refuse(kind: str) -> None:
    raise ConfigurationError(
        f"the model is in {kind}, whose ranks wait for each other: unwrap it, and call the unwrapped model, with "
        "Lightning give devices=1; or make several ranks one worker, by fairseq_async.torch.enter_island(SIZE) before "
        "init_process_group or Accelerator()"
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model, or a list of models, without DistributedDataParallel round it."""
    if isinstance(model, nn.ModuleList):
        return nn.ModuleList([unwrapped(each) for each in model])
    return model.module if isinstance(model, DistributedDataParallel) else model
