"""The messages between the server and the processes of its shards, and between these and workers."""

from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.message import message

Held: TypeAlias = Literal["parameters", "before", "state"]
Size: TypeAlias = Annotated[int, Field(ge=0, le=1 << 46)]
LARGEST = 1 << 16  # bytes of a message; the text of an error is cut to fit
TAKEN = "this shard belongs to another server, which is there"  # of the machine of a server that is gone no host knows


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
        missing: tensors of the whole model without a gradient, as in a worker's report.
    """

    worker: int
    weighed: bool
    sequence: int
    base_version: int
    weight: float
    tokens: float
    threads: int
    missing: str = "0"
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
    sequence: int
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
class Begin:
    """To a shard on another machine: build this shard of a model.

    Attributes:
        program: the module that is the server's program.
    """

    program: str
    spec: MethodSpec
    layout: Layout
    shard: int
    kind: Literal["begin"] = "begin"


@message
class Store:
    """To a shard on another machine: replace this by the :class:`Bytes` that come next; see :class:`Fetch`."""

    what: Held
    size: Size
    kind: Literal["store"] = "store"


@message
class Fetch:
    """Asks a shard on another machine for its part of the parameters, for that of the parameters before the last step,
    or for its rule's state; the answer is :class:`Sized`, then :class:`Bytes`."""

    what: Held
    kind: Literal["fetch"] = "fetch"


@message
class Sized:
    """So many bytes come next."""

    size: Size
    kind: Literal["sized"] = "sized"


@message
class Bytes:
    """The bytes are behind this message."""

    kind: Literal["bytes"] = "bytes"


@message
class Measure:
    """Asks for the squared norm of the shard's part of an update."""

    worker: int
    sequence: int
    kind: Literal["measure"] = "measure"


@message
class Measured:
    """The squared norm; NaN if the update is not there."""

    squared: float
    kind: Literal["measured"] = "measured"


@message
class Give:
    """Send a worker the shard's part of the parameters, as the pull of this number asks for them; no answer."""

    worker: int
    number: int
    look_ahead: float
    starts: bool
    kind: Literal["give"] = "give"


@message
class Digest:
    """Continue the CRC-32 of the shards before with the bytes of this shard's parameters."""

    before: int
    kind: Literal["digest"] = "digest"


@message
class Digested:
    """The CRC-32 up to here."""

    value: int
    kind: Literal["digested"] = "digested"


@message
class Finish:
    """The run is finished; no answer."""

    kind: Literal["finish"] = "finish"


@message
class Place:
    """From a worker: its part of an update is in the :class:`Bytes` that come next."""

    sequence: Annotated[int, Field(ge=0)]
    kind: Literal["place"] = "place"


@message
class Placed:
    """To a worker: the part of the update is there, so that the server may be told of the update."""

    sequence: int
    kind: Literal["placed"] = "placed"


@message
class Given:
    """To a worker: the shard's part of the parameters is behind this message; see :class:`Give`."""

    number: int
    kind: Literal["given"] = "given"


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
    | Begin
    | Store
    | Fetch
    | Sized
    | Bytes
    | Measure
    | Measured
    | Give
    | Digest
    | Digested
    | Finish
    | Place
    | Placed
    | Given
    | Norm
    | Compared
    | Done
    | NotSaved
    | Failed
)


def encode(message: Message) -> bytes:
    """Returns the bytes of a message; NaN and Inf as Python's ``json`` writes them."""
    kind: Any = type(message)
    return _of_class(kind).dump_json(message)


def parse(body: bytes) -> Message:
    """Parses the bytes of :func:`encode`; raises a pydantic ``ValidationError`` for other bytes."""
    parsed: Message = _adapter().validate_json(body)
    return parsed


@cache
def _of_class(kind: Any) -> TypeAdapter[Any]:
    """Returns what writes messages of a class as it is configured: the union would write null for NaN and Inf."""
    return TypeAdapter(kind)


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[Message, Field(discriminator="kind")])
