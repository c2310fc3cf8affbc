"""Adasum in DeepSpeed's engine."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fairseq_async.collective.adasum import DistributedAdasum, check_dense
from fairseq_async.collective.hierarchy import NodeAdasum
from fairseq_async.collective.rank_states import RankStates
from fairseq_async.deepspeed_plugin import gradients
from fairseq_async.deepspeed_plugin.group import GroupEngine, finite, on_any_rank
from fairseq_async.deepspeed_plugin.masters import replica_of
from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.config import AdasumOptions


class Alone:
    """What DeepSpeed calls a model-parallel unit: it tells every rank that it has no other in its data-parallel group,
    so DeepSpeed reduces nothing, and every rank has whole optimizer states."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][self._rank]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    get_model_parallel_group = get_data_parallel_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return [self._rank]

    def get_data_parallel_rank(self) -> int:
        return 0

    get_model_parallel_rank = get_data_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        return 1

    get_model_parallel_world_size = get_data_parallel_world_size


class AdasumEngine(GroupEngine):
    """Combines gradients, or what each rank's own step has done, by Adasum.

    Every rank is alone to DeepSpeed: with ZeRO 1 and 2 there is nothing to divide, since every rank steps by itself.
    """

    options: AdasumOptions

    def enter(self, options: AdasumOptions) -> None:
        super().enter(options)
        name = type(self.basic_optimizer).__name__
        self.form = options.form_for(f"the optimizer {name}", adaptive="sgd" not in name.lower())
        device = torch.device(self.device)
        self._combine = NodeAdasum(device=device) if options.hierarchy == "node" else DistributedAdasum()
        self._replica = replica_of(self, rank=0)
        self._states = RankStates(self.basic_optimizer)

    def save_checkpoint(self, save_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, of every rank (ranks but 0 in a directory of their own), since optimizer states may differ."""
        tag = f"global_step{self.global_steps}" if tag is None else tag
        return super().save_checkpoint(self._own(save_dir), tag, *args, **kwargs)

    def load_checkpoint(self, load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A rank without a checkpoint of its own begins with rank 0's optimizer state."""
        own = self._own(load_dir)
        if tag is None:
            tag = self._calling(_latest, load_dir)
        return super().load_checkpoint(own if (Path(own) / str(tag)).is_dir() else load_dir, tag, *args, **kwargs)

    def _own(self, directory: str) -> str:
        return directory if self.worker == 0 else str(Path(directory) / f"worker-{self.worker}")

    def _take_model_step(self, lr_kwargs: Any) -> None:
        """In place of DeepSpeed's, at the end of the micro-batches."""
        own = gradients.of(self)
        self._calling(check_dense, own)
        if self.form == "gradient":
            self._combine(own)
            bad = not finite(own)
        else:
            bad = on_any_rank(not finite(own), own[0].device)
            if bad:
                own[0].fill_(math.nan)  # for DeepSpeed's own check, which then skips on all ranks
        if self._calling(self._skips, bad):
            return
        if self.form == "gradient" or bad:
            super()._take_model_step(lr_kwargs)
            return
        start = torch.zeros(self._replica.layout.size, device=own[0].device)
        self._replica.read(start)
        super()._take_model_step(lr_kwargs)
        moved = start.clone()
        self._replica.subtract(moved)
        self._combine([view.view(-1) for view in self._replica.layout.views(moved)])
        if self.options.clip_delta:
            moved.mul_((self.options.clip_delta / moved.norm()).clamp(max=1.0))
        self._replica.write(start.sub_(moved))
        if self.options.sync_state and self.global_steps % self.options.sync_state == 0:
            self._states.average(None)


def _latest(directory: str) -> str:
    path = Path(directory) / "latest"
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; there is no checkpoint to go on with") from error
