"""The messages between workers and server: frozen dataclasses, checked once, when a message is parsed.

A message is a JSON object whose ``kind`` says which class it is. The tensors of updates and parameters travel beside it
(:mod:`fairseq_async.exchange`). Every request but :class:`Alive` gets one answer, in the order of the requests; a
:class:`Push` may get a second one.
"""

from dataclasses import field
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from fairseq_async.errors import ProtocolError, RefusedError
from fairseq_async.method_spec import JsonObject, MethodSpec
from fairseq_async.server.layout import Layout
from fairseq_async.server.message import message
from fairseq_async.server.parameter_server import Status
from fairseq_async.server.work import Assignment as Assignment
from fairseq_async.server.work import Report as Report

_Message = TypeVar("_Message")
# Hazard: whoever is connected may send anything, and meanwhile the server serves nobody else. These keep what one
# message costs well below a second, whatever is in it.
_MOST_VALUES = 1 << 19  # of a message; the largest one has a table of learning rates, and a model's tensors
_MOST_ERRORS = 64  # of which each is looked at; to tell which field is wrong takes longer than to find it
_MOST_SAID = 500  # characters of an error, in which there may be names that the peer has chosen


class MalformedMessageError(RefusedError):
    """A JSON object that is no message of this protocol."""


# Requests, from a worker


@message
class Introduce:
    """The first message on a connection: who it is, and the proof that it knows the run's token.

    Attributes:
        worker: its id; None asks for a free one.
        joins: it was not announced.
        instance: names the process, which may connect again.
        challenge: what the server has to prove the token with.
        stream_of: the server's challenge on another connection of this worker, which has not said hello yet: the new
            one carries pieces of its tensors, and no messages. None for a connection of its own.
    """

    proof: str
    challenge: str
    worker: int | None
    joins: bool
    instance: str
    stream_of: str | None = None
    kind: Literal["introduce"] = "introduce"


@message
class Hello:
    """Joins the run with a model and a method.

    Attributes:
        remote: tensors follow the messages on this connection; otherwise they go through shared memory.
    """

    spec: MethodSpec
    layout: Layout
    remote: bool
    kind: Literal["hello"] = "hello"


@message
class Initialise:
    """Worker 0 brings a new server its parameters.

    Attributes:
        restored: a server's whole state is in the file that :class:`Welcome` names.
        from_checkpoint: worker 0 has begun from a checkpoint, which the other workers are to read as well.
    """

    restored: bool
    from_checkpoint: bool = False
    kind: Literal["initialise"] = "initialise"


@message
class Push:
    """An update is ready in the worker's slot.

    Attributes:
        sequence: the worker's own number for it.
        base_version: the server's version that it was computed from.
        weight: target tokens, or local steps.
        wait: answer only when the update is settled, even if it will only be added to others.
        norm: the update's L2 norm where the worker knows it; NaN or Inf where it is compressed and has these, for which
            there is no payload.
        pulls: the worker will ask for the parameters next, to start from them. One on another machine may have them
            behind the answer, which saves a way there and back.
    """

    sequence: int
    base_version: int
    weight: float
    report: Report = field(default_factory=Report)
    wait: bool = True
    norm: float | None = None
    pulls: bool = False
    kind: Literal["push"] = "push"


@message
class Pull:
    """Asks for the current parameters, in the worker's slot or behind the answer.

    Attributes:
        look_ahead: versions ahead along the server's last step.
        starts: work starts from them: the server's rule may look ahead, and they may be compressed. Otherwise they are
            the server's own, in fp32.
        fragment_of: the number of an update of this worker, of whose fragment alone it asks; None for the whole model.
    """

    look_ahead: Annotated[float, Field(ge=0, le=1024)] = 0.0
    starts: bool = False
    fragment_of: Annotated[int, Field(ge=0)] | None = None
    kind: Literal["pull"] = "pull"


@message
class WaitForWork:
    """An idle worker asks for work; the answer comes when there is some, or when the run is finished."""

    kind: Literal["wait"] = "wait"


@message
class ScheduleEvent:
    """Worker 0 begins or ends an epoch, which the learning-rate schedule follows.

    Attributes:
        number: names the event; a second message with the same number has no effect.
        loss: of the validation at the end of the epoch.
    """

    number: str
    event: Literal["begin_epoch", "end_epoch"]
    epoch: int
    loss: float | None = None
    kind: Literal["schedule_event"] = "schedule_event"


@message
class SaveState:
    """Asks the server to write its whole state into a file, whose name the server chooses."""

    kind: Literal["save_state"] = "save_state"


@message
class Alive:
    """The worker is computing; there is no answer."""

    kind: Literal["alive"] = "alive"


@message
class Leave:
    """The worker leaves for good; ``finished`` ends the run for all workers."""

    finished: bool
    kind: Literal["leave"] = "leave"


# Answers, from the server


