"""A worker's report of its work, and its next work from the server: parts of the messages between them."""

import json
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol.layout import MOST_TENSORS
from fairseq_async.protocol.message import message

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LARGEST = 1 << 53  # a log's numbers are summed as floats, which are exact up to there
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Tokens = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]  # a rule squares them
DRAWN = "micro_batches"
"""The key of a worker's position that is its number of micro-batches so far, and no place in an iterator."""
_BYTES, _DEPTH = 1 << 15, 8  # of a worker's position in its data, which goes through the server into snapshots and logs


def bounded(position: JsonObject | None) -> JsonObject | None:
    """Returns the position, checked: snapshots and logs must stay readable, whatever a worker sends.

    Raises:
        ValueError: the position is too large, too deep, or has a number of more than 64 bits.
    """
    if position is not None and len(json.dumps(position)) > _BYTES:
        raise ValueError(f"it has more than {_BYTES} bytes")
    _check(position, _DEPTH)
    return position


def _check(value: JsonValue, depth: int) -> None:
    if depth < 0:
        raise ValueError(f"it is nested deeper than {_DEPTH} levels")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("a number in it has more than 64 bits")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check(part, depth - 1)


@message
class Report:
    """A worker's report with an update. It goes into ``events.jsonl``; README.md describes each field there.

    Attributes:
        local_steps: the number of steps in this update; None for a gradient.
        look_ahead: how many versions ahead of the base version the worker started; None for that version itself.
        position: where the worker is in its data, for its restart; the server does not look into it.
        bytes_sent: size of this update; where it is compressed, of its payload, header included.
        bytes_received: size of the parameters that the worker has taken since the update before.
        residual_norm: L2 norm of the part of earlier updates that was not sent, where the worker keeps it.
        payload: checksum of a compressed update, as it has arrived at the server.
        start_payload: checksum of the compressed parameters that this work started from; None where they came in fp32.
        offset: batch of the shard at which this update begins; of a gradient, the ``first_micro_batch``.
        micro_batches: how many of them this gradient is of, where the server assigns them.
        ranks: of this worker, where it has several.
        share: its number of ranks over the workers' mean number, in local SGD; None for 1.
        missing: the tensors of the layout that have no gradient in this update, as bits
            (:mod:`~fairseq_async.algorithms.missing`) in hexadecimal digits; None where all have one.
        first_batch: digest of the worker's first batches, with its first or second update, where they are known.
    """

    position: Annotated[JsonObject | None, AfterValidator(bounded)] = None
    epochs: Seconds = 0.0
    loss: float | None = None
    tokens: Tokens | None = None
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
    micro_batches: Count | None = None
    ranks: Count | None = None
    share: Annotated[float, Field(gt=0, le=1 << 16)] | None = None
    bytes_sent: Count | None = None
    bytes_received: Count | None = None
    residual_norm: Seconds | None = None
    payload: Annotated[str, Field(max_length=8)] | None = None
    start_payload: Annotated[str, Field(max_length=8)] | None = None
    missing: Annotated[str, Field(max_length=MOST_TENSORS // 4, pattern="^[0-9a-f]+$")] | None = None
    first_batch: Annotated[str, Field(max_length=32)] | None = None


@message
class Assignment:
    """The next work of one worker.

    Attributes:
        learning_rate: learning rate of the server's optimizer, for the worker's log; None under local SGD.
        local_steps: how many steps to take before the next exchange.
        shard: the part of the training set to draw from; None where the server chooses none.
        offset: the batch of the shard to begin with.
        progress: position of the learning-rate schedule at the first step, in mean local steps of a worker.
        progress_per_step: by how much each step of this worker moves the schedule.
        total_progress: position of the whole run, in mean local steps of a worker, or in steps of the server.
        idle: whether nothing is left for this worker to do while the others do their work.
        look_ahead: how many versions ahead of the server's to start.
        micro_batches: how many of them to accumulate for the next gradient; 0 where the worker decides.
        first_micro_batch: number of the first of them in the run's order of the data; None where the worker decides.
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
    micro_batches: int = 0
    first_micro_batch: int | None = None
