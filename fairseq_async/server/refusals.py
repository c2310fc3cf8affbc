"""Counts what the server does not take, and says so now and then: a flood must not fill the disk."""

import sys
from collections import Counter


class Refusals:
    """Writes the first refusal of a kind to stderr, then the second, the fourth, the eighth and so on.

    Attributes:
        counts: by kind.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count(self, kind: str, who: str, what: object) -> None:
        """One more of this kind; ``who`` has sent it."""
        self.counts[kind] += 1
        count = self.counts[kind]
        if count & (count - 1) == 0:
            print(f"refused ({kind}, {count} so far): {who}: {str(what)[:200]}", file=sys.stderr, flush=True)
