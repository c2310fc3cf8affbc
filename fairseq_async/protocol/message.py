"""The decorator of all messages between workers and server."""

from dataclasses import dataclass
from typing import TypeVar

from pydantic import ConfigDict, with_config
from typing_extensions import dataclass_transform

_STRICT = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")
_Message = TypeVar("_Message")


@dataclass_transform(frozen_default=True)
def message(cls: type[_Message]) -> type[_Message]:
    """Makes the class a frozen dataclass, whose parser takes only the declared fields and types."""
    return with_config(_STRICT)(dataclass(frozen=True)(cls))
