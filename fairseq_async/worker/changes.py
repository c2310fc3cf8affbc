"""Notices parameters that were changed by something else than the run."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fairseq_async.worker.start.server_process import say

_WIDTH = 127  # words of 8 bytes in a row: rows are summed at the memory's speed, and only their sums are weighted
_ALIGNED = 128  # the same on a GPU, which copies tensors that begin at multiples of 16 bytes faster
_PASSES_OF_A_STEP = 4  # at most: of SAM, and of several losses
_SAMPLED = 8  # parameters
_STEPS_OF_OTHERS = 3  # of one optimizer; fewer may be those of a model that is used once
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParameterWatch:
    """Compares parameters with those of an earlier time, by a fingerprint of 8 bytes for each.

    The fingerprint is of the bits, so that it does not matter how a parameter was changed: in place, through ``data``,
    or by another tensor as its ``data``. It takes one pass over the memory; on a GPU also a copy, so that a few kernels
    do it, and the process waits for the device once, when it compares. On a CPU, values that only change places within
    a row of 127 words do not show.

    Args:
        named: the parameters with their names.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self._noted: dict[torch.device, Tensor] | None = None
        self._rows: dict[torch.device, _Rows] = {}

    def note(self) -> None:
        """Notes the parameters as they are now."""
        self._noted = self._fingerprints()

    def changed(self) -> str | None:
        """Returns the name of the first parameter that is not as it was noted; None if there is none."""
        if self._noted is None:
            return None
        now = self._fingerprints()
        if now.keys() == self._noted.keys() and all(torch.equal(now[device], self._noted[device]) for device in now):
            return None
        present, noted = _by_parameter(now, self._named), _by_parameter(self._noted, self._named)
        different = (name for (name, _), one, other in zip(self._named, present, noted, strict=True) if one != other)
        return next(different, self._named[0][0])

    def _fingerprints(self) -> dict[torch.device, Tensor]:
        found: dict[torch.device, list[Tensor]] = {}
        for _, tensor in self._named:
            found.setdefault(tensor.device, []).append(tensor)
        return {device: _fingerprints(*self._rows_of(device).sums(tensors)) for device, tensors in found.items()}

    def _rows_of(self, device: torch.device) -> "_Rows":
        if device not in self._rows:
            self._rows[device] = _RowsAtOnce() if device.type == "cuda" else _Rows()
        return self._rows[device]


class WholeWatch:
    """Notices that all parameters were replaced at once, as by the average of a script's own: by one element of each of
    some, so that it costs nothing to note them after each step.

    Args:
        tensors: the parameters; those without elements, as between two steps of ZeRO 3, show nothing.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [each for each in tensors if each.numel()][:_SAMPLED]
        self._noted: list[Tensor] = []

    def note(self) -> None:
        """Notes the parameters as they are now."""
        self._noted = [element.clone() for element in self._elements()]

    def changed(self) -> bool:
        """Whether they were others when they were noted."""
        return any(not torch.equal(now, noted) for now, noted in zip(self._elements(), self._noted, strict=False))

    def _elements(self) -> list[Tensor]:
        return [each.detach()[tuple(size // 2 for size in each.shape)] for each in self._tensors]


class LoopWatch:
    """Notices a loop that trains a model itself: before it has joined the run, or by passes without the run's steps.

    Args:
        find: returns the parameters that are trained, with their names, as an optimizer steps them.
        trained: the model's own parameters that are trained.

    Attributes:
        has_stepped: whether the run has seen a step.
    """

    def __init__(self, find: Callable[[], Sequence[tuple[str, Tensor]]], trained: Iterable[Tensor]) -> None:
        self._find, self._watch = find, ParameterWatch(find())
        self._watch.note()
        self.has_stepped, self._passes, self._gradients = False, 0, 0  # of before the run
        self._hooks = [each.register_post_accumulate_grad_hook(self._count_gradient) for each in trained]

    def _count_gradient(self, parameter: Tensor) -> None:
        self._gradients += 1

    def trained_before(self) -> bool:
        """Whether the loop has computed gradients and changed parameters before :meth:`join`."""
        return bool(self._gradients) and self._watch.changed() is not None

    def join(self) -> None:
        """Notes that the run has begun."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._watch = [], ParameterWatch([])

    def step(self) -> None:
        """Notes a step of the run."""
        self.has_stepped = True
        self.begin_again()

    def begin_again(self) -> None:
        """Counts passes from here, and compares with the parameters that are there then."""
        self._passes, self._watch = 0, ParameterWatch([])

    def count_pass(self) -> bool:
        """Counts a forward pass that trains; returns whether to look at :meth:`trained_without_step` after so many. A
        step may have several passes, and those of SAM have other parameters for a while."""
        self._passes += 1
        if self._passes == (_PASSES_OF_A_STEP if self.has_stepped else 1):
            self._watch = ParameterWatch(self._find())
            self._watch.note()
        return self._passes == 2 * _PASSES_OF_A_STEP

    def trained_without_step(self) -> str | None:
        """Returns the name of a parameter that has changed within passes without a step of the run; None if there is
        none."""
        return self._watch.changed()


