"""The update that a worker sends to the owner of the parameters."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """One gradient or pseudo-gradient of a worker.

    Attributes:
        worker: id of the sender, counted from 0.
        sequence: number of this update among the sender's own, counted from 0; it never goes back.
        base_version: the server version from whose parameters the update was computed.
        weight: number of target tokens (hybrid asynchronous SGD) or local steps (local SGD) in the update.
        delta: flat fp32 tensor of the parameters' size: the mean gradient over ``weight`` tokens,
            or, for local SGD, the parameters before minus the parameters after the local steps. Where a model is
            exchanged in fragments, it has the size of the fragment whose turn it is.
        tokens: number of target tokens in the local steps; 0 where they are not counted.
        micro_batches: how many of them the gradient is of, where the server divides those of a step; else 1.
        missing: the tensors of the model without a gradient, as bits (:mod:`~fairseq_async.algorithms.missing`); their
            elements of ``delta`` are 0.
        share: weight of these local steps beside those of the other workers, by the workers' ranks; 1 for their mean.
    """

    worker: int
    sequence: int
    base_version: int
    weight: float
    delta: Tensor
    tokens: float = 0.0
    missing: int = 0
    micro_batches: int = 1
    share: float = 1.0
