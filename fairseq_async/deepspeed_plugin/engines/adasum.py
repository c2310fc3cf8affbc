"""DeepSpeed's engine for Adasum."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fairseq_async.collective.adasum import DistributedAdasum, NodeAdasum, RankStates
from fairseq_async.deepspeed_plugin.engines import tensors
from fairseq_async.deepspeed_plugin.engines.checkpoints import checkpoint_directory
from fairseq_async.deepspeed_plugin.engines.engine import ClientState
from fairseq_async.deepspeed_plugin.engines.synchronous import SynchronousEngine, on_any_rank
from fairseq_async.options.config import AdasumOptions
from fairseq_async.worker.start.process import errors_in_one_line


class SingleRankGroups:
    """A model-parallel unit (``mpu``) for ``deepspeed.initialize`` in which every rank is alone in its groups.

    With it DeepSpeed reduces no gradients, and ZeRO divides nothing: every rank has whole optimizer states. Every rank
    must make one, at the same point: making process groups is a collective call.
    """

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        # all ranks make all groups, in the same order, as dist.new_group demands
        self._group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][self._rank]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The group of this rank alone."""
        return self._group

    get_model_parallel_group = get_data_parallel_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The ranks in the group: this rank alone."""
        return [self._rank]

    def get_data_parallel_rank(self) -> int:
        """This rank's number in the group: 0."""
        return 0

    get_model_parallel_rank = get_data_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        """The size of the group: 1."""
        return 1

    get_model_parallel_world_size = get_data_parallel_world_size


class AdasumEngine(SynchronousEngine):
    """The engine of Adasum: combines the ranks' gradients, or the changes that the ranks' own steps make.

    DeepSpeed must have been given :class:`SingleRankGroups`. ZeRO 1 and 2 then have nothing to divide.
    """

    options: AdasumOptions

    def set_up(self, options: AdasumOptions) -> None:
        """Sets the attributes of this class; all ranks call it.

        Raises:
            ConfigurationError: the configuration does not go with Adasum, or the ranks differ.
        """
        self.set_up_group(options)
        name = type(self.basic_optimizer).__name__
        self.form = options.form_for(f"the optimizer {name}", adaptive="sgd" not in name.lower())
        device = torch.device(self.device)
        self._combine = NodeAdasum(device=device) if options.hierarchy == "node" else DistributedAdasum()
        self._replica, self._unstepped = tensors.replica_of(self, rank=0), tensors.unstepped(self)
        self._states = RankStates(self.basic_optimizer)

    @errors_in_one_line()
    def _backward_epilogue(self) -> None:
        """Ends a backward pass as DeepSpeed does. A gradient of a parameter that the engine does not step, which no
        rank would combine with the others', ends the process with one line."""
        super()._backward_epilogue()
        tensors.check_unstepped(self._unstepped)

    def save_checkpoint(self, save_dir: str, tag: str | None = None, *args: object, **kwargs: object) -> object:
        """Saves on every rank as DeepSpeed does, since the ranks' optimizer states may differ.

        Rank 0's checkpoint is in ``save_dir``, that of rank n in its subdirectory ``worker-n``.
        """
        tag = f"global_step{self.global_steps}" if tag is None else tag
        return super().save_checkpoint(checkpoint_directory(save_dir, self.worker), tag, *args, **kwargs)

    @errors_in_one_line()
    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any
    ) -> tuple[str | None, ClientState]:
        """Loads this rank's checkpoint; a rank without one starts with rank 0's optimizer state. Where there is no
        checkpoint, all ranks begin anew, as with DeepSpeed."""
        own = checkpoint_directory(load_dir, self.worker)
        if tag is None:
            tag = _latest_tag(load_dir)
        return super().load_checkpoint(own if (Path(own) / str(tag)).is_dir() else load_dir, tag, *args, **kwargs)

    @errors_in_one_line()
    def _take_model_step(self, lr_kwargs: dict[str, object] | None) -> None:
        """Combines and steps where DeepSpeed would only step, after the last micro-batch."""
        gradients = tensors.step_gradients(self)
        if self.form == "gradient":
            self._combine(gradients)
            bad = not tensors.all_finite(gradients)  # the same on all ranks, which have the same gradients now
        else:
            bad = on_any_rank(not tensors.all_finite(gradients), gradients[0].device)
            if bad:
                gradients[0].fill_(math.nan)  # so that the optimizer's own check skips the step on all ranks
        if self._skip_step(bad):
            return
        if self.form == "gradient" or bad:
            super()._take_model_step(lr_kwargs)
        else:
            self._step_and_combine(lr_kwargs, gradients[0].device)

    def _step_and_combine(self, lr_kwargs: dict[str, object] | None, device: torch.device) -> None:
        """Steps in the delta form: on this rank alone; then the Adasum of all ranks' changes replaces this one's."""
        start = torch.zeros(self._replica.layout.size, device=device)
        self._replica.read(start)
        super()._take_model_step(lr_kwargs)
        delta = start.clone()
        self._replica.subtract(delta)
        self._combine([view.view(-1) for view in self._replica.layout.views(delta)])
        if self.options.clip_delta:
            delta.mul_((self.options.clip_delta / delta.norm()).clamp(max=1.0))
        self._replica.write(start.sub_(delta))
        if self.options.sync_state and self.global_steps % self.options.sync_state == 0:
            self._states.average(None)


def _latest_tag(directory: str) -> str | None:
    """Returns the tag of the last checkpoint in a directory; None if there is none, of which DeepSpeed then warns."""
    path = Path(directory) / "latest"
    return path.read_text().strip() if path.is_file() else None
