"""Numbers that a line of JSON may have."""

import torch

_LARGEST = torch.finfo(torch.float32).max


def finite(value: object) -> object:
    """``value``; None for a float that fp32 does not have: JSON has no NaN and no Inf, and what is above fp32 is no
    measurement, and readers could not add it up."""
    return None if isinstance(value, float) and not abs(value) <= _LARGEST else value
