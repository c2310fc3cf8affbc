"""``--optimizer adasum``: Adasum in place of the all-reduce of fairseq's data-parallel group."""

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from fairseq_async.collective.adasum import DistributedAdasum, NodeAdasum, RankStates, check_dense
from fairseq_async.collective.agreement import check_equal
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import flags, refused
from fairseq_async.fairseq_plugin.compat.checkpoints import of_another_optimizer
from fairseq_async.fairseq_plugin.compat.precision import has_flat_master
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject, StateDict
from fairseq_async.fairseq_plugin.session import attach
from fairseq_async.fairseq_plugin.synchronous.trainer import SynchronousTrainer, WrappedOptimizer

_PLAIN = {"sgd", "nag"}
_Aggregate = Callable[[Tensor], Tensor]


class AdasumOptimizer(WrappedOptimizer):
    """An optimizer that combines the ranks' gradients, or their steps, by Adasum.

    Gradient form: the ranks' mean gradients are combined, then every rank's inner optimizer takes the same step.
    Delta form: every rank's inner optimizer takes a step by the rank's own mean gradient, these steps are combined,
    and every rank takes the result. Moments are then each rank's own. Parameters are equal on all ranks in both.

    The trainer sets, before it calls anything:

    Attributes:
        group: the process group of the ranks.
        combine: combines tensors across the ranks by Adasum, in place.
        share: factor for the sum of this rank's gradients; 0 for a rank whose batch is only there to fill up an epoch.
        sizes: sizes of the parameters in the one flat master that fairseq makes of a half-precision model; else empty.
    """

    def __init__(self, args: Namespace, params: Iterable[Parameter]) -> None:
        super().__init__(args, params)
        self.options = flags.adasum_options(args)
        inner = args.inner_optimizer
        self.form = self.options.form_for(f"--inner-optimizer {inner}", adaptive=inner not in _PLAIN)
        self.group: dist.ProcessGroup | None = None
        self.combine: Callable[[Sequence[Tensor]], None]
        self.share = 1.0
        self.sizes: list[int] = []
        self.states = RankStates(self.optimizer)
        self.steps = 0

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds the method's flags; fairseq calls this for the optimizer that is chosen."""
        flags.add_synchronous_method(parser, "adasum", legacy=True)
        attach(sys.modules)

    # What fairseq's trainer calls in one step, in its order

    def all_reduce_grads(self, module: nn.Module) -> None:
        """Scales the gradients to this rank's mean; in the gradient form, also combines them across the ranks.

        Every rank combines the same tensors: a parameter that no loss of this rank depends on gets a gradient of zeros.
        """
        parameters = [each for each in module.parameters() if each.requires_grad and not hasattr(each, "expert")]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        check_dense(gradients)
        torch._foreach_mul_(gradients, self.share)
        if self.form == "gradient":
            self.combine(gradients)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: _Aggregate | None = None) -> Tensor:
        """Clips gradients by their norm.

        In the delta form, that norm is the root mean square of the ranks' norms: all ranks clip by one factor, and all
        see a NaN.
        """
        together = self._mean_norm if self.form == "delta" else aggregate_norm_fn
        norm: Tensor = super().clip_grad_norm(max_norm, together)
        return norm

    def step(self, closure: object = None, scale: float = 1.0, groups: object = None) -> None:
        """Steps the inner optimizer; in the delta form every rank then takes the combined step in place of its own."""
        if self.form == "gradient" or self.skip:
            return super().step(closure, scale, groups)
        tensors = self._tensors()
        before = [tensor.clone() for tensor in tensors]
        super().step(closure, scale, groups)
        torch._foreach_sub_(tensors, before)
        if not self.share:
            torch._foreach_zero_(tensors)
        self.combine(tensors)
        self._clip(tensors)
        torch._foreach_add_(tensors, before)
        self.steps += 1
        if self.options.sync_state and self.steps % self.options.sync_state == 0:
            self.states.average(self.group)

    # Checkpoints

    def gather(self) -> None:
        """Collects the other ranks' optimizer states on rank 0, in the delta form. Collective: all ranks call it."""
        if self.form == "delta":
            self.states.gather(self.group)

    def state_dict(self) -> StateDict:
        """Returns this rank's inner optimizer state, and those of the other ranks that were gathered."""
        own = {"steps": self.steps, "ranks": self.states.gathered}
        self.states.gathered = []
        return {**self.inner.state_dict(), "adasum": own}

    def load_state_dict(self, state_dict: StateDict, optimizer_overrides: StateDict | None = None) -> None:
        """Restores this rank's own state in the delta form, and rank 0's in the gradient form.

        From a checkpoint of another number of ranks every rank has the mean of all states.
        """
        if "adasum" not in state_dict:
            raise of_another_optimizer("adasum")
        own = state_dict["adasum"]
        self.steps = own["steps"]
        state = self.states.of_this_rank(state_dict["state"], own["ranks"], self.group)
        super().load_state_dict({**state_dict, "state": state}, optimizer_overrides)

    # Details

    def _tensors(self) -> list[Tensor]:
        """Returns the tensors that Adasum combines one by one: the parameters, or their parts of the flat master."""
        parts: list[Tensor] = []
        for parameter in self.params:
            parts += parameter.data.view(-1).split(self.sizes) if self.sizes else [parameter.data]
        return parts

    def _mean_norm(self, norm: Tensor) -> Tensor:
        numbers = torch.stack(
            [norm.double().square(), torch.full_like(norm, float(self.share > 0), dtype=torch.float64)]
        )
        dist.all_reduce(numbers, group=self.group)
        return (numbers[0] / numbers[1].clamp_min(1)).sqrt().to(norm.dtype)

    def _clip(self, deltas: list[Tensor]) -> None:
        if self.options.clip_delta:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(deltas)), dtype=torch.float64)
            torch._foreach_mul_(deltas, (self.options.clip_delta / norm).clamp(max=1.0).to(deltas[0].dtype))


