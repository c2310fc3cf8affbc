"""Encodes messages as bytes of JSON, and parses them; each message is checked once, when it is parsed."""

from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from fairseq_async.errors import ProtocolError, RefusedError, spelled
from fairseq_async.protocol.answers import Answer, ErrorReply
from fairseq_async.protocol.requests import Request

_Message = TypeVar("_Message")
# Hazard: a connected peer may send anything, and the server serves no other peer while it parses. These limits keep the
# cost of one message well below a second, whatever is in it.
_MOST_VALUES = 1 << 19  # values in a message; the largest message has a table of learning rates, and a model's tensors
_MOST_ERRORS = 64  # errors in a message that are located; locating an error takes longer than finding it
_MOST_SAID = 500  # characters of an error, which may have names that the peer has chosen
_REQUEST = Annotated[Request, Field(discriminator="kind")]
_ANSWER = Annotated[Answer, Field(discriminator="kind")]


class MalformedMessageError(RefusedError):
    """A JSON object that is no message of this protocol."""


def encode(message: object) -> bytes:
    """Returns the bytes of a message. A norm may be NaN or Inf; both ends write and read these as Python's ``json``."""
    kind: Any = type(message)
    return _adapter(kind).dump_json(message)


def parse_request(body: bytes) -> Request:
    """Parses a worker's message.

    Raises:
        ProtocolError: it is not JSON.
        MalformedMessageError: it is JSON, but no request.
    """
    request: Request = _parse(body, _REQUEST)
    return request


def parse_answer(body: bytes, expected: type[_Message]) -> _Message:
    """Parses the server's answer, which must be of the expected class.

    Raises:
        ProtocolError: it is of another class, or not JSON.
        RefusedError: the server has refused the request.
    """
    answer: Answer = _parse(body, _ANSWER)
    if isinstance(answer, ErrorReply):
        raise RefusedError(spelled(answer.error))
    if not isinstance(answer, expected):
        raise ProtocolError(f"the server answered {answer.kind} where {expected.__name__} was expected")
    return answer


def parse_one(body: bytes, expected: type[_Message]) -> _Message:
    """Parses a message that can be of one class alone.

    Raises:
        ProtocolError: it is something else.
    """
    kind: Any = expected
    try:
        parsed: _Message = _adapter(kind).validate_json(body)
    except ValidationError as error:
        raise ProtocolError(f"no {expected.__name__}: {error.error_count()} mistakes") from error
    return parsed


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Returns the parser of a message class or of a union of them; made once, since making it takes milliseconds."""
    return TypeAdapter(kind)


def _parse(body: bytes, union: Any) -> Any:
    if body.count(b",") + body.count(b":") > _MOST_VALUES:  # there is one of these before each value
        raise MalformedMessageError(f"malformed message: it has more than {_MOST_VALUES} values")
    try:
        return _adapter(union).validate_json(body)
    except ValidationError as error:
        if error.error_count() > _MOST_ERRORS:
            raise MalformedMessageError(f"malformed message: {error.error_count()} mistakes") from None
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise ProtocolError("the peer sent something that is not JSON") from error
        where = "".join(f"{part}: " for part in first["loc"][1:])
        raise MalformedMessageError(f"malformed message: {where}{first['msg']}"[:_MOST_SAID]) from error
