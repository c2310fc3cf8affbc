"""The flags of ``--optimizer local_sgd``: one for each of the method's options, with the option's name."""

from argparse import ArgumentParser, Namespace
from typing import Any

from omegaconf import DictConfig

from fairseq_async.fairseq_plugin.options import (
    add_run_arguments,
    check_common,
    check_processes,
    inner_class,
    run_options,
)
from fairseq_async.worker.config import OUTER, LocalSGDOptions, checked

_HELP = {
    "outer": f"what the server does with the workers' local steps: {', '.join(OUTER)} (delayed_nesterov)",
    "local_steps": "steps that the fastest worker takes between two exchanges (50)",
    "outer_lr": "outer learning rate, of as many arrivals as there are workers (0.7)",
    "outer_momentum": "outer Nesterov momentum (0.9)",
    "delay": "arrivals between two momentum steps of delayed_nesterov (default: number of workers)",
    "c": "share of the momentum in each step of delayed_nesterov, in [0, 1/delay] (0)",
    "buffer_size": "updates that buffered_nesterov averages (default: number of workers)",
    "dynamic_local_steps": "a slower worker takes fewer local steps (DyLU)",
    "grace_period": "seconds for which an update waits for others to start again together with",
    "staleness_power": "weight (1 + staleness)^power of a late update, as -0.5 (0)",
    "staleness_limit": "drop updates of a higher staleness",
    "delay_compensation": "lambda of delay compensation (0)",
    "overlap": "go on computing while the server's answer is on its way",
    "max_refused": "end a worker when this many of its updates, or local gradients, in a row had NaN or Inf (3)",
}
_TYPES = {"outer": str, "outer_lr": float, "outer_momentum": float, "c": float, "grace_period": float}
_SWITCHES = ("dynamic_local_steps", "overlap")
_TYPES |= {"staleness_power": float, "delay_compensation": float}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds our flags and the inner optimizer's, which fairseq would add if it were the optimizer."""
    parser.add_argument(
        "--inner-optimizer", default="adam", metavar="NAME", help="fairseq optimizer of a worker (adam)"
    )
    for name, text in _HELP.items():
        flag = _flag(name)
        if name in _SWITCHES:
            parser.add_argument(flag, dest=_dest(name), action="store_true", default=None, help=text)
        else:
            kind, unit = _TYPES.get(name, int), name.split("_")[-1].upper()
            parser.add_argument(flag, dest=_dest(name), type=kind, metavar=unit, help=text)
    add_run_arguments(parser)
    inner_class(check_processes()).add_args(parser)


def options_of(args: Namespace, cfg: DictConfig) -> LocalSGDOptions:
    """What the flags say.

    Raises:
        ConfigurationError: a value out of its range, or a flag that its method does not use.
    """
    values = {name: getattr(args, _dest(name)) for name in _HELP}
    given = {name: value for name, value in values.items() if value is not None}
    run = {"total_steps": cfg.optimization.max_update, "seed": cfg.common.seed}
    return checked(LocalSGDOptions, given | run, "--optimizer local_sgd", spell=_spell)


def describe(args: Namespace, cfg: DictConfig, workers: int) -> dict[str, Any]:
    """The method in JSON's types: what the server builds, and what must be equal on all workers.

    Raises:
        ConfigurationError: options that are out of range or do not go together.
    """
    check_common(args, cfg)
    described = options_of(args, cfg).describe(workers, shards=[])
    return (
        described
        | run_options(args).describe()
        | {
            "max_epoch": cfg.optimization.max_epoch,
            "inner_optimizer": args.inner_optimizer,
            "update_freq": list(cfg.optimization.update_freq),
            "synchronous": False,
        }
    )


def _dest(name: str) -> str:
    """fairseq takes a flag of any component for its own where the names are alike, as --buffer-size."""
    return f"local_sgd_{name}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _spell(name: str) -> str:
    return {"total_steps": "--max-update"}.get(name, _flag(name))
