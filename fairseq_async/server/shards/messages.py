"""What the server and the processes of its shards say to each other, over a socket that keeps messages apart."""

from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from fairseq_async.server.protocol.message import message

LARGEST = 1 << 16  # bytes of a message; an error is cut before


@message
class Select:
    """What follows is about this fragment of the model. There is no answer."""

    fragment: int
    kind: Literal["select"] = "select"


@message
class Apply:
    """Take in the update in a worker's slot, or what staleness has made of it, on so many threads."""

    worker: int
    weighed: bool
    sequence: int
    base_version: int
    weight: float
    tokens: float
    threads: int
    kind: Literal["apply"] = "apply"


@message
class NormOfAll:
    """The sum over all shards of what each has said by :class:`Norm`."""

    squared: float
    kind: Literal["norm_of_all"] = "norm_of_all"


@message
class Compare:
    """How does an update, which lies where that of :class:`Apply` does, lie to the momentum?"""

    worker: int
    weighed: bool
    kind: Literal["compare"] = "compare"


@message
class LimitRound:
    """See :meth:`~fairseq_async.algorithms.Rule.limit_round`."""

    updates: int
    kind: Literal["limit_round"] = "limit_round"


@message
class Dispatch:
    """Write what local steps start from into the memory for it."""

    kind: Literal["dispatch"] = "dispatch"


@message
class BeginEpoch:
    """Of the learning-rate schedule."""

    epoch: int
    kind: Literal["begin_epoch"] = "begin_epoch"


@message
class EndEpoch:
    """Of the learning-rate schedule, with the loss of the validation."""

    epoch: int
    loss: float | None
    kind: Literal["end_epoch"] = "end_epoch"


@message
class Save:
    """Write the rule's state into the file that comes with the message."""

    kind: Literal["save"] = "save"


@message
class Load:
    """Go on from the rule's state in the file that comes with the message."""

    kind: Literal["load"] = "load"


@message
class Norm:
    """The squared norm of the shard's part of the gradient: before the step every shard asks for that of all."""

    squared: float
    kind: Literal["norm"] = "norm"


@message
class Compared:
    """The scalar product of update and momentum, and the squared norm of the momentum."""

    product: float
    squared: float
    kind: Literal["compared"] = "compared"


@message
class Done:
    """The command was carried out."""

    kind: Literal["done"] = "done"


@message
class NotSaved:
    """The file could not be written, as on a full disk. The shard goes on."""

    error: str
    kind: Literal["not_saved"] = "not_saved"


@message
class Failed:
    """The command, or the start, has failed; the process ends."""

    error: str
    kind: Literal["failed"] = "failed"


Message: TypeAlias = (
    Select
    | Apply
    | NormOfAll
    | Compare
    | LimitRound
    | Dispatch
    | BeginEpoch
    | EndEpoch
    | Save
    | Load
    | Norm
    | Compared
    | Done
    | NotSaved
    | Failed
)


def encode(said: Message) -> bytes:
    """The bytes of a message; NaN and Inf as Python's ``json`` writes them."""
    return _adapter().dump_json(said)


def parse(body: bytes) -> Message:
    """The inverse of :func:`encode`; a pydantic ``ValidationError`` for other bytes."""
    parsed: Message = _adapter().validate_json(body)
    return parsed


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[Message, Field(discriminator="kind")])
