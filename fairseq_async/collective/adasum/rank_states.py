"""Optimizer states that differ from rank to rank."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# one rank's state as in an optimizer's ``state_dict()["state"]``: by the number of the parameter, then by name
State = dict[int, dict[str, object]]
Tensors = dict[int, dict[str, Tensor]]  # only the tensors of a state


class RankStates:
    """Averages the ranks' optimizer states, or collects them on rank 0 for one checkpoint.

    Every rank calls each method, after the same number of steps: the states must hold the same tensors on all ranks,
    since each tensor is one collective operation.

    Attributes:
        gathered: on rank 0 after :meth:`gather`, the tensors of the states of ranks 1, 2, ….
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.gathered: list[Tensors] = []

    def average(self, group: dist.ProcessGroup | None) -> None:
        """Replaces every floating-point tensor of the state by its mean over the ranks."""
        for _, _, tensor, device in self._tensors():
            if tensor.is_floating_point():
                total = tensor.to(device)
                dist.all_reduce(total, group=group)
                tensor.copy_(total.div_(dist.get_world_size(group)))

    def gather(self, group: dist.ProcessGroup | None) -> None:
        """Copies the other ranks' states into rank 0's :attr:`gathered`."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        first = dist.get_process_group_ranks(group)[0]
        self.gathered = [{} for _ in range(ranks - 1)] if rank == 0 else []
        for index, name, tensor, device in self._tensors():
            sent = tensor.to(device).contiguous()
            parts = [torch.empty_like(sent) for _ in range(ranks)] if rank == 0 else None
            dist.gather(sent, parts, dst=first, group=group)
            for state, part in zip(self.gathered, (parts or [])[1:], strict=True):
                state.setdefault(index, {})[name] = part.cpu()

    def of_this_rank(self, first: State, others: Sequence[Tensors], group: dist.ProcessGroup | None) -> State:
        """Returns the state that a checkpoint holds for this rank.

        Args:
            first: rank 0's state.
            others: the states of ranks 1, 2, … as in :attr:`gathered`; if the checkpoint is of another number of ranks,
                every rank gets the mean of all states.
        """
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if not others or (len(others) == ranks - 1 and rank == 0):
            return first
        if len(others) == ranks - 1:
            return {index: {**state, **others[rank - 1].get(index, {})} for index, state in first.items()}
        return {
            index: {name: _mean(value, index, name, others) for name, value in state.items()}
            for index, state in first.items()
        }

    def _tensors(self) -> Iterator[tuple[int, str, Tensor, torch.device]]:
        """Yields number of the parameter, name, tensor and the parameter's device, in the same order on all ranks.

        The tensor may be on another device: torch's Adam has its count of steps on the CPU, which NCCL does not reach.
        """
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            for name, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    yield index, name, value, parameter.device


def _mean(value: object, index: int, name: str, others: Sequence[Tensors]) -> object:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.stack([value, *(state[index][name].to(value) for state in others)]).mean(0)
