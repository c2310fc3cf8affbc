"""The messages between the server and the processes of its shards, over a socket that keeps messages apart."""

from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from fairseq_async.server.protocol.message import message

LARGEST = 1 << 16  # bytes of a message; the text of an error is cut to fit


@message
class Select:
    """The commands that follow refer to this fragment of the model. The shard sends no answer."""

    fragment: int
    kind: Literal["select"] = "select"


@message
class Apply:
    """Apply an update, on so many threads.

    Attributes:
        weighed: the update lies in the memory for weighed updates, and not in the worker's slot.
    """

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
    """The squared norm of the whole gradient: the sum of what every shard has sent by :class:`Norm`."""

    squared: float
    kind: Literal["norm_of_all"] = "norm_of_all"


@message
class Compare:
    """Compare an update with the momentum. The update lies where :class:`Apply` says."""

    worker: int
    weighed: bool
    kind: Literal["compare"] = "compare"


@message
class LimitRound:
    """Limit the updates of a round; see :meth:`~fairseq_async.algorithms.Rule.limit_round`."""

    updates: int
    kind: Literal["limit_round"] = "limit_round"


@message
class Dispatch:
    """Write the shard's part of the tensor that local steps start from into the shared memory for it."""

    kind: Literal["dispatch"] = "dispatch"


@message
class BeginEpoch:
    """Begin an epoch of the learning-rate schedule."""

    epoch: int
    kind: Literal["begin_epoch"] = "begin_epoch"


@message
class EndEpoch:
    """End an epoch of the learning-rate schedule, with the validation loss."""

    epoch: int
    loss: float | None
    kind: Literal["end_epoch"] = "end_epoch"


@message
class Save:
    """Write the rule's state into the file that comes with the message."""

    kind: Literal["save"] = "save"


@message
class Load:
    """Load the rule's state from the file that comes with the message."""

    kind: Literal["load"] = "load"


@message
class Norm:
    """The squared norm of the shard's part of the gradient. Before its step the shard waits for :class:`NormOfAll`."""

    squared: float
    kind: Literal["norm"] = "norm"


@message
class Compared:
    """In the shard's part: the scalar product of update and momentum, and the squared norm of the momentum."""

    product: float
    squared: float
    kind: Literal["compared"] = "compared"


@message
class Done:
    """The command was carried out."""

    kind: Literal["done"] = "done"


@message
class NotSaved:
    """The file for the state could not be written, as on a full disk. The shard goes on."""

    error: str
    kind: Literal["not_saved"] = "not_saved"


@message
class Failed:
    """The command, or the start of the process, has failed. The process ends."""

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


def encode(message: Message) -> bytes:
    """Returns the bytes of a message; NaN and Inf as Python's ``json`` writes them."""
    return _adapter().dump_json(message)


def parse(body: bytes) -> Message:
    """Parses the bytes of :func:`encode`; raises a pydantic ``ValidationError`` for other bytes."""
    parsed: Message = _adapter().validate_json(body)
    return parsed


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[Message, Field(discriminator="kind")])
