"""A tensor that behaves as one on a GPU, for tests on machines without one."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class OnAnotherDevice(Tensor):
    """Refuses numpy, and operations with tensors of several elements in the CPU's memory, as a tensor on a GPU does.

    Copies between both are possible, and CPU tensors as indices. ``cpu()`` and ``to("cpu")`` return a plain copy, and
    ``plain.to(other)`` a tensor where ``other`` is. Its ``device`` is the CPU all the same.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name == "numpy":
            raise TypeError("can't convert a tensor of another device to numpy: use Tensor.cpu()")
        if name == "cpu" or (name == "to" and args[1] == "cpu"):
            return super().__torch_function__(func, types, args, kwargs).as_subclass(Tensor).clone()
        mixing = name in ("copy_", "to") or (name == "__getitem__" and isinstance(args[0], cls))
        plain = [each for each in tree_leaves((args, dict(kwargs or {}))) if type(each) is Tensor and each.dim() > 0]
        if plain and not mixing:
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs)


def elsewhere(tensor: Tensor) -> OnAnotherDevice:
    """Returns a copy of the tensor on the other device."""
    return tensor.clone().as_subclass(OnAnotherDevice)


def loaded_elsewhere(state: Any) -> Any:
    """Returns a state with a copy of all its tensors on the other device, as ``torch.load(…, map_location=…)`` does."""
    if isinstance(state, dict):
        return {key: loaded_elsewhere(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(loaded_elsewhere, state))
    return elsewhere(state) if isinstance(state, Tensor) else state
