"""Calls of a shard's methods by messages, from the server's process to those of its other shards."""

import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import IO, Any, TypeVar, get_type_hints

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json
from torch import Tensor

from fairseq_async.errors import ExchangeError, HalfAppliedError, ProtocolError
from fairseq_async.exchange import Channel
from fairseq_async.protocol.message import message
from fairseq_async.protocol.parsing import parse_one

_STRICT = ConfigDict(strict=True)
_Result = TypeVar("_Result")


@message
class Call:
    """A call of a method, of the shard's part of a fragment of the model.

    Attributes:
        answered: whether the caller waits for an :class:`Answer`. Where it does not, the answer to the next call says
            that this one has failed.
    """

    method: str
    arguments: list[JsonValue]
    fragment: int = 0
    answered: bool = True


@message
class Answer:
    """What a method has returned; with ``error``, that it has failed, and that the shard is at no version any more."""

    value: JsonValue = None
    error: str = ""


def encode(sent: Call | Answer) -> bytes:
    """Returns the bytes of a message; NaN and Inf as Python's ``json`` writes them."""
    return to_json(vars(sent), inf_nan_mode="constants")


def failure(error: BaseException) -> bytes:
    """Returns the answer to a call that has failed."""
    return encode(Answer(error=f"{type(error).__name__}: {error}"[:1000]))


class Methods:
    """The methods that messages may call: nothing else is called, and these only with arguments of their types, which
    are those of JSON."""

    def __init__(self, *methods: Callable[..., object]) -> None:
        self._methods = {method.__name__: method for method in methods}

    def carry_out(self, call: Call, owners: Sequence[object]) -> Any:
        """Calls the method of the first owner that has it; returns its result.

        Raises:
            ProtocolError: it may not be called, its arguments are of other types, or no owner has it.
        """
        if call.method not in self._methods:
            raise ProtocolError(f"a shard has no method {call.method!r}")
        method = self._methods[call.method]
        try:
            arguments = _arguments(method).validate_python(tuple(call.arguments))
        except ValidationError as error:
            raise ProtocolError(f"{call.method}: {error.error_count()} mistakes in its arguments") from error
        return call_first(owners, method, *arguments)


def call_first(owners: Sequence[object], method: Callable[..., _Result], *given: object) -> _Result:
    """Calls the method of this name of the first owner that has one; raises a ProtocolError if none has."""
    for owner in owners:
        if hasattr(owner, method.__name__):
            result: _Result = getattr(owner, method.__name__)(*given)
            return result
    raise ProtocolError(f"{method.__name__}: the shard has not begun")


class OtherShard(ABC):
    """A shard in another process. Every method raises a HalfAppliedError if the shard has failed, or is gone.

    Attributes:
        name: what messages to the user call it.
        channel: the connection to it.
    """

    name: str
    channel: Channel

    def call(
        self,
        method: Callable[..., object],
        *given: JsonValue,
        fragment: int = 0,
        tensor: Tensor | None = None,
        answered: bool = True,
    ) -> None:
        """Calls a method, with a tensor behind the call if there is one; :meth:`result` waits for what it returns."""
        self.send(Call(method.__name__, list(given), fragment, answered), tensor)

    def result(self, method: Callable[..., _Result]) -> _Result:
        """Returns what this method has returned, the first that was called of those whose result is still to come."""
        value = self.value()
        try:
            result: _Result = _returned(method).validate_python(value)
        except ValidationError as error:
            raise HalfAppliedError(f"{self.name} answers {method.__name__} with {value!r}") from error
        return result

    def value(self) -> JsonValue:
        """Returns the value of the next answer."""
        answer = self.answer()
        if answer.error:
            raise HalfAppliedError(f"{self.name} has failed: {answer.error}")
        return answer.value

    def answer(self) -> Answer:
        """Returns the next answer."""
        try:
            return parse_one(self.channel.receive(), Answer)
        except ExchangeError as error:
            raise self._gone(error) from error

    def send(self, sent: Call | Answer, tensor: Tensor | None = None) -> None:
        """Sends a call, or the answer to what the shard asks in the middle of one."""
        try:
            self.channel.send(encode(sent), tensor)
        except ExchangeError as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> HalfAppliedError:
        return HalfAppliedError(f"{self.name} is gone: {error}")

    @abstractmethod
    def save(self, fragment: int, file: IO[bytes]) -> Callable[[], str]:
        """Lets it write its rule's state into a file; returns what waits until it has, and then returns why it could
        not, as on a full disk, or an empty string."""

    @abstractmethod
    def load(self, fragment: int, file: IO[bytes]) -> Callable[[], None]:
        """Lets its rule go on from the state in a file; returns what waits until it does."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connection to it."""


def ask(channel: Channel, value: float) -> float:
    """Sends the server a shard's value in the middle of a call, and returns its answer; nobody else is served."""
    channel.queue(encode(Answer(value)))
    while not channel.flush():
        channel.happens(select.POLLOUT, 1.0)
    while not (bodies := channel.messages(most=1)):
        channel.happens(select.POLLIN, 1.0)
    answer = parse_one(bodies[0], Answer).value
    assert isinstance(answer, float)
    return answer


@cache
def _arguments(method: Callable[..., object]) -> TypeAdapter[Any]:
    types: Any = tuple(each for name, each in get_type_hints(method, include_extras=True).items() if name != "return")
    return TypeAdapter(tuple[types], config=_STRICT)


@cache
def _returned(method: Callable[..., object]) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(method)["return"], config=_STRICT)
