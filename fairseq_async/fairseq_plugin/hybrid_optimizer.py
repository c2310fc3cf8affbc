"""The optimizer of ``--optimizer hybrid_async``: each step sends a gradient to the server, whose optimizer steps."""

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from fairseq.optim import FairseqOptimizer
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import flags
from fairseq_async.fairseq_plugin.compat.checkpoints import of_another_optimizer
from fairseq_async.fairseq_plugin.compat.precision import finite_norm, overflows
from fairseq_async.fairseq_plugin.compat.types import StateDict
from fairseq_async.fairseq_plugin.session import attach
from fairseq_async.protocol import Report, Welcome
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.start.context import WorkerContext

_NO_TOKENS = 1e-9  # weight of batches without a target token: they move no mean, and alone they step as in fairseq
_SERVER_CLIPS = (
    "with hybrid_async the server clips, by --clip-norm, what the worker sends: give --clip-norm 0 and clip with "
    "torch.nn.utils.clip_grad_norm_, or use --optimizer local_sgd"
)
_ONE_GRADIENT = (
    "with hybrid_async each update is one gradient, by which the server counts steps and the learning rate; "
    "use --optimizer local_sgd, where the task may step as it likes"
)


def step_error(what: str) -> ConfigurationError:
    """Returns the error for a task that steps otherwise than once with each gradient."""
    return ConfigurationError(f"{what}: {_ONE_GRADIENT}")


def clip_error(what: str) -> ConfigurationError:
    """Returns the error for a task that clips, or changes what is clipped."""
    return ConfigurationError(f"{what}: {_SERVER_CLIPS}")


class RemoteOptimizer(Optimizer):
    """Holds the parameters, and the learning rate for fairseq's log; the server has the moments, and steps.

    Hooks before and after the step find what they would find in an optimizer of torch's.

    Args:
        lr: the first learning rate.
        exchange: sends the gradients to the server and takes its parameters.
    """

    def __init__(self, parameters: Iterable[Parameter], lr: float, exchange: Callable[[], None]) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.0})
        self._exchange = exchange
        self.take_rate(lr)

    @property
    def has_hooks(self) -> bool:
        """Whether something may change gradients just before a step."""
        return bool(self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)

    def take_rate(self, lr: float) -> None:
        """Takes the server's learning rate."""
        for group in self.param_groups:
            group["lr"] = lr
        self._given = self._options()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Exchanges.

        Raises:
            ConfigurationError: the task has changed what the server would not take over.
        """
        if closure is not None:
            raise step_error("the task calls optimizer.step(closure)")
        if self._options() != self._given:
            raise ConfigurationError(
                "the optimizer's param_groups were changed here (set_lr, a learning rate or weight decay by hand), and "
                "with hybrid_async the server steps: use --lr-scheduler, or --optimizer local_sgd"
            )
        self._exchange()

    def _options(self) -> list[StateDict]:
        return [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]

    @property
    def state(self) -> Any:
        """Nothing.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "the task reads or changes the optimizer's state, and with hybrid_async the server has the moments: leave "
            "it out, or use --optimizer local_sgd"
        )

    @state.setter
    def state(self, value: object) -> None:
        """Ignores the empty state that torch makes."""


