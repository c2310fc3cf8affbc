"""The keyword arguments of a front end, checked by the models of the method and of the server."""

from collections.abc import Mapping
from typing import TypeVar

from fairseq_async.errors import ConfigurationError, as_argument, spell_options
from fairseq_async.method import methods
from fairseq_async.options.config import HybridOptions, LocalSGDOptions, ServerOptions
from fairseq_async.options.validation import checked

_OF_OTHERS = ("method", "shards")  # options of methods that are none of a front end which is the method, without data

_Options = TypeVar("_Options", LocalSGDOptions, HybridOptions)


def parse_options(base: type[_Options], given: Mapping[str, object], where: str) -> tuple[ServerOptions, _Options]:
    """Returns the options of the server, and those of the method.

    Args:
        base: the base class of the option models of the method's rules.
        where: the name of the front end, for errors.

    Raises:
        ConfigurationError: an unknown argument, or a bad value.
    """
    spell_options(as_argument)
    if "shards" in given:
        raise ConfigurationError(f"{where}: shards is of no use here: your own loader divides the data")
    of_server = {name: value for name, value in given.items() if name in ServerOptions.model_fields}
    of_method = {name: value for name, value in given.items() if name not in of_server}
    server = checked(ServerOptions, of_server, where, str)
    return server, methods.parse(base, of_method, where, str, ServerOptions.model_fields, _OF_OTHERS)
