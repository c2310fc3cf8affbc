"""Statistics of compressed updates, from the events of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.records.description import RunDescription
from fairseq_async.records.events import Event


@dataclass(frozen=True)
class Compressed:
    """Totals of the compressed updates of one worker, or of several.

    Attributes:
        sent: number of bytes of all payloads, headers included.
        ratio: bytes of the same updates in fp32, divided by ``sent``; None where the size of the model is not known.
        residual: L2 norm of the residual of a worker when it sent its last update; the largest of several workers, None
            with a codec that keeps no residual.
    """

    sent: int
    ratio: float | None
    residual: float | None

    @classmethod
    def of(cls, events: Sequence[Event], sizes: Sequence[int] | None) -> "Compressed | None":
        """Adds up the compressed updates among the events; None where no update was compressed.

        Args:
            sizes: number of values of an update; for a model in fragments, of each fragment in turn.
        """
        payloads = [event for event in events if event.payload]
        if not payloads:
            return None
        sent = sum(event.bytes_sent or 0 for event in payloads)
        last = {event.worker: event.residual_norm for event in payloads if event.residual_norm is not None}
        whole = sum(4 * sizes[event.sequence % len(sizes)] for event in payloads) if sizes else 0
        ratio = whole / sent if whole and sent else None
        return cls(sent, ratio, max(last.values(), default=None))

    def cells(self, seconds: float) -> tuple[str, str, str]:
        """Returns kilobytes per second, ratio and residual as cells of a table."""
        rate = self.sent / seconds / 1e3 if seconds else 0.0
        ratio = "-" if self.ratio is None else f"{self.ratio:.1f}"
        residual = "-" if self.residual is None else f"{self.residual:.3g}"
        return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", ratio, residual


def read_sizes(run_dir: Path) -> list[int] | None:
    """Returns the number of values of a run's updates, for each fragment in turn, from its ``run.json``; None where
    that does not say it."""
    try:
        run = RunDescription.read(run_dir)
        return [fragment.size for fragment in run.layout.fragments(run.fragments)]
    except ConfigurationError:
        return None
