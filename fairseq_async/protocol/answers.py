"""The messages from the server to a worker."""

from dataclasses import field
from typing import Literal

from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol.message import message
from fairseq_async.protocol.receipt import Status
from fairseq_async.protocol.work import Assignment


@message
class Greeting:
    """The server's first message on a connection: the challenge for the worker's proof that it knows the token."""

    challenge: str
    kind: Literal["greeting"] = "greeting"


@message
class Introduced:
    """The server's own proof, and the worker's place in the run.

    Attributes:
        workers: how many workers were announced.
        server: names the server's process; a restarted server has another name.
        timeout: seconds without a message after which one side gives the other up.
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
        initialised: whether the server has parameters. If not, worker 0 is to bring them, and the fields about the
            state of the run say nothing.
        state_path: where worker 0 is to put a server's whole state, if it brings one.
        memory: path of the shared memory, with room for ``slots`` workers; empty where this worker cannot share memory
            with the server, and tensors are to follow the messages.
        on_gpu: where the memory is on a GPU, what maps this worker's slot and the published parameters.
        sequence: the number of this worker's next update.
        position: this worker's position in its data at its last update.
        refused: how many of this worker's updates were refused: those with NaN or Inf, and outliers.
        from_checkpoint: whether the run has begun from a checkpoint that its workers are to read. If not, a checkpoint
            in its directory is this run's own, with worker 0's place in the data.
        total_steps: number of steps after which the run ends; 0 for no end.
        moments: checksum of the moments that worker 0's optimizers have brought; None where the server does not know.
    """

    initialised: bool
    memory: str
    publishes: bool
    slots: int
    state_path: str = ""
    on_gpu: list[str] = field(default_factory=list)
    version: int = 0
    sequence: int = 0
    position: JsonObject | None = None
    refused: int = 0
    finished: bool = False
    from_checkpoint: bool = False
    total_steps: int = 0
    moments: str | None = None
    assignment: Assignment = field(default_factory=Assignment)
    kind: Literal["welcome"] = "welcome"


@message
class PushReply:
    """The receipt of an update, and the worker's next work; see :class:`~fairseq_async.protocol.Receipt`.

    Attributes:
        refused: how many of this worker's updates were refused as NaN, Inf or outliers, this one included.
        finished: whether the run is over.
        taken: whether the update is in the parameters, or will be; otherwise it has changed nothing, and never will.
        with_parameters: whether a :class:`PullReply` comes next, unasked, with the parameters to start from.
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
        compressed: whether the parameters are a payload behind this answer.
        adds: whether the payload is to be added to what this connection has brought before.
        number: the parts from shards on other machines, which they send by themselves, have the same number.
    """

    version: int
    compressed: bool = False
    adds: bool = False
    number: int = 0
    kind: Literal["pull_reply"] = "pull_reply"


@message
class WorkReply:
    """The answer to :class:`WaitForWork`: there is work again, or the run is finished."""

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
    """The server's state at this version is in the file, which the worker is to take away."""

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
