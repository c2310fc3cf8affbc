"""Generates messages from the protocol's own schema: valid ones, and ones with one thing wrong."""

import json
import random
from collections.abc import Callable
from typing import Any, get_args

from pydantic import TypeAdapter

from fairseq_async.protocol import Request

_BIG = [2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**700]
_NUMBERS = [0, -1, 1, 0.5, -0.0, 1e-320, 1e-9, 1e6, 1e308, -1e308, float("nan"), float("inf"), -float("inf"), *_BIG]
_STRINGS = ["", "\x00", "\x1b[2J\r\n", "../../etc/passwd", "é" * 50, "\ud800", "9" * 5000, "-1", "null", "a" * 40_000]
_DEEP = 700  # levels of lists


class Grammar:
    """Draws random messages of every kind of request in the protocol.

    Args:
        rng: source of randomness.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._schemas = {str(kind.kind): TypeAdapter(kind).json_schema() for kind in get_args(Request)}
        self.kinds = sorted(self._schemas)

    def valid(self, kind: str, **given: Any) -> dict[str, Any]:
        """Returns a message of this kind that fits its schema; ``given`` sets the values of some keys."""
        schema = self._schemas[kind]
        message: dict[str, Any] = self._value(schema, schema)
        return message | {"kind": kind} | given

    def wrong(self, message: dict[str, Any]) -> bytes:
        """Returns the JSON of a message with one thing changed; mostly that makes it invalid."""
        changed = json.loads(json.dumps(message))
        holder, key = self._place(changed)
        match self.rng.randrange(10):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[self.rng.choice(_STRINGS)] = self.rng.choice(_NUMBERS)
            case 2 if self.rng.random() < 0.1:  # rare: mostly no JSON any more, which ends the connection
                return self._damaged(to_json(changed))
            case 3:
                return to_json(changed)[:-1] + b", " + to_json(changed)[1:]  # every key twice
            case 4:
                holder[key] = [holder[key]] * self.rng.choice((1, 100))
            case _ if key != "finished":  # not "finished": a worker may end the run, and the server obeys
                holder[key] = self._edge()
        return to_json(changed)

    def _place(self, message: dict[str, Any]) -> tuple[Any, Any]:
        """Returns a container in the message, and a key or an index of it."""
        holder: Any = message
        while True:
            key = self.rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            if not (isinstance(holder[key], dict | list) and holder[key]) or self.rng.random() < 0.2:
                return holder, key
            holder = holder[key]

    def _edge(self) -> Any:
        match self.rng.randrange(8):
            case 0:
                return self.rng.choice([None, True, False])
            case 1 | 2:
                return self.rng.choice(_STRINGS)
            case 3:
                return self.rng.choice([[], {}, [[]], {"a": {"": None}}, [1] * 100])
            case 4 if self.rng.random() < 0.05:
                return _nested(self.rng.choice((9, _DEEP)))
            case _:
                return self.rng.choice(_NUMBERS)

    def _damaged(self, body: bytes) -> bytes:
        damaged = bytearray(body)
        for _ in range(self.rng.choice((1, 1, 4))):
            place = self.rng.randrange(len(damaged))
            if self.rng.random() < 0.5:
                damaged[place] ^= 1 << self.rng.randrange(8)
            else:
                del damaged[place : place + self.rng.choice((1, 5))]
        return bytes(damaged)

    def _value(self, schema: dict[str, Any], root: dict[str, Any]) -> Any:
        if "$ref" in schema:
            return self._value(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else self.rng.choice(schema["enum"])
        if "anyOf" in schema:
            return self._value(self.rng.choice(schema["anyOf"]), root)
        draw = self._draws().get(schema.get("type", ""), self._any)
        if schema.get("type") == "object" and "properties" in schema:
            required = schema.get("required", [])
            return {
                key: self._value(inner, root)
                for key, inner in schema["properties"].items()
                if key in required or self.rng.random() < 0.5
            }
        if schema.get("type") == "array":
            return [self._value(schema.get("items", {}), root) for _ in range(self.rng.randrange(3))]
        return draw()

    def _draws(self) -> dict[str, Callable[[], Any]]:
        return {
            "integer": lambda: self.rng.choice((0, 1, 2, 7, 1000)),
            "number": lambda: self.rng.choice((0.0, 0.25, 1.0, 3.0, 1000.0)),
            "string": lambda: self.rng.choice(("", "x", "a-1", "weight")),
            "boolean": lambda: self.rng.random() < 0.5,
            "null": lambda: None,
        }

    def _any(self) -> Any:
        return self.rng.choice([None, 1, "x", [1, 2], {"batch": 3, "epoch": [1, {"seed": 2}]}])


def to_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=True).encode()


def _nested(levels: int) -> Any:
    nested: Any = 1
    for _ in range(levels):
        nested = [nested]
    return nested
