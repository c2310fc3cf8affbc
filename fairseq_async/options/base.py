"""The base class of all models of options, and types of options."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

Shown = dict[str, JsonValue]


def _not_empty(path: str) -> str:
    if not path:
        raise ValueError("give a path, or leave it out")
    return path


LONGEST = 1e9  # seconds: no clock of the system waits for ever longer
_LARGEST = 1 << 62  # messages have numbers of 64 bits
GivenPath = Annotated[str, AfterValidator(_not_empty)]  # Path would take "" for the working directory


class Options(BaseModel):
    """The base of a model of options; refuses an unknown key, and a truth value in the place of a number: false would
    be a grace period of 0 seconds.

    ``json_schema_extra`` of a field may say how the option is shown: ``metavar`` of its flag, and ``default`` in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    removed: ClassVar[dict[str, str]] = {
        "shard_hosts": "give its addresses to {server_shards}, as in 2,HOST:PORT",
        "buffer_size": "give {delay}",
    }
    """Options of before, and what to write in their place."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _is_number(cls, value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        kinds = {each for part in (kind, *get_args(kind)) for each in (part, *get_args(part))}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("give a number")
        valid = check(value)
        if isinstance(valid, int) and abs(valid) > _LARGEST:
            raise ValueError(f"give a number of at most {_LARGEST}")
        return valid


Buffers = Annotated[
    Literal["own", "average", "worker 0"],
    Field(
        description="own, average or worker 0: batch normalisation's statistics, and other floating-point buffers, are "
        "each worker's own, the average of all workers, or worker 0's",
        json_schema_extra={"metavar": "WHOSE"},
    ),
]
