"""The options of compression: the codecs of a run's updates and parameters, as flags and keys give them.

Like :mod:`fairseq_async.options.config`, this module does not import torch before a codec is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

if TYPE_CHECKING:
    from fairseq_async.algorithms import Codec


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BF16Options(_Parameters):
    """Codec ``bf16``: 16 bits per value."""

    codec: Literal["bf16"] = "bf16"


class Int8Options(_Parameters):
    """Codec ``int8``: 8 bits per value."""

    codec: Literal["int8"] = "int8"
    block: int = Field(256, ge=1, le=1 << 20, description="values that share a scale")


class E3M0Options(_Parameters):
    """Codec ``e3m0``: 4 bits per value."""

    codec: Literal["e3m0"] = "e3m0"
    block: int = Field(256, ge=1, le=1 << 20, description="values that share a scale")


class TopKOptions(_Parameters):
    """Codec ``topk``: sends the largest values of each chunk."""

    codec: Literal["topk"] = "topk"
    chunk: int = Field(4096, ge=1, le=1 << 16, description="neighbouring values, of which the largest are sent")
    keep: int = Field(64, ge=1, description="values of a chunk that are sent")
    bits: int = Field(2, ge=1, le=8, description="bits of each value that is sent")


class AdaCompOptions(_Parameters):
    """Codec ``adacomp``: sends the values that are about as large as the largest value of their bin."""

    codec: Literal["adacomp"] = "adacomp"
    bin_size: int = Field(500, ge=1, lt=1 << 16, description="neighbouring values in a bin")
    scale: Literal["tensor", "bin"] = Field("tensor", description="what has a scale of its own")


class DQSGDOptions(_Parameters):
    """Codec ``dqsgd``: stochastic rounding to a number of bits that follows the norm."""

    codec: Literal["dqsgd"] = "dqsgd"
    bits: int = Field(4, ge=2, le=8, description="bits of each value of the first update")
    block: int | None = Field(None, ge=1, le=1 << 20, description="values that share a norm; all of a tensor if off")
    norm: Literal["l2", "max"] = Field("l2", description="what the values are divided by")


CodecOptions = BF16Options | Int8Options | E3M0Options | TopKOptions | AdaCompOptions | DQSGDOptions
_CODECS: TypeAdapter[CodecOptions] = TypeAdapter(Annotated[CodecOptions, Field(discriminator="codec")])
NAMES = tuple(str(model.model_fields["codec"].default) for model in CodecOptions.__args__)
_LONGEST_BIN = 1 << 14  # with a scale for each bin, a place and two flags are a number of 16 bits
PullOptions = BF16Options | Int8Options | E3M0Options


class Compress(BaseModel):
    """The codecs of a run, one for each direction; None where tensors are sent in fp32.

    Attributes:
        push: codec of the workers' updates.
        pull: codec of the parameters from which the workers' work starts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    push: CodecOptions | None = None
    pull: PullOptions | None = None


def parse(given: object) -> Compress:
    """Parses the value of a flag or key: ``topk``, ``topk:keep=32,bits=4``, ``pull=bf16``, ``e3m0,pull=int8``, or a
    mapping with ``push`` and ``pull``.

    Raises:
        ValueError: there is no such codec, or a parameter is unknown or out of its range.
    """
    if isinstance(given, Compress):
        return given
    ways = _ways(given) if isinstance(given, str) else given
    if ways is None:
        return Compress()
    if not isinstance(ways, Mapping):
        raise ValueError(f"give the name of a codec ({', '.join(NAMES)}), or a mapping with 'push' and 'pull'")
    if unknown := sorted(set(ways) - {"push", "pull"}):
        raise ValueError(
            f"{unknown[0]!r} is not compressed; 'push' is, the updates of the workers, and 'pull', their parameters"
        )
    return Compress(push=_codec(ways.get("push")), pull=_pull_codec(ways.get("pull")))


