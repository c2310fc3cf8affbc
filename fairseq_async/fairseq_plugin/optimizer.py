"""``--optimizer hybrid_async``: a worker's half. It pushes where fairseq steps, and pulls."""

import logging
import math
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import torch
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.exchange import pack
from fairseq_async.fairseq_plugin import options
from fairseq_async.server import ServerClient
from fairseq_async.worker.gradients import GradientWorker, gradient

logger = logging.getLogger(__name__)


@register_optimizer("hybrid_async")
class HybridAsync(FairseqOptimizer):
    """Sends gradients to the server and takes parameters from it; the inner optimizer steps there, in fp32.

    The fp32 masters of a half-precision model are the server's parameters, so no copy of them is kept here.

    Args:
        named: the model's trainable parameters with their names.
        client: the connection to the server.
        scaler: the dynamic loss scale of an fp16 model.
        max_refused: updates with NaN or Inf, in a row, after which the worker stops.
        barrier: whether the server answers only when the step is taken.

    Attributes:
        worker: this worker's half of the method, which has the parameters and exchanges them.
    """

    def __init__(
        self,
        cfg: Any,
        named: Sequence[tuple[str, Parameter]],
        client: ServerClient,
        scaler: DynamicLossScaler | None,
        max_refused: int,
        barrier: bool,
    ) -> None:
        super().__init__(cfg)
        self.scaler, self.barrier = scaler, barrier
        self.worker = GradientWorker(client, named, max_refused)
        self._half = any(parameter.dtype is not torch.float32 for _, parameter in named)
        self._in_memory = not self._half and all(parameter.is_cpu for _, parameter in named)
        # Steps are taken in the server: this one holds the learning rate for fairseq's logs, and the parameters.
        self._optimizer = torch.optim.SGD([p for _, p in named], lr=cfg.lr[0])
        self.report: dict[str, Any] = {}
        self._norm: float | None = None
        self.idle = False  # the batch is a dummy that fills up an epoch
        self.restored: dict[str, Any] | None = None  # a checkpoint's server state
        self._begin_batch()

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        from fairseq_async.fairseq_plugin.session import attach

        options.add_arguments(parser)
        attach(sys.modules)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        return {"lr": self.cfg.lr[0]}

    # What fairseq's trainer does in one step, in its order

    def zero_grad(self) -> None:
        super().zero_grad()
        self._begin_batch()

    def backward(self, loss: Tensor) -> None:
        self._loss += float(loss.detach())
        super().backward(loss if self.scaler is None else self.scaler.scale(loss))

    def multiply_grads(self, c: Any) -> None:
        """By 1 / tokens; half-precision gradients are multiplied when they are pushed, in fp32."""
        if self._half:
            self._factor *= float(c)
        elif self._in_memory:
            self.worker.scale_into_slot(float(c))
        else:
            super().multiply_grads(c)
        self._weight = 0.0 if self.idle else round(1.0 / float(c), 9)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        """The norm of this worker's gradient, for the log: what is clipped is the sum, in the server.

        A norm that is not finite is given as 0: it does not end the run here, because the server refuses the
        update, or because the loss scale was too large and the batch is skipped.
        """
        norm = self._factor * super().clip_grad_norm(0.0)
        self._skip = self.scaler is not None and _overflows(self.scaler, norm)
        self._norm = float(norm)
        return norm if math.isfinite(self._norm) else norm.new_zeros(())

    def step(self, closure: Any = None, scale: float = 1.0, groups: Any = None) -> None:
        """Pushes the mean gradient, waits for the receipt and pulls the parameters if they have changed.

        Raises:
            RefusedError: the last ``max_refused`` updates had NaN or Inf.
            ExchangeError: the server is gone; this update may be lost.
        """
        if self._skip or (self.idle and not self.barrier):
            return
        refused = self._norm is not None and not math.isfinite(self._norm)  # which is to be known before the next
        report = self.report | {"loss": self._bits()}
        self.worker.exchange(self._write, self._weight, report, wait=refused, norm=self._norm)
        for parameter in self.params:
            parameter.grad = None  # it may lie in the slot, which is the server's now
        self.set_lr(self.worker.learning_rate)
        if self.scaler is not None:
            self.scaler.update()

    # The server's state

    def begin(self, welcome: dict[str, Any]) -> None:
        """Takes the server's parameters, and its word on what this worker has sent before."""
        self.restored = None
        self.worker.begin(welcome)
        self.set_lr(self.worker.learning_rate)

    def take(self, state: dict[str, Any]) -> None:
        """The parameters of a snapshot."""
        self.worker.replica.write(state["server"]["parameters"])
        self.worker.version = state["server"]["version"]

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """Keeps a checkpoint's server state until this worker joins.

        Raises:
            ConfigurationError: it is not the state of a ``hybrid_async`` run.
        """
        if "server" not in state_dict:
            raise ConfigurationError("the checkpoint is of another optimizer; use --reset-optimizer")
        if self.scaler is not None and "loss_scale" in state_dict:
            self.scaler.loss_scale = state_dict["loss_scale"]
        for group in state_dict["server"]["rule"]["optimizer"]["param_groups"]:
            group.update(optimizer_overrides or {})
        self.restored = state_dict

    def forget(self, schedule: bool, positions: bool) -> None:
        """--reset-lr-scheduler and --reset-dataloader: what of a checkpoint's state is not for the server."""
        if self.restored is not None and schedule:
            self.restored["server"]["rule"]["schedule"] = None
        if self.restored is not None and positions:
            self.restored |= {"positions": {}, "plan": {"epochs": 0.0}}

    def state_dict(self) -> dict[str, Any]:
        """Only what this worker holds; the trainer adds what it has fetched from the server."""
        return {} if self.scaler is None else {"loss_scale": self.scaler.loss_scale}

    # Details

    @property
    def supports_flat_params(self) -> bool:
        return True

    def _begin_batch(self) -> None:
        self._factor = 1.0 if self.scaler is None else 1.0 / float(self.scaler.loss_scale)
        self._weight, self._loss, self._skip, self._norm = 0.0, 0.0, False, None

    def _write(self, slot: Tensor) -> None:
        gradients = map(gradient, self.params)
        pack(slot, (each.float() * self._factor for each in gradients) if self._half else gradients)

    def _bits(self) -> float:
        """Loss per token."""
        return self._loss / self._weight / math.log(2) if self._weight else 0.0


def _overflows(scaler: DynamicLossScaler, norm: Tensor) -> bool:
    """Whether the loss scale was too large for this batch; the scaler takes a smaller one."""
    try:
        scaler.check_overflow(norm)
    except OverflowError as overflow:
        logger.info("gradient overflow, batch skipped, %s", overflow)
        return True
    except FloatingPointError as error:
        raise AsyncError(str(error)) from error
    return False