class OtherModels:
    """Names in a warning an optimizer that trains, beside the run, what no worker exchanges: each would have its own.

    Args:
        workers: number of workers; with one of them nothing is wrong.
        remedy: says how the run gets these parameters, too.
    """

    def __init__(self, workers: int, remedy: str) -> None:
        self._alone, self._remedy = workers == 1, remedy
        self._thread = threading.get_ident()  # a server's optimizer may step in another one of this process
        self._steps = Counter[int]()  # by the optimizer's id
        self._said = False

    def count(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer that has no parameter of the run."""
        if self._alone or self._said or threading.get_ident() != self._thread:
            return
        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] == _STEPS_OF_OTHERS:
            self._said = True
            say(
                f"warning: {type(optimizer).__name__} steps parameters that are in no exchange, so that each worker "
                f"trains its own: {self._remedy}"
            )


def _by_parameter(fingerprints: dict[torch.device, Tensor], named: Sequence[tuple[str, Tensor]]) -> list[int | None]:
    """Returns the fingerprint of each parameter; None where it has come from another device since."""
    each = {device: iter(values.tolist()) for device, values in fingerprints.items()}
    return [next(each[tensor.device], None) if tensor.device in each else None for _, tensor in named]


@torch.no_grad()
def _fingerprints(sums: Tensor, counts: list[int]) -> Tensor:
    """Returns a number for each tensor from the sums of its rows: Σ wᵢ · rowᵢ mod 2⁶⁴, with odd wᵢ that depend on the
    row's place, so that values that have changed rows show too.

    Args:
        sums: of the rows of all tensors.
        counts: how many of them each tensor has.
    """
    totals = sums.mul_(torch.arange(1, 2 * len(sums), 2, device=sums.device)).cumsum(0)
    ends = torch.tensor(counts, device="cpu").cumsum(0)
    before_each = torch.cat((totals.new_zeros(1), totals))[torch.cat((ends.new_zeros(1), ends)).to(totals.device)]
    return before_each.diff()


class _Rows:
    """The rows of tensors' bits, and what is left behind the last row of each.

    Views of the bits are kept: to make them takes longer than to add up the rows of small tensors. With them the memory
    of a parameter whose ``data`` was replaced stays until the next look.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, tuple[int, ...]]] = []
        self._parts: list[Tensor] = []
        self._counts: list[int] = []

    @torch.no_grad()
    def sums(self, tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
        """Returns the sums of the rows, as integers of 8 bytes, and how many of them each tensor has."""
        seen = [(tensor.data_ptr(), tensor.numel(), tensor.stride()) for tensor in tensors]
        if seen != self._seen:
            self._seen = seen if self._place(tensors) else []
        return self._sum(), self._counts

    def _place(self, tensors: list[Tensor]) -> bool:
        """Makes the views; returns whether they may be kept, since none is of a copy."""
        divided = [_rows(tensor) for tensor in tensors]
        self._parts = [part for parts in divided for part in parts if part.numel()]
        self._counts = [sum(len(part) for part in parts) for parts in divided]
        return all(_is_in_words(tensor) for tensor in tensors)

    def _sum(self) -> Tensor:
        sums = [part.sum(1) if part.dim() == 2 else part.long() for part in self._parts]
        return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device="cpu")


class _RowsAtOnce(_Rows):
    """The rows of a GPU's tensors, which are filled up with zeros, by a few kernels: one for each of some hundred
    tensors would take the process longer than all of them take the GPU."""

    def _place(self, tensors: list[Tensor]) -> bool:
        size = 8 * _ALIGNED
        flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        self._counts, zeros = [-(-each.numel() // size) for each in flat], flat[0].new_zeros(size)
        filled = [(each, zeros[: size * n - each.numel()]) for each, n in zip(flat, self._counts, strict=True)]
        self._parts = [part for pair in filled for part in pair]
        self._weights = torch.arange(1, 2 * _ALIGNED, 2, device=zeros.device)
        return all(tensor.is_contiguous() for tensor in tensors)

    def _sum(self) -> Tensor:
        return torch.cat(self._parts).view(torch.int64).view(-1, _ALIGNED).mul_(self._weights).sum(1)


def _is_in_words(tensor: Tensor) -> bool:
    """Whether views of the tensor's memory show its bits in words of 8 bytes; else they are a copy's."""
    return tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % 8 == 0


def _rows(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tensor's bits: its rows, the words behind the last row, and the elements behind the last word."""
    flat = tensor.detach().contiguous().view(-1)
    if not _is_in_words(flat):
        flat = flat.clone()
    bits = flat.view(_INTEGERS[flat.element_size()])
    count = bits.numel()
    whole = count - count % (8 // flat.element_size())
    words = bits[:whole].view(torch.int64)
    in_rows = words.numel() - words.numel() % _WIDTH
    return words[:in_rows].view(-1, _WIDTH), words[in_rows:], bits[whole:]
