"""What all messages between workers and server have in common."""

from dataclasses import dataclass
from typing import TypeVar

from pydantic import ConfigDict, with_config
from typing_extensions import dataclass_transform

_STRICT = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")
_Message = TypeVar("_Message")


@dataclass_transform(frozen_default=True)
def message(cls: type[_Message]) -> type[_Message]:
    """Makes a frozen dataclass whose parser takes no other fields and no other types than the declared ones."""
    return with_config(_STRICT)(dataclass(frozen=True)(cls))
