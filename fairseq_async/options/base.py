"""The base class of all models of options, and types of options."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

Shown = dict[str, JsonValue]


def _not_empty(path: str) -> str:
    if not path:
        raise ValueError("give a path, or leave it out")
    return path


GivenPath = Annotated[str, AfterValidator(_not_empty)]  # Path would take "" for the working directory


class Options(BaseModel):
    """The base of a model of options; refuses an unknown key.

    ``json_schema_extra`` of a field may say how the option is shown: ``metavar`` of its flag, and ``default`` in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Buffers = Annotated[
    Literal["own", "average", "worker 0"],
    Field(
        description="own, average or worker 0: batch normalisation's statistics, and other floating-point buffers, are "
        "each worker's own, the average of all workers, or worker 0's",
        json_schema_extra={"metavar": "WHOSE"},
    ),
]
