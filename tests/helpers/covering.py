"""Few sets of options in which each two come together: a mistake that needs two options shows in one of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

from fairseq_async.errors import ConfigurationError

_Made = TypeVar("_Made")
Options = Mapping[str, Mapping[str, Any]]


def covering(
    make: Callable[[dict[str, Any]], _Made], options: Options, last: Options | None = None
) -> Iterator[tuple[list[str], _Made]]:
    """Yields the names of options, and what ``make`` gives for all of them together; it raises a ConfigurationError for
    those that do not go together.

    Args:
        options: by their names.
        last: likewise; these come only with one that has not come together with them yet.
    """
    every = [*options, *(last or {})]
    given = {**options, **(last or {})}

    def made(names: Sequence[str]) -> _Made | None:
        together = _together([given[name] for name in names])
        try:
            return None if together is None else make(together)
        except ConfigurationError:
            return None

    left = {pair for pair in combinations(every, 2) if made(pair) is not None}
    for pair in combinations(every, 2):
        if pair not in left:
            continue
        names = list(pair)
        for name in options:
            more = sorted({name, *names}, key=every.index)
            if len(more) > len(names) and left & set(combinations(more, 2)) - set(combinations(names, 2)):
                names = names if made(more) is None else more
        left -= set(combinations(names, 2))
        found = made(names)
        assert found is not None
        yield names, found


def _together(options: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """All of these; None where two give other values for the same key, but for codecs, which are put together."""
    both: dict[str, Any] = {}
    for key, value in (pair for each in options for pair in each.items()):
        if key == "compress" and key in both:
            both[key] = f"{both[key]},{value}"
        elif both.setdefault(key, value) != value:
            return None
    return both
