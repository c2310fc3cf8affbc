"""A few sums of a tensor that each worker makes by itself: equal but for rounding, or not."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_PARTS = 8
_TOLERANCE = 1e-2  # of the norm


def sketch_of(tensor: Tensor) -> list[float]:
    """Returns the norm of a tensor's finite elements, and the sum of each eighth of them, in float64."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten()
    parts = [torch.nan_to_num(part.double(), 0.0, 0.0, 0.0) for part in flat.tensor_split(_PARTS)]
    norm = torch.stack([torch.linalg.vector_norm(part) for part in parts]).norm()
    return torch.stack([norm, *(part.sum() for part in parts)]).tolist()


def different(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> str:
    """Returns the first name that both have and whose sketches no rounding explains; "" where there is none.

    A relative error ε of the elements changes the norm by ε of it, and a sum of n elements by √n ε of the norm at most;
    what another seed makes changes a sum by about as much as the norm of its elements.
    """
    for name in first.keys() & second.keys():
        pairs = list(zip(first[name], second[name], strict=False))
        if pairs and max(abs(one - other) for one, other in pairs) > _TOLERANCE * max(map(abs, pairs[0])):
            return name
    return ""
