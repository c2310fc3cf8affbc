"""The base class of all models of options."""

from pydantic import BaseModel, ConfigDict, JsonValue

Shown = dict[str, JsonValue]


class Options(BaseModel):
    """The base of a model of options; refuses an unknown key.

    ``json_schema_extra`` of a field may say how the option is shown: ``metavar`` of its flag, and ``default`` in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
