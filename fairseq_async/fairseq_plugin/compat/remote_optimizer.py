"""What a task finds as its optimizer under ``hybrid_async``: a step there is an exchange with the server."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.types import StateDict

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
