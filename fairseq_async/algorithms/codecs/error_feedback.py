"""Error feedback: what a codec loses is sent with the next update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_async.algorithms.codecs.codec import Codec
from fairseq_async.algorithms.missing import clear
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError


class ErrorFeedback:
    """Adds to each update what the codec lost of earlier ones (Seide et al. 2014, "1-Bit Stochastic Gradient Descent";
    Karimireddy et al. 2019, arXiv 1901.09847)::

        e ← residual + update;  Q(e) is sent;  residual ← e − Q(e)

    The acknowledged payloads and the residual add up to the sum of all updates. Therefore the residual changes only
    when an update is acknowledged or refused; a refused update goes back into it whole. The residual is kept in
    float64, in which sums of fp32 values lose nothing that fp32 could show; the codec encodes e in fp32.

    Args:
        codec: Q, the codec.
        sizes: number of values of each tensor in an update; None for one tensor.

    Attributes:
        pending: whether an update was sent that is neither acknowledged nor refused nor withdrawn.
    """

    def __init__(self, codec: Codec, sizes: Sequence[int] | None = None) -> None:
        self.codec, self._sizes = codec, sizes
        self._residual = _zeros(0)
        self._update: Tensor | None = None
        self._payload = b""
        self._without: Sequence[slice] = ()

    @property
    def residual(self) -> Tensor:
        """The part of all updates that was not sent: flat, fp32; empty before the first update."""
        return self._residual.float()

    @property
    def pending(self) -> bool:
        return self._update is not None

    def send(self, update: Tensor, seed: int = 0, without: Sequence[slice] = ()) -> bytes:
        """Returns the payload of an update plus the residual; the update is pending from then on.

        Args:
            without: parts of the update that nobody is to apply: their residual waits for an update that has them.

        Raises:
            CodecError: the update has NaN or Inf, is not of the size of the others, or the one before it is pending.
                The state has not changed then.
        """
        if self.pending:
            raise CodecError("an update was sent that was neither acknowledged nor refused")
        flat = update.detach().reshape(-1).to("cpu", torch.float32, copy=True)
        residual = self._residual if self._residual.numel() else _zeros(flat.numel())
        if residual.numel() != flat.numel():
            raise CodecError(f"an update of {flat.numel()} values: those before had {residual.numel()}")
        carried = clear(torch.add(residual, flat).float(), without)
        self._payload = self.codec.encode(carried, seed, self._sizes, newest=flat)
        self._residual, self._update, self._without = residual, flat, without
        return self._payload

    def acknowledge(self) -> None:
        """Settles the pending update as applied: the residual is what the codec lost. Does nothing if there is none."""
        if self._update is not None:
            sent = clear(self.codec.decode(self._payload, self._update.numel()), self._without)
            self._residual.add_(self._update).sub_(sent)
            self._forget()

    def refuse(self) -> None:
        """Settles the pending update as not applied: all of it goes into the residual, to be sent with the next one."""
        if self._update is not None:
            self._residual.add_(self._update)
            self._forget()

    def withdraw(self) -> None:
        """Forgets the pending update, as if it was never sent: the residual is that of the updates before it."""
        self._forget()

    def state_dict(self) -> State:
        """Returns the residual, the codec's state, and the pending update, if there is one."""
        payload = None if self._update is None else torch.frombuffer(bytearray(self._payload), dtype=torch.uint8)
        without = [(part.start, part.stop) for part in self._without]
        own = {"residual": self._residual, "update": self._update, "payload": payload, "without": without}
        return own | {"codec": self.codec.state_dict()}

    def load_state_dict(self, state: State, same_codec: bool = True) -> None:
        """Restores what :meth:`state_dict` returned, loaded to any device.

        Args:
            same_codec: whether the state is of a codec with the same parameters; otherwise only its residual is taken.
        """
        self._residual = state["residual"].to("cpu", copy=True)
        if not same_codec:
            return self._forget()
        self.codec.load_state_dict(state["codec"])
        self._update = None if state["update"] is None else state["update"].cpu()
        self._without = [slice(*bounds) for bounds in state.get("without", ())]
        self._payload = b"" if state["payload"] is None else state["payload"].cpu().numpy().tobytes()

    def _forget(self) -> None:
        self._update, self._payload, self._without = None, b"", ()


def _zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64, device="cpu")
