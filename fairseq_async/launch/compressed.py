"""What compressed updates have come to, from the events of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.server.run_files.description import RunDescription
from fairseq_async.server.run_files.events import Event


@dataclass(frozen=True)
class Compressed:
    """Compressed updates of one worker, or of several.

    Attributes:
        sent: bytes of all their payloads, headers included.
        ratio: bytes of the same updates in fp32, over these; None where the size of the model is not known.
        residual: L2 norm of what a worker had not sent when it sent its last update; of several the largest, None with
            a codec that keeps none.
    """

    sent: int
    ratio: float | None
    residual: float | None

    @classmethod
    def of(cls, events: Sequence[Event], parameters: int | None) -> "Compressed | None":
        """None where no update was compressed."""
        payloads = [event for event in events if event.payload]
        if not payloads:
            return None
        sent = sum(event.bytes_sent or 0 for event in payloads)
        last = {event.worker: event.residual_norm for event in payloads if event.residual_norm is not None}
        ratio = 4 * parameters * len(payloads) / sent if parameters and sent else None
        return cls(sent, ratio, max(last.values(), default=None))

    def cells(self, seconds: float) -> tuple[str, str, str]:
        """Kilobytes per second, ratio and residual, for a table."""
        rate = self.sent / seconds / 1e3 if seconds else 0.0
        ratio = "-" if self.ratio is None else f"{self.ratio:.1f}"
        residual = "-" if self.residual is None else f"{self.residual:.3g}"
        return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", ratio, residual


def read_parameters(run_dir: Path) -> int | None:
    """The number of a run's parameters by its ``run.json``; None where that does not say it."""
    try:
        return RunDescription.read(run_dir).layout.size
    except ConfigurationError:
        return None
