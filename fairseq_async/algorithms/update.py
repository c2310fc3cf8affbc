"""What a worker sends to the owner of the parameters."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """One gradient or pseudo-gradient.

    Attributes:
        worker: id of the sender, counted from 0.
        sequence: the sender's own number for this update, counted from 0; it never goes back.
        base_version: the server version whose parameters it was computed from.
        weight: target tokens (hybrid asynchronous SGD) or local steps (local SGD) that went into it.
        delta: flat fp32 tensor of the parameters' size: the mean gradient over ``weight`` tokens,
            or, for local SGD, the parameters before minus the parameters after the local steps. Where a model is
            exchanged in fragments, of the size of the one whose turn it is.
        tokens: target tokens of the local steps, where somebody counts them.
    """

    worker: int
    sequence: int
    base_version: int
    weight: float
    delta: Tensor
    tokens: float = 0.0
