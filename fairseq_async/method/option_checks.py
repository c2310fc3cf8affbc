"""Checks that options of a method go together, and with those of its server."""

from fairseq_async.errors import ConfigurationError, option
from fairseq_async.method import methods
from fairseq_async.options import compression
from fairseq_async.options.config import AsyncLocalSGDOptions, HybridOptions, LocalSGDOptions, Options, ServerOptions
from fairseq_async.options.fragments import FragmentOptions


def check_fragments(options: LocalSGDOptions, server: ServerOptions | None) -> None:
    """Checks that the options go with fragments, which a worker sends one after another.

    Raises:
        ConfigurationError: they do not.
    """
    if not (isinstance(options, FragmentOptions) and options.in_fragments):
        return
    given = option("fragments" if options.fragments > 1 else "fragment_delay")
    if methods.outer_rule(options.outer).synchronous or getattr(options, "quorum", 0):
        raise ConfigurationError(
            f"{option('outer')} {options.outer} does not go with {given}: workers are at different fragments in a round"
        )
    if server is not None and server.max_update_norm_ratio is not None:
        raise ConfigurationError(
            f"{option('max_update_norm_ratio')} does not go with {given}: the norms of fragments differ"
        )


def check_ranks(options: Options, ranks: int, where: str) -> None:
    """Checks that the options go with a worker of so many ranks, which make collective calls in one order.

    Args:
        where: name of the place of the options, for the error.

    Raises:
        ConfigurationError: they do not.
    """
    if isinstance(options, AsyncLocalSGDOptions) and ranks > 1:
        in_turn = "fragments" if options.fragments > 1 else "fragment_delay"
        for key, used in (("overlap", options.overlap), (in_turn, options.in_fragments)):
            if used:
                raise ConfigurationError(f"{where}: {option(key)} is not supported in a worker of several ranks")


def check_shards(options: HybridOptions | LocalSGDOptions, server: ServerOptions | None) -> None:
    """Checks that the options go with a server in shards, none of which sees a whole update.

    Raises:
        ConfigurationError: they do not.
    """
    if server is None or server.server_shards == "1":
        return
    given = f"{option('server_shards')} {server.server_shards}"
    if isinstance(options, LocalSGDOptions) and not methods.outer_rule(options.outer).divisible:
        raise ConfigurationError(f"{given} does not go with {option('outer')} {options.outer}: leave one of them out")
    if server.shard_hosts:
        _check_hosts(options)


def _check_hosts(options: HybridOptions | LocalSGDOptions) -> None:
    """Checks that the options go with shards on other machines, of whose parts the server sees nothing.

    Raises:
        ConfigurationError: they do not.
    """
    given = _with_parts(options) | {
        "staleness_power": getattr(options, "staleness_power", 0.0) != 0,
        "delay_compensation": getattr(options, "delay_compensation", 0.0) > 0,
    }
    _refuse(given, f"{option('server_shards')} on other machines, as no process has the whole model")


def check_device(options: HybridOptions | LocalSGDOptions, server: ServerOptions | None) -> None:
    """Checks that the options go with a server on a GPU, which is one process there.

    Raises:
        ConfigurationError: they do not.
    """
    if server is None or server.server_device != "cuda":
        return
    given = {
        "server_shards": server.server_shards != "1",
        "upstream": getattr(options, "upstream", None) is not None,
        "record": server.record,  # a replay steps on the CPU, which rounds otherwise
    }
    _refuse(given, f"{option('server_device')} {server.server_device}")


def check_buffers(options: LocalSGDOptions, server: ServerOptions | None) -> None:
    """Checks that the options go with an exchange of buffers, which are values and not differences.

    Raises:
        ConfigurationError: they do not.
    """
    if options.buffers == "own":
        return
    given = _with_parts(options) | {
        "overlap": getattr(options, "overlap", False),
        "server_shards": server is not None and server.server_shards != "1",
    }
    _refuse(given, f"{option('buffers')} {options.buffers}, which exchanges values as they are")


def _with_parts(options: HybridOptions | LocalSGDOptions) -> dict[str, bool]:
    """Returns for each option with which parts of a model, or of its values, are exchanged whether it is given."""
    return {
        "compress": options.compress != compression.Compress(),
        "upstream": getattr(options, "upstream", None) is not None,
        "fragments": getattr(options, "fragments", 1) > 1,
        "fragment_delay": getattr(options, "fragment_delay", 0) > 0,
    }


def _refuse(given: dict[str, bool], what: str) -> None:
    """Raises a ConfigurationError for the first option that is given, and does not go with ``what``."""
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigurationError(f"{option(name)} does not go with {what}: leave one of them out")