@message
class Greeting:
    """The server's first message on a connection: what the worker has to prove the token with."""

    challenge: str
    kind: Literal["greeting"] = "greeting"


@message
class Introduced:
    """The server's own proof, and the worker's place in the run.

    Attributes:
        workers: how many were announced.
        server: names the server's process: one that was started again is another.
        timeout: seconds without a word after which one side gives the other up.
    """

    proof: str
    worker: int
    workers: int
    server: str
    timeout: float
    kind: Literal["introduced"] = "introduced"


@message
class Welcome:
    """The answer to :class:`Hello` and :class:`Initialise`.

    Attributes:
        initialised: the server has parameters; if not, worker 0 is to bring them, and the other fields say nothing.
        state_path: where worker 0 is to put a server's whole state, if it brings one.
        memory: path of the shared memory, with room for ``slots`` workers.
        sequence: the number of this worker's next update.
        position: where this worker was in its data with its last update.
        refused: how many of this worker's updates had NaN or Inf.
        from_checkpoint: the run has begun from a checkpoint that its workers are to read. Otherwise a checkpoint that
            lies in its directory is this run's own, with worker 0's place in the data.
    """

    initialised: bool
    memory: str
    publishes: bool
    slots: int
    state_path: str = ""
    version: int = 0
    sequence: int = 0
    position: JsonObject | None = None
    refused: int = 0
    finished: bool = False
    from_checkpoint: bool = False
    assignment: Assignment = field(default_factory=Assignment)
    kind: Literal["welcome"] = "welcome"


@message
class PushReply:
    """What became of an update, and the worker's next work; see :class:`~fairseq_async.server.Receipt`.

    Attributes:
        refused: how many of this worker's updates had NaN or Inf, this one included.
        finished: the run is over.
        taken: the update is in the parameters, or will be; otherwise it has changed nothing, and never will.
        with_parameters: a :class:`PullReply` comes next, with the parameters to start from, for which nobody has asked.
    """

    status: Status
    version: int
    staleness: int
    refused: int
    finished: bool
    assignment: Assignment
    norm: float = 0.0
    cosine: float = 0.0
    taken: bool = True
    with_parameters: bool = False
    kind: Literal["push_reply"] = "push_reply"


@message
class PullReply:
    """The parameters of this version are in the worker's slot, or behind this answer.

    Attributes:
        compressed: a payload is behind it.
        adds: it is to be added to what this connection has brought before.
    """

    version: int
    compressed: bool = False
    adds: bool = False
    kind: Literal["pull_reply"] = "pull_reply"


@message
class WorkReply:
    """There is work again, or the run is finished."""

    finished: bool
    assignment: Assignment
    kind: Literal["work_reply"] = "work_reply"


@message
class ScheduleReply:
    """The learning rate after a :class:`ScheduleEvent`."""

    learning_rate: float
    kind: Literal["schedule_reply"] = "schedule_reply"


@message
class StateSaved:
    """The state of this version is in the file, which the worker is to take away."""

    version: int
    path: str
    kind: Literal["state_saved"] = "state_saved"


@message
class Goodbye:
    """The answer to :class:`Leave`."""

    kind: Literal["goodbye"] = "goodbye"


@message
class ErrorReply:
    """The request was refused; ``error`` says why in one line."""

    error: str
    kind: Literal["error"] = "error"


Request = Introduce | Hello | Initialise | Push | Pull | WaitForWork | ScheduleEvent | SaveState | Alive | Leave
Answer = (
    Greeting
    | Introduced
    | Welcome
    | PushReply
    | PullReply
    | WorkReply
    | ScheduleReply
    | StateSaved
    | Goodbye
    | ErrorReply
)
_REQUEST = Annotated[Request, Field(discriminator="kind")]
_ANSWER = Annotated[Answer, Field(discriminator="kind")]


def encode(message: Request | Answer) -> bytes:
    """The bytes of a message. A norm may be NaN or Inf: both ends write and read these as Python's ``json`` does."""
    kind: Any = type(message)
    return _adapter(kind).dump_json(message)


def parse_request(body: bytes) -> Request:
    """A worker's message.

    Raises:
        ProtocolError: it is not JSON.
        MalformedMessageError: it is JSON, and not a request.
    """
    request: Request = _parse(body, _REQUEST)
    return request


def parse_answer(body: bytes, expected: type[_Message]) -> _Message:
    """The server's answer.

    Raises:
        ProtocolError: it is another than the expected one.
        RefusedError: the server has refused the request.
    """
    answer: Answer = _parse(body, _ANSWER)
    if isinstance(answer, ErrorReply):
        raise RefusedError(answer.error)
    if not isinstance(answer, expected):
        raise ProtocolError(f"the server answered {answer.kind} where {expected.__name__} was expected")
    return answer


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The parser of a class of messages or of a union of them; made once, since making it takes milliseconds."""
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
