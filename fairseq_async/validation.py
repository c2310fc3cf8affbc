"""Checks values against a model, and says in one line what is wrong with them."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fairseq_async.errors import ConfigurationError


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT in its parts.

    Raises:
        ValueError: it is not written so.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("an address is written HOST:PORT, as in 10.0.0.1:29400")
    return host, int(port)


_Model = TypeVar("_Model", bound=BaseModel)
Spell = Callable[[str], str]


def first_mistake(error: ValidationError) -> str:
    """What is wrong first, in one line, with the key."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else first["msg"]


def checked(model: type[_Model], values: Mapping[str, object], where: str, spell: Spell = '"{}"'.format) -> _Model:
    """The values as a model.

    Args:
        where: what to name in an error.
        spell: how a key is written there.

    Raises:
        ConfigurationError: an unknown key or a bad value, in one line.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        # a key that is misspelt may be missing, too
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        key = spell(".".join(map(str, first["loc"]))) + ": " if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            known = f"; known are {', '.join(sorted(model.model_fields))}" if len(first["loc"]) == 1 else ""
            raise ConfigurationError(f"{where}: unknown key {key.removesuffix(': ')}{known}") from error
        said = first["msg"].removeprefix("Value error, ")
        value = "" if not first["loc"] or first["type"] == "missing" else f" (it is {first['input']!r})"
        raise ConfigurationError(f"{where}: {key}{said}{value}") from error
