"""``python -m fairseq_async.worker.outer``: the server of a local SGD run, for every door."""

from typing import Any

from torch import Tensor

from fairseq_async.algorithms import BufferedNesterov, DelayedNesterov, NesterovMomentum, Rule
from fairseq_async.errors import ConfigurationError
from fairseq_async.server import Layout
from fairseq_async.server.process import serve
from fairseq_async.server.rounds import Rounds


def build(method: dict[str, Any], layout: Layout, parameters: Tensor) -> tuple[Rule, Rounds]:
    """Rule and plan from a method's description.

    Raises:
        ConfigurationError: a method that there is not, or a value out of its range.
    """
    workers = int(method["workers"])
    try:
        rule = _rule(method, workers)
        plan = Rounds(
            workers=workers,
            maximum=int(method["local_steps"]),
            total_steps=int(method["total_steps"]),
            dynamic=bool(method["dynamic_local_steps"]),
            shards=[int(size) for size in method["shards"]],
            seed=int(method["seed"]),
            max_epoch=int(method.get("max_epoch", 0)),
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return rule, plan


def _rule(method: dict[str, Any], workers: int) -> Rule:
    lr, momentum = float(method["outer_lr"]), float(method["outer_momentum"])
    match method["outer"]:
        case "delayed_nesterov":
            return DelayedNesterov(lr, momentum, int(method["delay"]), float(method["c"]))
        case "diloco" | "buffered_nesterov":
            return BufferedNesterov(lr, momentum, int(method["buffer_size"]))
        case "nesterov":
            return NesterovMomentum(lr, momentum, workers)
        case "sgd":
            return NesterovMomentum(lr, 0.0, workers)
    raise ConfigurationError(f"outer {method['outer']}: there is no such method")


if __name__ == "__main__":
    serve(build)
