"""A digest of a worker's first batches, by which the server sees that two workers train on the same data."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_BYTES = 1 << 20  # hashed of each tensor: batches that differ do so early in it
_FEWEST, _MOST = 2, 8  # batches in a digest; one may be the same by chance, where there is little data
_NOTHING = hashlib.blake2b(digest_size=8).digest()


class BatchDigest:
    """Makes one digest of what a model is called with before the first report that comes after two such calls.

    Data whose rows are all equal shows nothing, and has no digest.

    Attributes:
        closed: whether the digest is made, or there will be none.
    """

    def __init__(self) -> None:
        self._calls = list[bytes]()
        self._rows_differ = self.closed = False

    def note(self, batch: object) -> None:
        """Takes the tensors of a batch into the digest.

        Args:
            batch: what a model is called with: tensors in tuples, lists and mappings, of any depth.
        """
        if self.closed or len(self._calls) == _MOST:
            return
        call = hashlib.blake2b(digest_size=8)
        for tensor in _tensors(batch):
            try:
                data = tensor.detach().flatten()[: _BYTES // tensor.element_size()].cpu().contiguous().view(torch.uint8)
                call.update(data.numpy().data)
            except RuntimeError:  # the values of a nested tensor, or of one within torch.func.vmap, cannot be read
                continue
            row = tensor.numel() // (len(tensor) if tensor.dim() else 1) * tensor.element_size()
            self._rows_differ |= not torch.equal(data[row:], data[: max(0, len(data) - row)])
        if call.digest() != _NOTHING:
            self._calls.append(call.digest())

    def take(self) -> str | None:
        """Returns the digest once; None before, afterwards, and where it would show nothing."""
        if self.closed or len(self._calls) < _FEWEST:
            return None
        shows = self._rows_differ or len(set(self._calls)) > 1
        self.closed = shows or len(self._calls) == _MOST
        return hashlib.blake2b(b"".join(self._calls), digest_size=8).hexdigest() if shows else None


class _Calls:
    """Hooks round the calls of a model's modules, which note what the outermost one is given."""

    def __init__(self, model: nn.Module, batches: BatchDigest) -> None:
        self._batches = batches
        self._outermost: nn.Module | None = None
        self.handles = list[RemovableHandle]()
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self.handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                self.handles.append(module.register_forward_hook(self._after, always_call=True))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Hazard: compilers and CUDA graphs would take the hook into their graph, or fail.
        if torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return
        if self._outermost is not None:
            return
        self._outermost = module
        if torch.is_grad_enabled():
            self._batches.note((args, kwargs))

    def _after(self, module: nn.Module, *of_the_hook: object) -> None:
        if torch.compiler.is_compiling() or module is not self._outermost:
            return
        self._outermost = None
        if self._batches.closed:
            for handle in self.handles:
                handle.remove()


def note_calls(model: nn.Module, batches: BatchDigest) -> list[RemovableHandle]:
    """Notes the batches with which a model, or a module of it, is called to compute gradients.

    Returns:
        The handles of the hooks, which are removed when the digest is made.
    """
    return _Calls(model, batches).handles


def _tensors(batch: object) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.numel() and not batch.is_sparse and batch.grad_fn is None:  # what layers give depends on parameters
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
