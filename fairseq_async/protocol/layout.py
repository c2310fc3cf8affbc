"""The layout of a model: where each tensor lies in the flat buffer that server and workers exchange."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, FailFast, Field, JsonValue, TypeAdapter, with_config
from torch import Tensor

from fairseq_async.algorithms import Fragment, fragments_of
from fairseq_async.errors import ConfigurationError, option

_STRICT = ConfigDict(extra="forbid", strict=True)
_ROWS = TypeAdapter(list[tuple[str, list[int], str]])
_LARGEST = 1 << 42  # parameters: 16 TiB of fp32
BUFFER = " buffer"
NO_BUFFERS = "{} is {}: the model has no buffers of floating-point numbers that it saves; leave it out"
MOST_TENSORS, _MOST_DIMENSIONS = 1 << 15, 64  # torch has no tensor of more dimensions
_Extent = Annotated[int, Field(ge=0, le=_LARGEST)]


@with_config(_STRICT)
@dataclass(frozen=True)
class Segment:
    """One named tensor; ``dtype`` is its type in the worker, with :data:`BUFFER` behind it for a module's buffer (the
    flat tensor itself is fp32)."""

    name: str
    shape: Annotated[tuple[_Extent, ...], FailFast(), Field(max_length=_MOST_DIMENSIONS)]
    dtype: str

    @property
    def is_buffer(self) -> bool:
        """Whether no optimizer trains it: batch normalisation's statistics are such a tensor."""
        return self.dtype.endswith(BUFFER)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """Shape and type in words."""
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"

    def __str__(self) -> str:
        return f"{self.name} {self.kind}"


def _sized(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    if not 0 < sum(segment.size for segment in segments) <= _LARGEST:
        raise ValueError("these tensors are no model: they have no parameters, or more than any memory")
    return segments


@with_config(_STRICT)
@dataclass(frozen=True)
class Layout:
    """The model's tensors in the order of the buffer."""

    segments: Annotated[tuple[Segment, ...], FailFast(), Field(max_length=MOST_TENSORS), AfterValidator(_sized)]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]], what: str = "") -> "Layout":
        """Returns the layout of these tensors, end to end in this order; ``what`` is "" or :data:`BUFFER`."""
        return cls(tuple(Segment(n, tuple(t.shape), str(t.dtype).removeprefix("torch.") + what) for n, t in named))

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def without_buffers(self) -> "Layout":
        """The layout of the parameters alone; a model's buffers are behind them."""
        return Layout(tuple(segment for segment in self.segments if not segment.is_buffer))

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """Yields a view for each segment, of the segment's shape, into a flat buffer of :attr:`size` elements."""
        for segment, part in zip(self.segments, flat.split([s.size for s in self.segments]), strict=True):
            yield part.view(segment.shape)

    def fragments(self, count: int) -> tuple[Fragment, ...]:
        """Returns the fragments in which the model is exchanged; see :func:`~fairseq_async.algorithms.fragments_of`.

        Raises:
            ConfigurationError: the model has fewer tensors than ``count``.
        """
        try:
            return fragments_of([segment.size for segment in self.segments], count)
        except ValueError as error:
            raise ConfigurationError(f"{option('fragments')} is {count}: {error}") from error

    def difference(self, other: "Layout") -> str | None:
        """Returns in words the first tensor in which this layout differs from the other; None if they are equal."""
        if self.segments == other.segments:
            return None
        ours, theirs = ({segment.name: segment for segment in each.segments} for each in (self, other))
        for name, own in ours.items():
            if own != theirs.get(name, own):
                return f"its {own.name} is {own.kind}, theirs is {theirs[name].kind}"
        if alone := next((each for each in self.segments if each.name not in theirs), None):
            return f"theirs lacks {alone}"
        if lacking := next((each for each in other.segments if each.name not in ours), None):
            return f"it lacks {lacking}"
        pairs = zip(self.segments, other.segments, strict=False)
        moved = (f"it has {own.name} where theirs has {their.name}" for own, their in pairs if own != their)
        return next(moved, "a name is there twice")

    def to_json(self) -> list[JsonValue]:
        """Returns a row for each tensor: name, shape, type."""
        return [[s.name, list(s.shape), s.dtype] for s in self.segments]

    @classmethod
    def from_json(cls, rows: object) -> "Layout":
        """Returns the layout of such rows; raises a pydantic ``ValidationError``, which is a ValueError, for others."""
        return cls(tuple(Segment(name, tuple(shape), dtype) for name, shape, dtype in _ROWS.validate_python(rows)))
