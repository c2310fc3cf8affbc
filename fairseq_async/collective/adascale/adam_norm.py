"""The norm of a gradient after Adam's preconditioning."""

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from fairseq_async.collective.adascale.square_norms import norm_of
from fairseq_async.errors import ConfigurationError

# for each parameter: the tensor that the optimizer steps for it, and where the parameter's elements begin in it
Masters = Mapping[Tensor, tuple[Tensor, int]]
_Kind = tuple[float, float, torch.dtype, torch.device]  # 1/√(1 − β₂ᵗ), eps, and type and device of v


class AdamNorm:
    """Computes |g / (√v̂ + eps)|, with v̂ from the optimizer's state before this step.

    A parameter counts after :attr:`STEPS` of its steps, because v̂ is not yet a scale before. An element counts after
    its first gradient, because at v = 0 its factor 1/eps would drown all others.

    Keeps √v̂ + eps, as large as the parameters, for all gradients of a step.

    Args:
        optimizer: Adam, or one that keeps ``exp_avg_sq`` and ``step`` for each parameter as Adam does.
        masters: the tensors that the optimizer steps for the parameters; see :class:`AdaScale`.

    Raises:
        ConfigurationError: on a call, if the optimizer does not keep ``exp_avg_sq``.
    """

    STEPS = 5
    """Number of its steps after which a parameter counts."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Masters | None = None) -> None:
        self.optimizer = optimizer
        self._masters = masters
        # for each parameter that counts: √v̂ + eps, and memory for a gradient divided by it; None when out of date
        self._ready: dict[Tensor, tuple[Tensor, Tensor]] | None = None
        self._memory: dict[str, Tensor] = {}

    def __call__(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        if self._ready is None:
            self._ready = self._prepare()
        ready = self._ready.get(parameter)
        return None if ready is None else norm_of(torch.div(gradient.detach(), ready[0], out=ready[1]))

    def invalidate(self) -> None:
        """Discards √v̂ + eps. Must be called after the optimizer has stepped or loaded a state, which changes v̂."""
        self._ready = None

    def _prepare(self) -> dict[Tensor, tuple[Tensor, Tensor]]:
        """Computes √v̂ + eps of all parameters.

        Tensors of one kind are processed end to end: most of a Transformer's are so small that a call costs more than
        its work.
        """
        ready = {}
        for number, ((factor, eps, dtype, device), seconds) in enumerate(self._second_moments().items()):
            sizes = [second.numel() for second in seconds.values()]
            roots = self._memory_for(f"roots {number}", dtype, device, sum(sizes))
            torch.cat(list(seconds.values()), out=roots)
            roots.sqrt_()
            torch.nn.functional.threshold(roots, 0.0, math.inf, inplace=True)  # an element with √0 does not count
            torch.add(roots.new_tensor(eps), roots, alpha=factor, out=roots)
            scratch = self._memory_for(f"scratch {number}", dtype, device, max(sizes))
            for parameter, part in zip(seconds, roots.split(sizes), strict=True):
                ready[parameter] = part.view(parameter.shape), scratch[: part.numel()].view(parameter.shape)
        return ready

    def _second_moments(self) -> dict[_Kind, dict[Tensor, Tensor]]:
        """Returns v of the parameters that count, flat, grouped by what else √v̂ + eps needs."""
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

    def _memory_for(self, name: str, dtype: torch.dtype, device: torch.device, size: int) -> Tensor:
        """Memory that is kept from step to step, because new memory is slow at first touch."""
        memory = self._memory.get(name)
        if memory is None or (memory.dtype, memory.device, memory.numel()) != (dtype, device, size):
            memory = self._memory[name] = torch.empty(size, dtype=dtype, device=device)
        return memory
