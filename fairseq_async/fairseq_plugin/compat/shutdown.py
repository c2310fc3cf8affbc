"""fairseq's process group: DistributedDataParallel on the CPU, and clean ends of processes, which what fairseq leaves
running can abort after their work is done."""

import gc
import queue
import sys
import threading
import time

import torch.distributed as dist
from fairseq.data.iterators import BackgroundConsumer
from fairseq.distributed import ModuleProxyWrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from fairseq_async.fairseq_plugin.compat.types import FairseqConfig

_SECONDS = 10.0  # for a batch that is being prepared


def end_prefetching() -> None:
    """Ends the threads that fairseq leaves to prepare batches that nobody will ask for.

    When Python exits, a thread that waits for Python inside torch is unwound through C++, which aborts the process: a
    run that is complete would seem to have failed. A worker that need neither validate nor save ends right after its
    last step, often while its next batch is being prepared.
    """
    deadline = time.monotonic() + _SECONDS
    consumers = [thread for thread in threading.enumerate() if isinstance(thread, BackgroundConsumer)]
    for consumer in consumers:
        consumer._max_len = 0  # it ends after the next batch
    for consumer in consumers:
        while consumer.is_alive() and time.monotonic() < deadline:
            try:
                consumer._queue.get(timeout=0.05)  # it may be waiting for room
            except queue.Empty:
                pass


def ddp_on_cpu(cfg: FairseqConfig, model: Module, group: dist.ProcessGroup) -> Module:
    """Wraps a model as fairseq's ``--ddp-backend pytorch_ddp`` does, which itself wants a GPU for it."""
    names = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view")
    given = {name: getattr(cfg, name) for name in names}
    wrapped = DistributedDataParallel(model, process_group=group, **given)
    if cfg.ddp_comm_hook == "fp16":
        wrapped.register_comm_hook(group, fp16_compress_hook)
    return ModuleProxyWrapper(wrapped)


def leave_process_group() -> None:
    """Ends the process group of a synchronous run in order. Collective: every rank calls it.

    A process that has used DistributedDataParallel over Gloo aborts at its exit about once in five runs. Collecting
    the wrapped model before the group is destroyed prevents it; a barrier alone does not.
    """
    if dist.is_initialized():
        dist.barrier()
        gc.collect()
        dist.destroy_process_group()
    sys.stdout.flush()
