"""Copies of parameters that an optimizer keeps in its state, which move with the parameters at an exchange."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from fairseq_async.exchange.devices import Device
from fairseq_async.pytorch.fsdp import local_parts
from fairseq_async.worker.replica import Replica

_NEAR = 0.25  # of the squared norm; a moment is about as far from the parameters as they are long, or farther
_PARALLEL = 1 - 1e-5  # squared cosine of a multiple of the gradient, within rounding
_WITHOUT_COPIES = ("torch.optim.", "deepspeed.", "fairseq_async.")  # modules of optimizers that step from no copy


class Copies:
    """Finds tensors of the optimizers' states that are copies of parameters, such as slow weights, an average or the
    first values. Schedule-free optimizers, Lookahead, MADGRAD and Prodigy have such.

    A name of the state is of copies if its tensors lie near the parameters of all the model when they are first seen:
    where a constructor has made them, before the first exchange, else after the step that has.

    Hazards: a moment begins as a multiple of the gradient, which may be one of the parameters, as with the loss
    ``parameters.square().sum()``. Such a tensor is no copy. All ranks of a worker must call :meth:`note` together.

    Args:
        optimizers: whose states are looked at, by the tensors that they step: parameters, or fp32 masters of them.
        ranks: of this worker, each of which may hold a part of these tensors.
        device: on which the ranks exchange numbers; the tensors may be offloaded, where their library exchanges none.
    """

    def __init__(self, optimizers: Sequence[Optimizer], ranks: int, device: torch.device) -> None:
        given = [each for each in optimizers if not type(each).__module__.startswith(_WITHOUT_COPIES)]
        self._known: list[tuple[Optimizer, dict[str, bool]]] = [(each, {"step": False}) for each in given]
        self._ranks, self._device = ranks, device

    def note(self, stepped: bool = True) -> None:
        """Looks at names that are new in the states; before a step, one that is of no copies is looked at again."""
        for optimizer, known in self._known:
            for name in sorted({name for _, state in _states(optimizer) for name in state} - known.keys()):
                are_copies = self._are_near(optimizer, name)
                if are_copies or stepped:
                    known[name] = are_copies

    def pairs(self) -> Iterator[Sequence[Tensor]]:
        """Yields this rank's part of each copy and of the tensor that is stepped."""
        for optimizer, known in self._known:
            for name in (name for name, are_copies in known.items() if are_copies):
                yield from map(local_parts, _pairs(optimizer, name))

    @torch.no_grad()
    def _are_near(self, optimizer: Optimizer, name: str) -> bool:
        sums = torch.zeros(5, dtype=torch.float64)
        for value, tensor in _pairs(optimizer, name):
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            value, tensor, gradient = (each.float() for each in local_parts([value.to(tensor), tensor, gradient]))
            products = [(value - tensor).square(), tensor.square(), value.square(), gradient.square(), value * gradient]
            sums += torch.stack([each.sum() for each in products]).cpu().double()
        apart, length, own, of_gradient, common = self._of_all_ranks(sums).tolist()
        return apart < _NEAR * length and not common**2 >= _PARALLEL * own * of_gradient > 0

    def _of_all_ranks(self, sums: Tensor) -> Tensor:
        """Adds up the sums of a worker's ranks, which may hold parts: all are to find the same."""
        if self._ranks > 1:
            sums = sums.float().to(self._device)  # accelerators have no float64 in each collective library
            distributed.all_reduce(sums)
        return sums


def _states(optimizer: Optimizer) -> list[tuple[Tensor, dict[str, object]]]:
    """Returns the tensors that have a state, with it. DeepSpeed takes them out of the groups between two steps."""
    return [(tensor, state) for tensor, state in optimizer.state.items() if isinstance(tensor, Tensor)]


def _pairs(optimizer: Optimizer, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    for tensor, state in _states(optimizer):
        value = state.get(name)
        if isinstance(value, Tensor) and value.shape == tensor.shape and value.is_floating_point():
            yield value, tensor


class MovingReplica:
    """A replica whose parameters take the copies with them, as if those had always been where the parameters are now:
    an optimizer that mixes both would else take the model back to where this worker was by itself."""

    def __init__(self, replica: Replica, copies: Copies) -> None:
        self._replica, self._copies = replica, copies
        self.layout = replica.layout

    @property
    def named(self) -> Sequence[tuple[str, Tensor]]:
        return self._replica.named

    @property
    def device(self) -> Device:
        return self._replica.device

    def read(self, flat: Tensor, shared: bool = False) -> None:
        self._replica.read(flat, shared)

    def subtract(self, flat: Tensor) -> None:
        self._replica.subtract(flat)

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        self._copies.note(stepped=False)
        pairs = list(self._copies.pairs())
        for copy, tensor in pairs:
            copy.sub_(tensor)
        self._replica.write(flat)
        for copy, tensor in pairs:
            copy.add_(tensor)

    def part(self, tensors: slice) -> "MovingReplica":
        return MovingReplica(self._replica.part(tensors), self._copies)
