"""A worker's updates on their way into few bytes, and what was lost of them."""

import math
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_async import compression
from fairseq_async.algorithms import Codec, ErrorFeedback
from fairseq_async.algorithms.codecs.payload import checksum_of
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError
from fairseq_async.method_spec import MethodSpec
from fairseq_async.server import Layout
from fairseq_async.server.protocol import Push


@dataclass(frozen=True)
class _Part:
    """What updates of one fragment go through.

    Attributes:
        sizes: number of values of each tensor.
        feedback: None where what is not sent is lost, or nothing is.
    """

    codec: Codec
    sizes: tuple[int, ...]
    feedback: ErrorFeedback | None

    @property
    def residual_norm(self) -> float:
        if self.feedback is None:
            return 0.0
        return float(torch.linalg.vector_norm(self.feedback.residual, dtype=torch.float64))

    def encode(self, update: Tensor, weight: float, seed: int) -> bytes:
        # what has no weight changes nothing, whatever it has: the residual waits for the next
        if self.feedback is not None and weight > 0:
            return self.feedback.send(update, seed)
        return self.codec.encode(update, seed, self.sizes)

    def state_dict(self) -> State:
        feedback = None if self.feedback is None else self.feedback.state_dict()
        return {"feedback": feedback, "codec": self.codec.state_dict()}

    def load_state_dict(self, state: State, same_codec: bool) -> None:
        if same_codec:
            self.codec.load_state_dict(state["codec"])
        if self.feedback is not None and state["feedback"] is not None:
            self.feedback.load_state_dict(state["feedback"], same_codec)


class Compressor:
    """Encodes one worker's updates, each once, and keeps the residual of a biased codec.

    Where the model is exchanged in fragments, each has a codec and a residual of its own, as a model of its own would:
    an update of a fragment takes with it what was left of that fragment alone.

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
        self._codec = options.model_dump()
        self._parts: list[_Part] = []
        for fragment in layout.fragments(spec.fragments):
            codec, sizes = compression.build(options), tuple(s.size for s in layout.segments[fragment.tensors])
            has_feedback = codec.biased and feedback
            self._parts.append(_Part(codec, sizes, ErrorFeedback(codec, sizes) if has_feedback else None))
        self._worker, self._prefix = worker, f"{spec.options.get('seed', 0)}/{worker}/"
        self._sequence = 0  # of the next update
        self._settling: Future[None] | None = None
        self._second_thread = ThreadPoolExecutor(1, thread_name_prefix="residual")  # there is none before it is used

    @property
    def keeps_residual(self) -> bool:
        """Whether it matters to later updates what became of one."""
        return self._parts[0].feedback is not None

    @property
    def _part(self) -> _Part:
        """That of the update in hand, or, where none is, of the next one."""
        return self._parts[self._sequence % len(self._parts)]

    def encode(self, push: Push, update: Tensor) -> tuple[Push, Tensor | None]:
        """The message, and the payload that goes with it; none for an update with NaN or Inf, which will be refused.

        Args:
            update: flat, of the fragment whose turn it is by the number of the update.
        """
        self._wait()
        self._sequence = push.sequence
        report = replace(push.report, residual_norm=self._residual_norm())
        try:
            payload = self._part.encode(update, push.weight, zlib.crc32(f"{self._prefix}{push.sequence}".encode()))
        except CodecError:
            return replace(push, report=replace(report, bytes_sent=0), norm=float("nan")), None
        report = replace(report, bytes_sent=len(payload), payload=f"{checksum_of(payload):08x}")
        return replace(push, report=report, norm=None), torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    def decode(self, payload: Tensor, size: int) -> Tensor:
        """What the server makes of a payload of so many values: flat, fp32."""
        return self._parts[0].codec.decode(payload.numpy().data, size)  # whatever state a codec has is for encoding

    def settle(self, taken: bool) -> None:
        """After the answer: whether the update is in the server's parameters."""
        feedback = self._part.feedback
        self._sequence += 1
        if feedback is not None:
            (feedback.acknowledge if taken else feedback.refuse)()

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
        own = {"worker": self._worker, "sequence": self._sequence, "codec": self._codec}
        return own | {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: State, sequence: int) -> bool:
        """Goes on from :meth:`state_dict`; returns whether it does.

        It does not where the state is another worker's, of other fragments, or of another time than the server's, whose
        next update of this worker has this ``sequence`` number: what the residual holds may be in the parameters then.
        A residual is whatever codec's: one of another codec than the run has now is sent by the new one.
        """
        self._wait()
        here = self._worker, len(self._parts), sequence
        if (state["worker"], len(state["parts"]), state["sequence"]) != here:
            return False
        self._sequence = sequence
        for part, own in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(own, same_codec=state.get("codec") == self._codec)
        return True

    def _residual_norm(self) -> float | None:
        return math.hypot(*(part.residual_norm for part in self._parts)) if self.keeps_residual else None
