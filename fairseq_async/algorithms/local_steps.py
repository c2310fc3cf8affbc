"""The number of local steps that a worker takes between two exchanges, and the choice of its shard of the data."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def local_steps(speeds: Mapping[int, float], maximum: int) -> dict[int, int]:
    """Returns each worker's number of local steps, ⌊v_w / max v · H⌋ but at least 1: dynamic local updates (DyLU; Liu
    et al. 2024, arXiv 2401.09135, section 5).

    Args:
        speeds: v, the measured steps per second of each worker.
        maximum: H, the local steps of the fastest worker.

    Raises:
        ValueError: a speed that is not finite or not above 0, or H below 1.
    """
    if maximum < 1:
        raise ValueError(f"maximum is {maximum}; it must be at least 1")
    for worker, speed in speeds.items():
        if not 0 < speed < math.inf:
            raise ValueError(f"the speed of worker {worker} is {speed}; it must be finite and above 0")
    fastest = max(speeds.values(), default=1.0)
    # rounding may put a quotient just below its true value: one so near to a whole number counts as that number
    return {worker: max(1, math.floor(speed / fastest * maximum + 1e-9)) for worker, speed in speeds.items()}


def shard_probabilities(sizes: Sequence[int], used: Sequence[int]) -> Tensor:
    """Returns the probability of each shard to be chosen (Liu et al. 2024, algorithm 2), which favours shards that were
    used less than their share: p_i ∝ max(|D_i|/Σ|D| − n_i/Σn, 0).

    Args:
        sizes: |D_i|, the number of samples in each shard.
        used: n_i, the number of samples of each shard that were used already. Where every shard has had its share, and
            at the beginning, p is the shard's share of all samples.

    Returns:
        the shards' probabilities: float64, shape [shards].

    Raises:
        ValueError: no samples, a negative number, or sequences of different lengths.
    """
    if len(sizes) != len(used):
        raise ValueError(f"{len(sizes)} sizes and {len(used)} numbers of used samples")
    if min(sizes, default=0) < 0 or min(used, default=0) < 0 or sum(sizes) == 0:
        raise ValueError(f"sizes {list(sizes)} and used {list(used)}: must not be negative, and not all sizes 0")
    shares, shares_used = (torch.tensor(counts, dtype=torch.float64, device="cpu") for counts in (sizes, used))
    shares /= sum(sizes)
    behind = (shares - shares_used / max(1, sum(used))).clamp_min(0.0)
    return behind / behind.sum() if behind.sum() > 1e-12 else shares