class AdasumTrainer(SynchronousTrainer):
    """The trainer of ``--optimizer adasum``; tells :class:`AdasumOptimizer` the ranks, and this rank's share."""

    @classmethod
    def check(cls, cfg: FairseqConfig) -> None:
        """Checks the flags.

        Raises:
            ConfigurationError: flags that do not go together, or a run of one rank.
        """
        refused.check_synchronous(cfg.optimizer, cfg, legacy=True)
        options = flags.adasum_options(cfg.optimizer)
        inner = cfg.optimizer.inner_optimizer
        options.form_for(f"--inner-optimizer {inner}", inner not in _PLAIN)
        if cfg.distributed_training.distributed_world_size == 1:
            raise ConfigurationError(
                "--optimizer adasum combines the gradients of several ranks, and this run has one: start it with "
                "fairseq-async launch --workers N or with torchrun, without --distributed-world-size"
            )

    def __init__(self, *args: FairseqObject, **kwargs: FairseqObject) -> None:
        super().__init__(*args, **kwargs)
        self._combine: DistributedAdasum | NodeAdasum | None = None

    def _build_optimizer(self) -> None:
        super()._build_optimizer()
        wrapped, group = self.wrapped, self.data_parallel_process_group
        if self._combine is None:
            nodes = wrapped.options.hierarchy == "node"
            self._combine = NodeAdasum(group, device=self.device) if nodes else DistributedAdasum(group)
        wrapped.group, wrapped.combine = group, self._combine
        if has_flat_master(self.optimizer):
            wrapped.sizes = [parameter.numel() for _, parameter in self.trainable_parameters()]

    def begin_epoch(self, epoch: int) -> None:
        """Checks that all ranks have the same parameters, which Adasum relies on and would not restore."""
        check_equal(self.trainable_parameters(), self.data_parallel_process_group)
        super().begin_epoch(epoch)

    def _aggregate_logging_outputs(
        self, logging_outputs: FairseqObject, sample_size: FairseqObject, *more: object, **kwargs: object
    ) -> FairseqObject:
        """Sums the logging outputs of all ranks, and sets this rank's share.

        The share is set here, where the tokens of all ranks are known: fairseq will divide the sum of all gradients by
        them.
        """
        outputs, totals = super()._aggregate_logging_outputs(logging_outputs, sample_size, *more, **kwargs)
        if self._in_step:
            own, total = math.fsum(self._weights), float(totals[0]) or 1.0
            mean = self._combine.share(own) if isinstance(self._combine, NodeAdasum) else 1 / own if own else 0.0
            self.wrapped.share = mean * total / self.data_parallel_world_size
        return outputs, totals

    def consolidate_optimizer(self) -> None:
        """Gathers the ranks' optimizer states. fairseq calls this on all ranks before it writes a checkpoint.

        After an error in a step, fairseq calls it on this rank alone, where a collective call would wait for ever:
        nothing is gathered then.
        """
        super().consolidate_optimizer()
        if not (self._in_step or self.cfg.checkpoint.no_save_optimizer_state):
            self.wrapped.gather()
