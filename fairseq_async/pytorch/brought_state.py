"""The state of optimizers that have stepped before a run, as a state from which the run's server goes on."""

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from fairseq_async.algorithms import HybridAccumulation
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError, fail
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.layout import Layout
from fairseq_async.pytorch.parameters import crc_of
from fairseq_async.server.build import build_coordinator
from fairseq_async.server.membership import Membership
from fairseq_async.server.optimizers.several import SeveralOptimizers
from fairseq_async.server.plan import Build
from fairseq_async.worker.start.server_process import say

_T = TypeVar("_T")
_LIBRARIES = ("torch", "deepspeed")
Named = Sequence[tuple[str, Parameter]]
_MOMENTS = "the state of the optimizer was {} during the run, and its moments are the server's: {}, or use local SGD"
_CHANGED = _MOMENTS.format("loaded or cleared", "do so before the run begins")
_READ = _MOMENTS.format("read", "leave that out")


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether the optimizer has moments, or another state, from steps before; Adagrad has some before its first."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)


def check_brought(spec: MethodSpec, optimizers: Sequence[Optimizer]) -> None:
    """Checks, before a worker joins, that the run's server can be given what its optimizers bring.

    Raises:
        ConfigurationError: one has stepped, and the server is in shards, or its moments are DTensors.
    """
    stepped = next((each for each in optimizers if has_stepped(each)), None)
    if stepped is not None and spec.server.shards > 1:
        raise ConfigurationError(
            f"{type(stepped).__name__} has stepped before this run, and a server in shards cannot be given its "
            "moments: leave the shards out, or make the optimizer anew"
        )
    if stepped is not None and any(isinstance(each, DTensor) for each in stepped.state):
        raise ConfigurationError(
            f"{type(stepped).__name__} has stepped before this run, and each rank has a part of its moments: make the "
            "optimizer anew, or go on from the state of a run (load_state_dict)"
        )


def checksum_of_moments(named: Named, optimizers: Sequence[Optimizer]) -> str:
    """Returns the CRC-32 of the optimizers' states, step counts among them; empty where none has stepped."""
    states = [optimizer.state.get(parameter, {}) for optimizer in optimizers for _, parameter in named]
    values = [torch.as_tensor(state[key]) for state in states for key in sorted(state) if state[key] is not None]
    return f"{crc_of(values):08x}" if values else ""


def brought_state(spec: MethodSpec, named: Named, optimizers: Sequence[Optimizer], build: Build) -> State | None:
    """Returns the state of a server that goes on with these parameters and with the optimizers' states: moments and
    step counts of each tensor by themselves. The server's own count of steps begins at 0. None if no optimizer has
    stepped.

    Args:
        named: all parameters of the run with their names, in the order of its layout.
        optimizers: in the order of the run's description, which :func:`check_brought` has checked.
        build: of the server.
    """
    if not any(map(has_stepped, optimizers)):
        return None
    layout = Layout.of(named)
    parameters = torch.cat([each.detach().to("cpu", torch.float32).flatten() for _, each in named])
    rule, plan = build(spec, layout, parameters)
    parts = rule.rules if isinstance(rule, SeveralOptimizers) else [rule]
    for part, optimizer in zip(parts, optimizers, strict=True):
        assert isinstance(part, HybridAccumulation)
        part.cut_into_tensors()
        _copy_state(optimizer, part.optimizer, named)
    coordinator = build_coordinator(spec, rule, plan, parameters, Membership(spec.workers, 0.0))
    return coordinator.state_dict() | {"method": spec.name}


def _copy_state(source: Optimizer, target: Optimizer, named: Named) -> None:
    """Copies the state of each parameter to the pieces of it that the server's optimizer steps."""
    firsts = [0, *accumulate(parameter.numel() for _, parameter in named)]  # elements of the flat vector
    for piece in (piece for group in target.param_groups for piece in group["params"]):
        start = piece.storage_offset()
        number = bisect_right(firsts, start) - 1
        first, parameter = firsts[number], named[number][1]
        part = slice(start - first, start - first + piece.numel())
        values = {
            key: _part_of(value, parameter, part, piece.shape) for key, value in source.state.get(parameter, {}).items()
        }
        if values:
            target.state[piece] = values