class HybridAsync(FairseqOptimizer):
    """An optimizer that sends gradients to the server and takes parameters from it.

    The inner optimizer steps in the server, in fp32. The fp32 masters of a half-precision model are the server's
    parameters, so no copy of them is kept here. Checkpoints hold the name of this class, by which fairseq knows them.

    Args:
        named: the model's trainable parameters with their names.
        client: the connection to the server.
        scaler: the dynamic loss scale of an fp16 model.
        barrier: whether the server answers only when the step is taken.
        changes_gradients: whether the task may change gradients after fairseq has clipped them.
        context: which rank of which worker this is.

    Attributes:
        worker: the worker side of the method, which has the parameters and exchanges them.
        report: the data about the next update that goes to ``events.jsonl``.
        dummy: whether the present batch is a dummy, which only fills up an epoch.
        tokens, losses: what the criterion says that the batches of this step have; or their sums over the ranks.
        restored: a checkpoint's state, with the server's in it, until this worker joins.
    """

    def __init__(
        self,
        cfg: Namespace,
        named: Sequence[tuple[str, Parameter]],
        client: ServerConnection,
        scaler: DynamicLossScaler | None,
        barrier: bool,
        changes_gradients: bool = False,
        context: WorkerContext = WorkerContext(),  # noqa: B008  it is frozen
    ) -> None:
        super().__init__(cfg)
        self.scaler, self.barrier = scaler, barrier
        # FP16Optimizer, which steps fp32 masters without this method, has zeros for missing gradients
        zeros = scaler is not None or any(p.dtype is torch.bfloat16 for _, p in named)
        self.worker, self._ranks = HybridWorker(client, named, zeros, context.rank == 0), context.island_size
        self._clips, self._changes_gradients = cfg.clip_norm > 0, changes_gradients
        self._scales_into_slot = context.island_size == 1 and all(
            p.is_cpu and p.dtype is torch.float32 for _, p in named
        )
        self._optimizer = RemoteOptimizer([p for _, p in named], cfg.lr[0], self._exchange)
        self.report = Report()
        self.dummy = False
        self.restored: StateDict | None = None
        self._norm: float | None = None  # from the clipping to the step
        self._reset_step()

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds the method's flags; fairseq calls this for the optimizer that is chosen."""
        flags.add_server_method(parser, "hybrid_async")
        attach(sys.modules)

    # What fairseq's trainer calls in one step, in its order. Ranks of a worker reduce before multiply_grads.

    def zero_grad(self) -> None:
        """Clears the gradients, and begins a step."""
        super().zero_grad()
        self._reset_step()

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of one batch; called once for each batch of the step."""
        self.losses.append(loss.detach())  # read when the step is over: a GPU would be waited for
        super().backward(loss if self.scaler is None else self.scaler.scale(loss))

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiplies the gradients by ``c``, which is ranks / tokens; the update's weight is these tokens.

        Gradients in half precision, or on a GPU, are multiplied on their way into the slot, in fp32. A task may
        multiply them too: the last call before fairseq clips is the trainer's.
        """
        if self._norm is None:
            no_tokens = self.tokens and not any(map(float, self.tokens))  # fairseq divides by 1 then
            weight = self._ranks / float(c)
            self._weight = 0.0 if self.dummy else _NO_TOKENS if no_tokens else round(weight, 9) or weight
        if self._scales_into_slot:
            return self.worker.scale_into_slot(float(c))
        self._factor *= float(c)
        if self._is_sent:
            self.worker.write_ahead(self._factor)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Returns the norm of this worker's gradient for the log, and clips nothing: the server clips the mean.

        A norm that is not finite does not end the run: the server refuses the update, or the loss scale was too large
        and the batch is skipped.

        Raises:
            ConfigurationError: the task clips too.
        """
        if self._norm is not None:
            raise clip_error("the task calls optimizer.clip_grad_norm beside fairseq's trainer")
        written = self.worker.written_norm() if self._ranks == 1 else None
        norm: Tensor = self._factor * super().clip_grad_norm(0.0) if written is None else written
        self._skip = self.scaler is not None and overflows(self.scaler, norm)
        self._norm = float(norm)
        return finite_norm(norm)

    def step(self, closure: object = None, scale: float = 1.0, groups: object = None) -> None:
        """Pushes the mean gradient, waits for the receipt and pulls the parameters if they have changed.

        Raises:
            ConfigurationError: the task does what the server would not take over.
            AsyncError: the last updates had NaN or Inf; or the server is gone, and this update may be lost.
        """
        if scale != 1.0:
            self.multiply_grads(1.0 / scale)
        self._optimizer.step(closure)

    def _exchange(self) -> None:
        self._check_clipping()
        norm, self._norm = self._norm, None
        if self._skip or not self._is_sent:
            return
        report = replace(self.report, loss=self._mean_loss())
        self.worker.exchange(partial(self.worker.write, factor=self._factor), self._weight, report, norm)
        for parameter in self.params:
            parameter.grad = None  # it may lie in the slot, which is the server's now
        self.take_rate(self.worker.learning_rate)
        if self.scaler is not None:
            self.scaler.update()

    def _check_clipping(self) -> None:
        if self._norm is None:
            raise step_error("the task calls optimizer.step() beside fairseq's trainer")
        if self._clips and (self._changes_gradients or self._optimizer.has_hooks) and not self._skip:
            norm = float(self._factor * super().clip_grad_norm(0.0))
            if math.isfinite(self._norm) and not math.isclose(norm, self._norm, rel_tol=1e-4):
                changed = "the task's optimizer_step, or a hook before optimizer.step(), changes gradients"
                raise clip_error(f"--clip-norm {self.cfg.clip_norm:g}: {changed}")

    @property
    def awaits_step(self) -> bool:
        """Whether there is a gradient that was clipped and not stepped."""
        return self._norm is not None

    def take_rate(self, lr: float) -> None:
        """Takes the server's learning rate, for fairseq's log."""
        self._optimizer.take_rate(lr)

    # The server's state

    def start_from(self, welcome: Welcome) -> None:
        """Starts from the server's parameters, and from the server's count of this worker's earlier updates."""
        self.worker.begin(welcome)
        self.worker.restore_compressor((self.restored or {}).get("compressor"))
        self.restored = None
        self.take_rate(self.worker.learning_rate)

    def load_state_dict(self, state_dict: StateDict, optimizer_overrides: StateDict | None = None) -> None:
        """Keeps a checkpoint's server state until this worker joins; the server has the overrides from the method's
        description, since it may go on from a snapshot of its own.

        Raises:
            ConfigurationError: ``state_dict`` is not of a ``hybrid_async`` run.
        """
        if "server" not in state_dict:
            raise of_another_optimizer("hybrid_async")
        if self.scaler is not None and "loss_scale" in state_dict:
            self.scaler.loss_scale = state_dict["loss_scale"]
        self.restored = state_dict

    def reset_restored(self, schedule: bool, positions: bool) -> None:
        """Drops from a checkpoint's server state what --reset-lr-scheduler and --reset-dataloader reset."""
        if self.restored is not None and schedule:
            self.restored["server"]["rule"]["schedule"] = None
        if self.restored is not None and positions:
            self.restored |= {"positions": {}, "plan": {"epochs": 0.0}}
            self.restored.get("shares", {}).pop("dealer", None)

    def state_dict(self) -> StateDict:
        """Returns the state that only this worker holds; the trainer adds what it has fetched from the server."""
        scale = {} if self.scaler is None else {"loss_scale": self.scaler.loss_scale}
        compressor = self.worker.compressor_state()
        return scale if compressor is None else scale | {"compressor": compressor}

    # What fairseq asks of every optimizer

    @property
    def optimizer_config(self) -> dict[str, float]:
        return {"lr": self.cfg.lr[0]}

    @property
    def supports_flat_params(self) -> bool:
        return True

    def _reset_step(self) -> None:
        self._factor = 1.0 if self.scaler is None else 1.0 / float(self.scaler.loss_scale)
        self._weight, self._skip = 0.0, False
        self._norm = None
        self.losses: list[Tensor] = []
        self.tokens: list[float | Tensor] = []

    @property
    def _is_sent(self) -> bool:
        """Whether this step's gradient goes to the server.

        A dummy's gradient goes only behind a barrier, with weight 0: the others wait for every worker's update.
        """
        return self.barrier or not self.dummy

    def _mean_loss(self) -> float:
        """Returns the step's loss in nats per target token, as the criterion computes it; fairseq's log has bits."""
        total = reduce(add, map(float, self.losses), 0.0)
        return total / self._weight if self._weight > _NO_TOKENS else 0.0
