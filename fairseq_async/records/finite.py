"""Replaces numbers that a line of JSON must not have."""

import math

import torch

_LARGEST = torch.finfo(torch.float32).max


def finite(value: object) -> object:
    """Returns ``value``, or None for NaN and Inf, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def measured(value: object) -> object:
    """Returns ``value``, or None for a float beyond fp32: that is no measurement, and readers could not add it up."""
    return None if isinstance(value, float) and not abs(value) <= _LARGEST else value
