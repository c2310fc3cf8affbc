"""The messages between a worker and a shard on another machine than the server; their parts of tensors travel beside
them."""

from typing import Annotated, Literal

from pydantic import Field

from fairseq_async.protocol.message import message

TAKEN = "this shard belongs to another server, which is there"  # of the machine of a server that is gone no host knows


@message
class Part:
    """From a worker: announces its part of an update, so that there is room for it; the same message comes once more
    with the part behind it."""

    sequence: Annotated[int, Field(ge=0)]
    kind: Literal["part"] = "part"


@message
class Placed:
    """To a worker: the part of the update is there, so that the server may be told of the update."""

    sequence: int
    kind: Literal["placed"] = "placed"


@message
class Given:
    """To a worker: the shard's part of the parameters is behind this message; a pull's answer has the same number."""

    number: int
    kind: Literal["given"] = "given"
