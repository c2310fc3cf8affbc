"""How many bytes an exchange sends: with codecs that are named, or as a run has sent them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fairseq_async.errors import ConfigurationError
from fairseq_async.method.spec import JsonObject
from fairseq_async.options import compression
from fairseq_async.protocol import Layout
from fairseq_async.records.events import Event

_FP32 = 4


@dataclass(frozen=True)
class PayloadBytes:
    """The bytes in which a codec sends a vector of the model's size.

    Attributes:
        codec: name of the codec.
        size: bytes, headers included; their mean, where they differ from payload to payload.
        known: how the size is known: exactly, as a mean, or under which assumption.
    """

    codec: str
    size: float
    known: str = "exact"


@dataclass(frozen=True)
class ExchangeBytes:
    """The bytes of an update, ``push``, and of the parameters that come back, ``pull``."""

    push: PayloadBytes
    pull: PayloadBytes

    @property
    def compressed(self) -> bool:
        return self.push.codec != "fp32" or self.pull.codec != "fp32"


def of_codecs(text: str, layout: Layout) -> ExchangeBytes:
    """Returns the bytes of an exchange of a model with this ``--compress``.

    Raises:
        ConfigurationError: there is no such codec, or it has no such parameter.
    """
    given = _parsed(text, f"--compress {text}")
    return ExchangeBytes(_of_codec(given.push, layout), _of_codec(given.pull, layout))


def of_run(method: JsonObject, events: Sequence[Event], layout: Layout) -> ExchangeBytes:
    """Returns the bytes of a run's exchanges, by its ``run.json``, and by its events if its updates are compressed.

    Args:
        method: the ``method`` of ``run.json``.

    Raises:
        ConfigurationError: the method names a codec that does not exist.
    """
    options = method.get("options")
    given = _parsed(options.get("compress") if isinstance(options, dict) else None, 'run.json: "compress"')
    push = _of_codec(given.push, layout)
    sizes = [event.bytes_sent for event in events if event.payload and event.bytes_sent]
    if given.push is not None and sizes:
        push = PayloadBytes(push.codec, fmean(sizes), "mean of the run")
    return ExchangeBytes(push, _of_codec(given.pull, layout))


def _parsed(given: object, where: str) -> compression.Compress:
    try:
        return compression.parse(given)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _of_codec(options: compression.CodecOptions | None, layout: Layout) -> PayloadBytes:
    if options is None:
        return PayloadBytes("fp32", _FP32 * layout.size)
    codec = compression.build(options)
    size = codec.usual_bytes([segment.size for segment in layout.segments])
    return PayloadBytes(options.codec, size, f"assumed: {codec.assumption}" if codec.assumption else "exact")
