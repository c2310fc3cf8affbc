"""FSDP2's models (``fully_shard``), of whose parameters each rank of a worker holds a part, as DTensors."""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import Layout
from fairseq_async.worker.divided import DividedReplica

Named = Sequence[tuple[str, Parameter]]


def is_divided(named: Named) -> bool:
    """Whether each rank of the worker holds a part of these parameters."""
    return any(isinstance(each, DTensor) for _, each in named)


def check_divided(named: Named, ranks: int) -> None:
    """Checks that each parameter, or none, is divided by its rows among all ranks of a worker.

    Raises:
        ConfigurationError: one is divided otherwise, or not at all.
    """
    for name, each in named if is_divided(named) else ():
        if not isinstance(each, DTensor):
            raise ConfigurationError(
                f"{name} is in no module of fully_shard, and no rank would have the mean of its gradients: call "
                "fully_shard on the whole model, too"
            )
        if each.device_mesh.ndim > 1 or each.device_mesh.size() != ranks or each.placements != (Shard(0),):
            raise ConfigurationError(
                f"{name} is a DTensor that is not divided by its rows among the {ranks} ranks of this worker: use "
                "fully_shard with a mesh of one dimension, as it makes by itself, and no other parallelism"
            )


def divided_replica(model: nn.Module, named: Named) -> DividedReplica | None:
    """Returns this rank's parts of the model's parameters, as a worker exchanges them; None if they are not divided."""
    if not is_divided(named):
        return None
    parameters = [each for _, each in named]

    def find() -> list[Tensor]:
        reshard(model)
        return local_parts(parameters)

    return DividedReplica(Layout.of(named), list(map(_start, parameters)), find, partial(_gradients, parameters))


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns this rank's part of each DTensor, in the same memory; other tensors themselves."""
    return [each.to_local().detach() if isinstance(each, DTensor) else each for each in tensors]


def held(named: Named) -> list[tuple[str, Tensor]]:
    """Returns what this rank holds of the parameters, if it holds anything, with their names."""
    parts = zip(named, local_parts([each for _, each in named]), strict=True)
    return [(name, part) for (name, _), part in parts if part.numel()]


def reshard(model: nn.Module) -> None:
    """Drops whole parameters that a forward pass without ``backward`` has left; later ones would compute with them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def norm_of_parts(gradients: Sequence[Tensor]) -> float:
    """Returns the L2 norm of DTensors together; a collective call. Not finite on every rank if one has NaN or Inf."""
    squares = [torch.linalg.vector_norm(each, dtype=torch.float64).square() for each in local_parts(gradients)]
    total = torch.stack(squares).sum().float()  # accelerators have no float64 in each collective library
    all_reduce(total)
    return float(total.sqrt())


def _gradients(parameters: Sequence[Parameter]) -> list[Tensor]:
    """Returns this rank's part of each gradient; zeros, which take one element of memory, where there is none."""
    parts = zip(local_parts(parameters), parameters, strict=True)
    return [
        part.new_zeros(()).expand_as(part) if each.grad is None else local_parts([each.grad])[0] for part, each in parts
    ]


def _start(parameter: Parameter) -> int:
    """Returns the first element of this rank's rows: as by ``Tensor.chunk``, the last ranks may have fewer or none."""
    assert isinstance(parameter, DTensor)
    rows, mesh = parameter.shape[0], parameter.device_mesh
    first = min(rows, mesh.get_local_rank() * -(-rows // mesh.size()))
    return first * prod(parameter.shape[1:])
