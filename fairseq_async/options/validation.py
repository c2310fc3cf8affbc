"""Checks values against a model, and says in one line what is wrong with them."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fairseq_async.errors import ConfigurationError
from fairseq_async.options.addresses import IPV4_ONLY, is_ipv6


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT into host and port.

    Raises:
        ValueError: the address has another form.
    """
    host, _, port = address.rpartition(":")
    if is_ipv6(host):
        raise ValueError(IPV4_ONLY)
    if not _is_host(host) or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError("an address is written HOST:PORT, as in 10.0.0.1:29400")
    return host, int(port)


def _is_host(text: str) -> bool:
    """Whether sockets take the text as a host; one such as ``a..b`` fails in them with a ValueError, not an OSError."""
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


_Model = TypeVar("_Model", bound=BaseModel)
Spell = Callable[[str], str]


def gone(name: str, instead: str, spell: Spell) -> str:
    """Returns in words that an option of before is gone, and what to write instead."""
    return f"{spell(name)} is gone: {instead.format(server_shards=spell('server_shards'), delay=spell('delay'))}"


def first_mistake(error: ValidationError) -> str:
    """Returns the first mistake in one line, with its key."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else first["msg"]


def checked(
    model: type[_Model],
    values: Mapping[str, object],
    where: str,
    spell: Spell = '"{}"'.format,
    also_known: Iterable[str] = (),
    not_known: Collection[str] = (),
) -> _Model:
    """Validates the values, and returns them as an instance of the model.

    Args:
        where: name of the place of the values, for errors.
        spell: spells a key in errors.
        also_known: keys that are known there besides those of the model, for the error of an unknown one.
        not_known: keys of either that are no options there.

    Raises:
        ConfigurationError: a key is unknown or a value is bad; the message is one line.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        # unknown keys first: a key that is misspelt may also be reported as missing
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        key = spell(".".join(map(str, first["loc"]))) + ": " if first["loc"] else ""
        name, removed = str(first["loc"][0]) if first["loc"] else "", getattr(model, "removed", {})
        if first["type"] == "extra_forbidden" and name in removed:
            raise ConfigurationError(f"{where}: {gone(name, removed[name], spell)}") from error
        if first["type"] == "extra_forbidden":
            names = [each for each in [*sorted(model.model_fields), *sorted(also_known)] if each not in not_known]
            known = f"; known are {', '.join(names)}" if len(first["loc"]) == 1 else ""
            raise ConfigurationError(f"{where}: unknown key {key.removesuffix(': ')}{known}") from error
        said = first["msg"].removeprefix("Value error, ")
        value = "" if not first["loc"] or first["type"] == "missing" else f" (it is {first['input']!r})"
        raise ConfigurationError(f"{where}: {key}{said}{value}") from error
