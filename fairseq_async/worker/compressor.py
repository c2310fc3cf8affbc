"""A worker's updates on their way into few bytes, and what was lost of them."""

import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from fairseq_async import compression
from fairseq_async.algorithms import ErrorFeedback
from fairseq_async.algorithms.codecs.payload import checksum_of
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError
from fairseq_async.method_spec import MethodSpec
from fairseq_async.server import Layout
from fairseq_async.server.protocol import Push


class Compressor:
    """Encodes one worker's updates, each once, and keeps the residual of a biased codec.

    What is drawn is drawn by the run's seed, the worker and the number of the update, so that a replay draws the same.

    Lost work: a worker that ends without a checkpoint loses its residual, which is about as much as one update, and no
    more. :meth:`load_state_dict` takes a residual back only where the server has come to the update that follows it.

    Args:
        worker: its number.
        feedback: whether a biased codec has its residual; without one, what is not sent is lost.
    """

    def __init__(
        self, options: compression.CodecOptions, spec: MethodSpec, layout: Layout, worker: int, feedback: bool = True
    ) -> None:
        self.codec = compression.build(options)
        self._sizes = [segment.size for segment in layout.segments]
        self._feedback = ErrorFeedback(self.codec, self._sizes) if self.codec.biased and feedback else None
        self._worker, self._prefix = worker, f"{spec.options.get('seed', 0)}/{worker}/"
        self._sequence = 0  # of the next update
        self._settling: Future[None] | None = None
        self._second_thread = ThreadPoolExecutor(1, thread_name_prefix="residual")  # there is none before it is used

    @property
    def keeps_residual(self) -> bool:
        """Whether it matters to later updates what became of one."""
        return self._feedback is not None

    def encode(self, push: Push, update: Tensor) -> tuple[Push, Tensor | None]:
        """The message, and the payload that goes with it; none for an update with NaN or Inf, which will be refused."""
        self._wait()
        self._sequence = push.sequence
        report = replace(push.report, residual_norm=self._residual_norm())
        try:
            payload = self._payload(update, push.weight, zlib.crc32(f"{self._prefix}{push.sequence}".encode()))
        except CodecError:
            return replace(push, report=replace(report, bytes_sent=0), norm=float("nan")), None
        report = replace(report, bytes_sent=len(payload), payload=f"{checksum_of(payload):08x}")
        return replace(push, report=report, norm=None), torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    def settle(self, taken: bool) -> None:
        """After the answer: whether the update is in the server's parameters."""
        self._sequence += 1
        if self._feedback is not None:
            (self._feedback.acknowledge if taken else self._feedback.refuse)()

    def settle_meanwhile(self, taken: bool) -> None:
        """As :meth:`settle`, in a second thread, for which the next call of any other method waits."""
        self._wait()
        self._settling = self._second_thread.submit(self.settle, taken)

    def _wait(self) -> None:
        """Until the last answer is in the residual."""
        settling, self._settling = self._settling, None
        if settling is not None:
            settling.result()

    def state_dict(self) -> State:
        """For the worker's checkpoint, between two updates."""
        self._wait()
        feedback = None if self._feedback is None else self._feedback.state_dict()
        own = {"worker": self._worker, "sequence": self._sequence}
        return own | {"feedback": feedback, "codec": self.codec.state_dict()}

    def load_state_dict(self, state: State, sequence: int) -> bool:
        """Goes on from :meth:`state_dict`; returns whether it does.

        It does not where the state is another worker's, or of another time than the server's, whose next update of this
        worker has this ``sequence`` number: what the residual holds may be in the parameters already.
        """
        self._wait()
        if (state["worker"], state["sequence"]) != (self._worker, sequence):
            return False
        self._sequence = sequence
        self.codec.load_state_dict(state["codec"])
        if self._feedback is not None and state["feedback"] is not None:
            self._feedback.load_state_dict(state["feedback"])
        return True

    def _payload(self, update: Tensor, weight: float, seed: int) -> bytes:
        # what has no weight changes nothing, whatever it has: the residual waits for the next
        if self._feedback is not None and weight > 0:
            return self._feedback.send(update, seed)
        return self.codec.encode(update, seed, self._sizes)

    def _residual_norm(self) -> float | None:
        if self._feedback is None:
            return None
        return float(torch.linalg.vector_norm(self._feedback.residual, dtype=torch.float64))