def _ways(text: str) -> dict[str, str]:
    """Turns ``codec,pull=codec`` into a mapping; a codec without ``push=`` or ``pull=`` before it is for updates."""
    first, *named = re.split(r"(?:^|,)\s*(push|pull)=", text)
    pairs = [("push", first)] * bool(first or not named) + list(zip(named[::2], named[1::2], strict=True))
    ways = dict(pairs)
    if len(ways) < len(pairs):
        raise ValueError("'push' or 'pull' is given twice")
    return ways


Compression = Annotated[Compress, BeforeValidator(parse)]


def _codec(given: object) -> CodecOptions | None:
    values = _from_text(given) if isinstance(given, str) else given
    if values is None or isinstance(values, CodecOptions):
        return values
    if not isinstance(values, Mapping) or "codec" not in values:
        raise ValueError(f"give the name of a codec ({', '.join(NAMES)}), or a mapping with it as its 'codec'")
    if values["codec"] not in NAMES:
        raise ValueError(f"there is no codec {values['codec']!r}; there are {', '.join(NAMES)}")
    try:
        options = _CODECS.validate_python(dict(values))
    except ValidationError as error:
        raise ValueError(f"{values['codec']}: {_mistake(str(values['codec']), error)}") from error
    if isinstance(options, TopKOptions) and options.keep > options.chunk:
        raise ValueError(f"topk: keep is {options.keep}: a chunk has only {options.chunk} values")
    if isinstance(options, AdaCompOptions) and options.scale == "bin" and options.bin_size > _LONGEST_BIN:
        raise ValueError(f"adacomp: bin_size is {options.bin_size}: with scale=bin it is at most {_LONGEST_BIN}")
    return options


def _mistake(codec: str, error: ValidationError) -> str:
    first = error.errors()[0]
    name = first["loc"][-1]
    if first["type"] != "extra_forbidden":
        return f"{name}: {first['msg']} (it is {first['input']!r})"
    [options] = [model for model in CodecOptions.__args__ if model.model_fields["codec"].default == codec]
    known = ", ".join(key for key in options.model_fields if key != "codec")
    return f"there is no parameter {name!r}; {f'there are {known}' if known else 'leave it out'}"


def _pull_codec(given: object) -> PullOptions | None:
    options = _codec(given)
    if options is None or isinstance(options, PullOptions):
        return options
    raise ValueError(f"pull is {options.codec}: a worker needs all parameters; give bf16, int8 or e3m0")


def sends_changes(pull: PullOptions) -> bool:
    """Whether the codec is too coarse for parameters themselves, so that the server sends a worker the change since it
    took them last."""
    return isinstance(pull, E3M0Options)


def _from_text(text: str) -> dict[str, str] | None:
    """Turns ``name:key=value,key=value`` into a mapping; returns None for ``none``."""
    name, _, parameters = text.partition(":")
    if name == "none" and not parameters:
        return None
    values = {"codec": name}
    for part in filter(None, parameters.split(",")):
        given, _, value = part.partition("=")
        key = given.strip().replace("-", "_")
        if key in values:
            raise ValueError(f"{name}: {key} is given twice")
        values[key] = value.strip()
    return values


def build(options: CodecOptions) -> Codec:
    """Builds the codec of these options."""
    from fairseq_async import algorithms  # start-up time: torch

    match options:
        case BF16Options():
            return algorithms.BF16()
        case Int8Options():
            return algorithms.Int8(options.block)
        case E3M0Options():
            return algorithms.E3M0(options.block)
        case TopKOptions():
            return algorithms.TopK(options.chunk, options.keep, options.bits)
        case AdaCompOptions():
            by_bin = options.scale == "bin"
            return algorithms.AdaCompBins(options.bin_size) if by_bin else algorithms.AdaComp(options.bin_size)
        case DQSGDOptions():
            return algorithms.DQSGD(options.bits, options.block, options.norm)
