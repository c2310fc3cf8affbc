"""How many local steps a worker takes before it meets the server, and on which shard of the data."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def local_steps(speeds: Mapping[int, float], maximum: int) -> dict[int, int]:
    """Dynamic local updates (DyLU; Liu et al. 2024, arXiv 2401.09135, section 5): ⌊v_w / max v · H⌋, at least 1.

    Args:
        speeds: measured steps per second of each worker.
        maximum: H, the local steps of the fastest.

    Raises:
        ValueError: a speed that is not above 0, or H below 1.
    """
    if maximum < 1:
        raise ValueError(f"maximum is {maximum}; it must be at least 1")
    for worker, speed in speeds.items():
        if not speed > 0:
            raise ValueError(f"the speed of worker {worker} is {speed}; it must be above 0")
    fastest = max(speeds.values(), default=1.0)
    # a quotient such as 1/5 comes out below its value: what lies so near to a whole number is meant to be it
    return {worker: max(1, math.floor(speed / fastest * maximum + 1e-9)) for worker, speed in speeds.items()}


def shard_probabilities(sizes: Sequence[int], used: Sequence[int]) -> Tensor:
    """p_i ∝ max(|D_i|/Σ|D| − n_i/Σn, 0): a shard that is behind its share is chosen (Liu et al. 2024, algorithm 2).

    Args:
        sizes: |D_i|, samples in each shard.
        used: n_i, samples of each shard that were used already. Where every shard has had its share, as at the
            beginning, p is the share.

    Returns:
        float64 tensor of the shards' probabilities.

    Raises:
        ValueError: no samples, a negative number, or sequences of different lengths.
    """
    if len(sizes) != len(used):
        raise ValueError(f"{len(sizes)} sizes and {len(used)} numbers of used samples")
    if min(sizes, default=0) < 0 or min(used, default=0) < 0 or sum(sizes) == 0:
        raise ValueError(f"sizes {list(sizes)} and used {list(used)}: must not be negative, and not all sizes 0")
    shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    behind = (shares - torch.tensor(used, dtype=torch.float64) / max(1, sum(used))).clamp_min(0.0)
    return behind / behind.sum() if behind.sum() > 1e-12 else shares
