"""Limits on a worker's position in its data, which goes through the server into snapshots and logs."""

import json

from pydantic import JsonValue

from fairseq_async.method.spec import JsonObject

_BYTES, _DEPTH = 1 << 15, 8


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