def _part_of(value: Any, parameter: Parameter, part: slice, shape: torch.Size) -> Any:
    """Returns what a piece has of a parameter's state: the part of a moment, and copies of all else. A step count that
    is a number, as DeepSpeed's optimizers have it, becomes a tensor, as torch's have it."""
    if value is None:
        return None
    copied = torch.as_tensor(value).detach().to("cpu", torch.float32, copy=True)
    return copied.flatten()[part].view(shape).clone() if copied.shape == parameter.shape else copied


def warn_of_missing_moments(optimizer: Optimizer, remedy: str, is_saved: Callable[[], bool]) -> None:
    """From now on, says once where a script saves the optimizer without moments, as they are the server's.

    Args:
        remedy: says what has them.
        is_saved: whether that is saved anyway.
    """
    said: list[bool] = []

    def warn(optimizer: Optimizer) -> None:
        if not (said or optimizer.state or is_saved()):
            said.append(True)
            say(
                f"warning: {type(optimizer).__name__}.state_dict() has no moments, which are the server's: a "
                f"checkpoint needs {remedy}"
            )

    optimizer.register_state_dict_pre_hook(warn)


def note_end_of_run(optimizer: Optimizer) -> None:
    """Notes that the moments of the optimizer were those of a server, and have gone with it; a warning says so at its
    next step outside of a run of hybrid."""
    if not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups):
        _left.add(optimizer)
        optimizer.register_step_pre_hook(_warn_after_run)


def _warn_after_run(optimizer: Optimizer, *of_the_step: Any) -> None:
    if optimizer in _left and not isinstance(optimizer.state, StateInServer):
        _left.discard(optimizer)
        if not has_stepped(optimizer):
            say(
                f"warning: {type(optimizer).__name__} begins anew after the run, since its moments were those of the "
                "server: put the block round the whole loop"
            )


def warn_of_run_before(optimizer: Optimizer) -> None:
    """Says that an optimizer begins another run without the moments that it had at the end of the one before."""
    if optimizer in _left and not has_stepped(optimizer):
        say(
            f"warning: {type(optimizer).__name__} begins anew, since its moments were those of the server of the run "
            "before: put the block round the whole loop, or give load_state_dict() of this run the state_dict() of that"
        )


_left: WeakSet[Optimizer] = WeakSet()


class StateInServer(defaultdict[Any, Any]):
    """The state of an optimizer during the run: empty, as the server has the moments."""

    def clear(self) -> None:
        """Ends the process with one line: a script that clears or sets moments would go on with the server's."""
        fail(_CHANGED)

    def pop(self, *of_the_script: Any) -> NoReturn:
        """See :meth:`clear`."""
        fail(_CHANGED)

    def __setitem__(self, parameter: Any, state: Any) -> NoReturn:
        fail(_CHANGED)

    def __delitem__(self, parameter: Any) -> NoReturn:
        fail(_CHANGED)

    def __missing__(self, parameter: Any) -> NoReturn:
        """Ends the process with one line: a script that reads moments, or steps a copy of the optimizer, would find
        none."""
        fail(_READ)

    # A loop over all moments, which sets or scales them, would do nothing

    def __iter__(self) -> Iterator[Any]:
        return _for_libraries(super().__iter__())

    def keys(self) -> Any:
        """As :meth:`__missing__`, and so are all that return several moments, or another value in place of one."""
        return _for_libraries(super().keys())

    def values(self) -> Any:
        """See :meth:`keys`."""
        return _for_libraries(super().values())

    def items(self) -> Any:
        """See :meth:`keys`."""
        return _for_libraries(super().items())

    def get(self, parameter: Any, default: Any = None) -> Any:
        """See :meth:`keys`."""
        return _for_libraries(default)

    def __reduce__(self) -> tuple[Any, ...]:
        return StateInServer, (dict,)

    def check(self, optimizer: Optimizer) -> None:
        """Checks that the optimizer has this state.

        Raises:
            ConfigurationError: the script has given it another.
        """
        if optimizer.state is not self:
            raise ConfigurationError(_CHANGED)


def _for_libraries(found: _T) -> _T:
    """Returns what was found if torch or DeepSpeed asks, as ``state_dict()`` does, or where an error is handled, whose
    own line would be lost: Lightning moves the moments then. Ends the process with one line for a script."""
    module = sys._getframe(2).f_globals.get("__name__", "")
    asks = module.partition(".")[0] in _LIBRARIES or sys.exc_info()[0] is not None
    return found if asks else fail(_READ)
