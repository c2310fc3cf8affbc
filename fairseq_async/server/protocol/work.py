"""What a worker says of its work, and what the server gives it to do next: parts of the messages between them."""

from typing import Annotated

from pydantic import AfterValidator, Field

from fairseq_async.method_spec import JsonObject
from fairseq_async.server.positions import bounded
from fairseq_async.server.protocol.message import message

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]  # sums of a log's numbers are floats, which are exact up to there


@message
class Report:
    """What a worker says of itself with an update. It goes into ``events.jsonl``, where README.md describes each field.

    Attributes:
        local_steps: the number of steps in this update; None for a gradient.
        look_ahead: versions ahead of the base version at which the worker has started; None at that version itself.
        position: where the worker is in its data, for its restart; the server does not look into it.
        bytes_sent: of this update: of its payload, where it is compressed, header included.
        bytes_received: of the parameters that were taken since the update before.
        residual_norm: L2 norm of what the updates before this one had that was not sent, where it is kept.
        payload: checksum of a compressed update, which the server notes.
        start_payload: checksum of the compressed parameters that this work started from; None where they came in fp32.
        first_batch: with a worker's first update, a digest of its first batch, where that is known.
    """

    position: Annotated[JsonObject | None, AfterValidator(bounded)] = None
    epochs: Seconds = 0.0
    loss: float | None = None
    tokens: Seconds | None = None
    push_seconds: Seconds | None = None
    pull_seconds: Seconds | None = None
    local_steps: Count | None = None
    step_seconds: Seconds | None = None
    computing_seconds: Seconds | None = None
    waiting_seconds: Seconds | None = None
    shard: Count | None = None
    offset: Count | None = None
    progress: float | None = None
    progress_per_step: float | None = None
    server_seconds: Seconds | None = None
    look_ahead: Seconds | None = None
    bytes_sent: Count | None = None
    bytes_received: Count | None = None
    residual_norm: Seconds | None = None
    payload: Annotated[str, Field(max_length=8)] | None = None
    start_payload: Annotated[str, Field(max_length=8)] | None = None
    first_batch: Annotated[str, Field(max_length=32)] | None = None


@message
class Assignment:
    """The next work of one worker.

    Attributes:
        learning_rate: of the server's optimizer, for the worker's log; None under local SGD.
        local_steps: how many to take before the next exchange.
        shard: the part of the training set to draw from; None where the server chooses none.
        offset: the batch of the shard to begin with.
        progress: where the learning-rate schedule is at the first step, in mean local steps of a worker.
        progress_per_step: by how much each step of this worker moves the schedule.
        total_progress: where the whole run is, in mean local steps of a worker, or in whole steps of the server.
        idle: nothing is left to do for this worker while the others do their work.
        look_ahead: versions ahead of the server's at which to start.
    """

    learning_rate: float | None = None
    local_steps: int = 1
    shard: int | None = None
    offset: int = 0
    progress: float = 0.0
    progress_per_step: float = 1.0
    total_progress: float = 0.0
    idle: bool = False
    look_ahead: float = 0.0
