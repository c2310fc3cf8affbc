"""A fairseq user directory: plain fairseq that takes ``--bf16`` and ``--ddp-backend pytorch_ddp`` on a CPU.

fairseq takes a bf16 run for one on TPUs, and gives torch's DistributedDataParallel the number of a GPU.
"""

from functools import partial
from typing import Any

from fairseq.models import distributed_fairseq_model
from fairseq_cli import train
from torch.nn.parallel import DistributedDataParallel

from fairseq_async.fairseq_plugin.compat.precision import convert_without_tpu


def _without_devices(device_ids: Any, output_device: Any, **given: Any) -> DistributedDataParallel:
    return DistributedDataParallel(**given)


distributed_fairseq_model.DistributedDataParallel = _without_devices
train.convert_namespace_to_omegaconf = partial(convert_without_tpu, train.convert_namespace_to_omegaconf)
