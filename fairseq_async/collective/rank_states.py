"""Optimizer states that differ from rank to rank."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

State = dict[Any, dict[str, Any]]  # by the number of the parameter, as in an optimizer's state_dict


class RankStates:
    """Averages the ranks' states, or collects them for one checkpoint. All ranks must have taken the same steps.

    Attributes:
        gathered: on rank 0 after :meth:`gather`, the tensors of the states of ranks 1, 2, ….
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.gathered: list[State] = []

    def average(self, group: dist.ProcessGroup | None) -> None:
        """Every rank has the mean afterwards."""
        for _, _, tensor in self._tensors():
            if tensor.is_floating_point():
                dist.all_reduce(tensor, group=group)
                tensor.div_(dist.get_world_size(group))

    def gather(self, group: dist.ProcessGroup | None) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        first = dist.get_process_group_ranks(group)[0]
        self.gathered = [{} for _ in range(ranks - 1)] if rank == 0 else []
        for index, name, tensor in self._tensors():
            parts = [torch.empty_like(tensor) for _ in range(ranks)] if rank == 0 else None
            dist.gather(tensor.contiguous(), parts, dst=first, group=group)
            for state, part in zip(self.gathered, (parts or [])[1:], strict=True):
                state.setdefault(index, {})[name] = part.cpu()

    def of_this_rank(self, first: State, others: Sequence[State], group: dist.ProcessGroup | None) -> State:
        """What a checkpoint has for this rank; the mean of what it has, where it is of another number of ranks."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if not others or (len(others) == ranks - 1 and rank == 0):
            return first
        if len(others) == ranks - 1:
            return {index: {**state, **others[rank - 1].get(index, {})} for index, state in first.items()}
        return {index: {name: _mean(index, name, value, others) for name, value in of_one.items()}
                for index, of_one in first.items()}  # fmt: skip

    def _tensors(self) -> Iterator[tuple[int, str, Tensor]]:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            for name, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    yield index, name, value


def _mean(index: Any, name: str, value: Any, others: Sequence[State]) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.stack([value, *(state[index][name].to(value) for state in others)]).mean(0)
