"""The messages from a worker to the server."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.message import message
from fairseq_async.protocol.work import Report


@message
class Introduce:
    """The first message on a connection: the worker's id, and the proof that it knows the run's token.

    Attributes:
        worker: the worker's id; None asks for a free one.
        joins: whether the worker was not announced.
        instance: names the worker's process, which may connect again.
        challenge: the challenge with which the server proves that it knows the token.
    """

    proof: str
    challenge: str
    worker: int | None
    joins: bool
    instance: str
    kind: Literal["introduce"] = "introduce"


@message
class Hello:
    """Joins the run with a model and a method.

    Attributes:
        remote: whether tensors follow the messages on this connection; otherwise they go through shared memory.
        untrained: checksum of the model's parameters that are not trained, which every worker has by itself; empty
            where there are none, or the worker's front end does not say.
        buffers: checksum of the model's buffers that training does not change; empty where there are none to compare.
        unsaved: sketches (:mod:`fairseq_async.protocol.sketches`) of the buffers that the model does not save, by name
            and shape.
        any_length: whether the run's number of steps is worker 0's where this worker has counted another.
        by_script: whether the script divides the data among the workers itself, so that none may have another's.
        gpu: name of the model's GPU, on which this worker can share memory; empty where there is none.
    """

    spec: MethodSpec
    layout: Layout
    remote: bool
    untrained: str = ""
    buffers: str = ""
    unsaved: dict[str, list[float]] = field(default_factory=dict)
    any_length: bool = False
    by_script: bool = False
    gpu: str = ""
    kind: Literal["hello"] = "hello"


@message
class Initialise:
    """Worker 0 brings a new server its parameters.

    Attributes:
        restored: whether a server's whole state is in the file that :class:`Welcome` names.
        from_checkpoint: whether worker 0 has begun from a checkpoint, which the other workers are to read as well.
        moments: checksum of the moments that worker 0's optimizers bring from steps before the run; empty without.
    """

    restored: bool
    from_checkpoint: bool = False
    moments: str = ""
    kind: Literal["initialise"] = "initialise"


@message
class Push:
    """An update is ready in the worker's slot.

    Attributes:
        sequence: the worker's own number for the update.
        base_version: the server's version that the update was computed from.
        weight: target tokens, or local steps, of the update.
        norm: the update's L2 norm if the worker knows it. NaN or Inf for an update with these that should be
            compressed: there is no payload for it.
        pulls: whether the worker will ask for the parameters next, to start from them. A worker on another machine may
            get them behind the answer, which saves a round trip.
    """

    sequence: int
    base_version: int
    weight: float
    report: Report = field(default_factory=Report)
    norm: float | None = None
    pulls: bool = False
    kind: Literal["push"] = "push"


@message
class Pull:
    """Asks for the current parameters, in the worker's slot or behind the answer.

    Attributes:
        look_ahead: how many versions ahead of them to go, along the server's last step.
        starts: whether work starts from them: then the server's rule may look ahead, and they may be compressed.
            Otherwise they are the server's own, in fp32.
        fragment_of: the number of an update of this worker whose fragment alone it asks for; None for the whole model.
    """

    look_ahead: Annotated[float, Field(ge=0, le=1024)] = 0.0
    starts: bool = False
    fragment_of: Annotated[int, Field(ge=0)] | None = None
    kind: Literal["pull"] = "pull"


@message
class WaitForWork:
    """Asks for work for an idle worker; the answer comes when there is some, or when the run is finished.

    Attributes:
        for_end: whether the worker has taken its last step, and waits for the end alone: the run is finished when no
            worker is at work any more.
    """

    for_end: bool = False
    kind: Literal["wait"] = "wait"


@message
class ScheduleEvent:
    """Tells that worker 0 begins or ends an epoch, which the learning-rate schedule follows.

    Attributes:
        number: names the event; a second message with the same number has no effect.
        loss: the validation loss at the end of the epoch.
    """

    number: str
    event: Literal["begin_epoch", "end_epoch"]
    epoch: int
    loss: float | None = None
    kind: Literal["schedule_event"] = "schedule_event"


@message
class SaveState:
    """Asks the server to write its whole state into a file; the server chooses its name."""

    kind: Literal["save_state"] = "save_state"


@message
class Alive:
    """Shows that the worker is alive while it computes; there is no answer."""

    kind: Literal["alive"] = "alive"


@message
class Leave:
    """The worker leaves for good; ``finished`` ends the run for all workers."""

    finished: bool
    kind: Literal["leave"] = "leave"


Request = Introduce | Hello | Initialise | Push | Pull | WaitForWork | ScheduleEvent | SaveState | Alive | Leave
