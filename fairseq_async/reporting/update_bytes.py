"""How many bytes an update has on the line: of a codec, or as a run has sent it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fairseq_async import compression
from fairseq_async.errors import ConfigurationError
from fairseq_async.method_spec import JsonObject
from fairseq_async.server import Layout
from fairseq_async.server.events import Event

_FP32 = 4


@dataclass(frozen=True)
class UpdateBytes:
    """The bytes of an update.

    Attributes:
        codec: in words.
        size: headers included; a mean, where they differ from update to update.
        known: how the size is known: what is assumed, where something is.
    """

    codec: str
    size: float
    known: str


def of_codec(text: str, layout: Layout) -> UpdateBytes:
    """What ``--compress`` would send of a model.

    Raises:
        ConfigurationError: there is no such codec, or it has no such parameter.
    """
    try:
        options = compression.parse(text).push
    except ValueError as error:
        raise ConfigurationError(f"--compress {text}: {error}") from error
    if options is None:
        return UpdateBytes("fp32", _FP32 * layout.size, "exact")
    codec = compression.build(options)
    size = codec.usual_bytes([segment.size for segment in layout.segments])
    return UpdateBytes(text, size, f"assumed: {codec.assumption}" if codec.assumption else "exact")


def of_run(method: JsonObject, events: Sequence[Event], layout: Layout) -> UpdateBytes:
    """What the updates of a run had, by the ``method`` of its ``run.json`` and by its events."""
    options = method.get("options")
    given = options.get("compress") if isinstance(options, dict) else None
    push = compression.parse(given).push
    sizes = [event.bytes_sent for event in events if event.payload and event.bytes_sent]
    if push is None or not sizes:
        return UpdateBytes("fp32", _FP32 * layout.size, "exact")
    return UpdateBytes(push.codec, fmean(sizes), "mean of the run")
