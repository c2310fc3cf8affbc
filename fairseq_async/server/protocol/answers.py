"""What the server says to a worker."""

from dataclasses import field
from typing import Literal

from fairseq_async.method_spec import JsonObject
from fairseq_async.server.protocol.message import message
from fairseq_async.server.protocol.work import Assignment
from fairseq_async.server.receipt import Status


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
