"""Compresses a worker's updates, and keeps the residual: the part of them that was not sent."""

import math
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_async.algorithms import Codec, ErrorFeedback, in_turn
from fairseq_async.algorithms.codecs.payload import checksum_of
from fairseq_async.algorithms.missing import clear, elements_of
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError
from fairseq_async.method.spec import MethodSpec
from fairseq_async.options import compression
from fairseq_async.protocol import Layout, Push


@dataclass(frozen=True)
class _CodecPart:
    """The codec and the residual of one fragment.

    Attributes:
        sizes: number of values of each tensor.
        feedback: keeps the residual; None where the unsent part is lost, or where nothing stays unsent.
    """

    codec: Codec
    sizes: tuple[int, ...]
    feedback: ErrorFeedback | None

    @property
    def residual_norm(self) -> float:
        if self.feedback is None:
            return 0.0
        return float(torch.linalg.vector_norm(self.feedback.residual, dtype=torch.float64))

    def encode(self, update: Tensor, weight: float, seed: int, without: Sequence[slice]) -> bytes:
        # an update of weight 0 changes nothing on the server: the residual waits for the next update
        if self.feedback is not None and weight > 0:
            return self.feedback.send(update, seed, without)
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

    Where the model is exchanged in fragments, each fragment has its own codec and residual, as if it was a model by
    itself: an update of a fragment is encoded together with the residual of that fragment alone.

    Random numbers are seeded with the run's seed, the worker and the number of the update, so that a replay draws the
    same ones.

    Lost work: a worker that ends without a checkpoint loses its residual, about as much as one update, and no more.
    :meth:`load_state_dict` restores a residual only where the server expects the update that follows it.

    Args:
        worker: the worker's number.
        feedback: whether to keep the residual of a biased codec; without one, the unsent part is lost.
    """

    def __init__(
        self, options: compression.CodecOptions, spec: MethodSpec, layout: Layout, worker: int, feedback: bool = True
    ) -> None:
        self._codec = options.model_dump()
        self._parts: list[_CodecPart] = []
        for fragment in layout.fragments(spec.fragments):
            codec, sizes = compression.build(options), tuple(s.size for s in layout.segments[fragment.tensors])
            has_feedback = codec.biased and feedback
            self._parts.append(_CodecPart(codec, sizes, ErrorFeedback(codec, sizes) if has_feedback else None))
        self._worker, self._prefix = worker, f"{spec.options.get('seed', 0)}/{worker}/"
        self._sequence = 0  # number of the next update
        self._settling: Future[None] | None = None
        self._second_thread = ThreadPoolExecutor(1, thread_name_prefix="residual")  # the thread starts at its first use

    @property
    def _part(self) -> _CodecPart:
        """The part of the update that is being sent, or, between two updates, of the next one."""
        return in_turn(self._parts, self._sequence)

    def encode(self, push: Push, update: Tensor) -> tuple[Push, Tensor | None]:
        """Returns the message and its payload; no payload for an update with NaN or Inf, which will be refused.

        Args:
            update: flat; of the fragment whose turn it is by the number of the update.
        """
        self._wait()
        self._sequence = push.sequence
        norm = (
            math.hypot(*(part.residual_norm for part in self._parts)) if self._parts[0].feedback is not None else None
        )
        report = replace(push.report, residual_norm=norm)
        try:
            seed, without = zlib.crc32(f"{self._prefix}{push.sequence}".encode()), self._without(push)
            payload = self._part.encode(update, push.weight, seed, without)
        except CodecError:
            return replace(push, report=replace(report, bytes_sent=0), norm=float("nan")), None
        report = replace(report, bytes_sent=len(payload), payload=checksum_of(payload))
        return replace(push, report=report, norm=None), torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    def decode(self, payload: Tensor, size: int, push: Push) -> Tensor:
        """Decodes a payload of ``size`` values, which came with ``push``, as the server does: flat, fp32."""
        decoded = self._parts[0].codec.decode(payload.numpy().data, size)  # a codec's state is used for encoding only
        return clear(decoded, self._without(push))

    def _without(self, push: Push) -> list[slice]:
        return elements_of(int(push.report.missing or "0", 16), in_turn(self._parts, push.sequence).sizes)

    def settle(self, taken: bool) -> None:
        """Settles the residual after the answer, which says whether the server has taken the update."""
        feedback = self._part.feedback
        self._sequence += 1
        if feedback is not None:
            (feedback.acknowledge if taken else feedback.refuse)()

    def withdraw(self) -> None:
        """Forgets the update that was sent after the run's last step: the server has not counted it, and a run that
        goes on from a checkpoint computes it again."""
        feedback = self._part.feedback
        if feedback is not None:
            feedback.withdraw()

    def settle_meanwhile(self, taken: bool) -> None:
        """Runs :meth:`settle` in a second thread; the next call of another method waits for it."""
        self._wait()
        self._settling = self._second_thread.submit(self.settle, taken)

    def _wait(self) -> None:
        """Waits until the residual is settled after the last answer."""
        settling, self._settling = self._settling, None
        if settling is not None:
            settling.result()

    def state_dict(self) -> State:
        """Returns the state for the worker's checkpoint, between two updates."""
        self._wait()
        own = {"worker": self._worker, "sequence": self._sequence, "codec": self._codec}
        return own | {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: State, sequence: int) -> bool:
        """Restores :meth:`state_dict`; returns whether the state fits.

        A state is ignored if it is another worker's, of another number of fragments, or of another time than the
        server's: then its residual may be in the parameters already. ``sequence`` is the number of this worker's next
        update on the server. A residual fits any codec: that of an earlier codec is sent by the run's present one.
        """
        self._wait()
        here = self._worker, len(self._parts), sequence
        if (state["worker"], len(state["parts"]), state["sequence"]) != here:
            return False
        self._sequence = sequence
        for part, own in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(own, same_codec=state.get("codec") == self._codec)
        return True
