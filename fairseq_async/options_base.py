"""What the models of all options extend."""

from pydantic import BaseModel, ConfigDict, JsonValue

Shown = dict[str, JsonValue]


class Options(BaseModel):
    """Options of one method; an unknown key is refused.

    ``json_schema_extra`` of a field may say how it is shown: ``metavar`` of its flag, and ``default`` in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
