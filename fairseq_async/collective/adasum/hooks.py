"""A communication hook: Adasum in place of the all-reduce of DistributedDataParallel."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fairseq_async.collective.adasum.distributed import DistributedAdasum
from fairseq_async.errors import ConfigurationError


class AdasumState:
    """The state of :func:`adasum_hook` for one model.

    Args:
        process_group: the group that the model was wrapped with; the default group when it is None.

    Raises:
        ConfigurationError: the group has one rank only.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.combine = DistributedAdasum(process_group)
        self.thread = ThreadPoolExecutor(1, "adasum")
        self.stream: torch.cuda.Stream | None = None


def adasum_hook(state: AdasumState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Combines a bucket's gradients by Adasum, each tensor by itself, while backward goes on.

    A tensor's gradient becomes NaN on every rank when it has NaN or Inf on one, so all see the same step and can skip
    it. A parameter without a gradient on a rank (``find_unused_parameters``) counts as zero there. When a rank is gone,
    backward raises RuntimeError on the others.

    On a CPU one thread combines the buckets in their order, which is the same on all ranks: Adasum has several rounds
    with computation between them, and Gloo's messages have no future to which the next round could be chained. On a
    GPU a separate stream does the same, since nothing there waits for the device.

    Raises:
        ConfigurationError: the gradients are sparse.

    Example::

        >>> model = DistributedDataParallel(model)
        >>> model.register_comm_hook(AdasumState(), adasum_hook)
        >>> loss.backward()
        >>> optimizer.step()  # the learning rate is not multiplied by the number of ranks
    """
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        raise ConfigurationError("Adasum needs dense gradients: build embeddings with sparse=False")
    if buffer.is_cuda:
        return _combine_on_stream(state, bucket.gradients(), buffer)
    future: Future[Tensor] = Future()
    state.thread.submit(_combine_in_thread, state, bucket.gradients(), buffer, future)
    return future


def _combine_in_thread(state: AdasumState, gradients: Sequence[Tensor], buffer: Tensor, future: Future[Tensor]) -> None:
    try:
        state.combine(gradients)
    except Exception as error:  # whatever it is: raised where backward waits for the future
        future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
    else:
        future.set_result(buffer)


def _combine_on_stream(state: AdasumState, gradients: Sequence[Tensor], buffer: Tensor) -> Future[Tensor]:
    if state.stream is None:
        state.stream = torch.cuda.Stream(buffer.device)
    future: Future[Tensor] = Future(devices=[buffer.device])
    state.stream.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(state.stream):
        state.combine(gradients)
        future.set_result(buffer)
    return future
