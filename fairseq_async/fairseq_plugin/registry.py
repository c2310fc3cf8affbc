"""The methods of ``--optimizer``: what the plugin trains with for each name."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from fairseq.optim import FairseqOptimizer, register_optimizer

from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject
from fairseq_async.method.spec import MethodSpec


@dataclass(frozen=True)
class AsynchronousMethod:
    """A method whose workers exchange updates with a server.

    Attributes:
        trainer: makes a worker's trainer, from its session and what fairseq's own trainer takes.
        describe: returns what all workers must agree on, from the flags, the configuration and the number of workers.
        server: returns the name of the module that is the server's program, from the flags.
    """

    trainer: Callable[..., FairseqObject]
    describe: Callable[[Namespace, FairseqConfig, int], MethodSpec]
    server: Callable[[Namespace], str]


@dataclass(frozen=True)
class SynchronousMethod:
    """A method that changes how fairseq's data-parallel group reduces gradients or steps. It has no server.

    Attributes:
        trainer: makes a rank's trainer, from what fairseq's own trainer takes.
        check: raises a ConfigurationError for flags that do not go together.
    """

    trainer: Callable[..., FairseqObject]
    check: Callable[[FairseqConfig], None]


Method = AsynchronousMethod | SynchronousMethod

METHODS: dict[str, Method] = {}


def register_method(name: str, optimizer: type[FairseqOptimizer], method: Method) -> None:
    """Adds ``--optimizer NAME``.

    Args:
        optimizer: the class whose ``add_args`` adds the method's flags, and calls
            :func:`~fairseq_async.fairseq_plugin.session.attach`.
        method: the trainer, and what else the method needs.
    """
    register_optimizer(name)(optimizer)
    METHODS[name] = method
