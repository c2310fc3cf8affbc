"""The length that an Adam step sees in a gradient."""

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from fairseq_async.collective.square_norms import norm_of
from fairseq_async.errors import ConfigurationError

# the tensor that an optimizer steps for a parameter, and where the parameter's elements begin in it
Masters = Mapping[Tensor, tuple[Tensor, int]]
_Kind = tuple[float, float, torch.dtype, torch.device]  # factor of √v, eps


class AdamNorm:
    """|g / (√v̂ + eps)|, with v̂ of the step before.

    Args:
        optimizer: Adam, or one that keeps ``exp_avg_sq`` and ``step`` for a parameter as it does. A parameter counts
            after :attr:`STEPS` of its steps, because v̂ is no scale before; so does an element after its first gradient,
            because 1/eps would make it count alone.
        masters: where the parameters are that the optimizer steps; see :class:`AdaScale`.

    Keeps √v̂ + eps, as large as the parameters, for all the gradients of a step.

    Raises:
        ConfigurationError: on a call, if the optimizer does not keep ``exp_avg_sq``.
    """

    STEPS = 5

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Masters | None = None) -> None:
        self.optimizer = optimizer
        self._masters = masters
        # for each parameter that counts: √v̂ + eps, and room for a gradient divided by it
        self._ready: dict[Tensor, tuple[Tensor, Tensor]] | None = None
        self._memory: dict[str, Tensor] = {}

    def __call__(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        if self._ready is None:
            self._ready = self._prepare()
        ready = self._ready.get(parameter)
        return None if ready is None else norm_of(torch.div(gradient.detach(), ready[0], out=ready[1]))

    def forget(self) -> None:
        """The optimizer steps, or has loaded another state."""
        self._ready = None

    def _prepare(self) -> dict[Tensor, tuple[Tensor, Tensor]]:
        """Tensors of a kind end to end: most of a Transformer's are so small that a call takes longer than its work."""
        ready = {}
        for number, ((factor, eps, dtype, device), seconds) in enumerate(self._seconds().items()):
            sizes = [second.numel() for second in seconds.values()]
            roots = self._room(f"roots {number}", dtype, device, sum(sizes))
            torch.cat(list(seconds.values()), out=roots)
            roots.sqrt_()
            torch.nn.functional.threshold(roots, 0.0, math.inf, inplace=True)  # an element with √0 does not count
            torch.add(roots.new_tensor(eps), roots, alpha=factor, out=roots)
            scratch = self._room(f"scratch {number}", dtype, device, max(sizes))
            for parameter, part in zip(seconds, roots.split(sizes), strict=True):
                ready[parameter] = part.view(parameter.shape), scratch[: part.numel()].view(parameter.shape)
        return ready

    def _seconds(self) -> dict[_Kind, dict[Tensor, Tensor]]:
        """v of the parameters that count, flat."""
        kinds: dict[_Kind, dict[Tensor, Tensor]] = defaultdict(dict)
        groups = {master: group for group in self.optimizer.param_groups for master in group["params"]}
        masters = {master: (master, 0) for master in groups} if self._masters is None else self._masters
        for parameter, (master, start) in masters.items():
            group, state = groups[master], self.optimizer.state.get(master, {})
            steps = float(state.get("step", group.get("step", 0)))  # fused optimizers keep it in the group
            if steps < self.STEPS:
                continue
            if "exp_avg_sq" not in state:
                name = type(self.optimizer).__name__
                raise ConfigurationError(
                    f"AdaScale: adaptive=True is for Adam and its kin, and {name} keeps no exp_avg_sq"
                )
            second = state["exp_avg_sq"].reshape(-1)[start : start + parameter.numel()]
            factor = 1 / math.sqrt(1 - group["betas"][1] ** steps)
            kinds[factor, group["eps"], second.dtype, second.device][parameter] = second
        return kinds

    def _room(self, name: str, dtype: torch.dtype, device: torch.device, size: int) -> Tensor:
        """Memory that stays, because fresh memory is slow when it is touched first."""
        room = self._memory.get(name)
        if room is None or (room.dtype, room.device, room.numel()) != (dtype, device, size):
            room = self._memory[name] = torch.empty(size, dtype=dtype, device=device)
        return room
