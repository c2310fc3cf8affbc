"""Numbers that a line of JSON may have."""

import math

import torch

_LARGEST = torch.finfo(torch.float32).max


def finite(value: object) -> object:
    """``value``; None for NaN and Inf, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def measured(value: object) -> object:
    """``value``; None for a float that fp32 does not have: that is no measurement, and readers could not add it up."""
    return None if isinstance(value, float) and not abs(value) <= _LARGEST else value
