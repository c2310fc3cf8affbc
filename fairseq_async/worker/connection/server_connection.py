"""What a worker asks of the server of its run, whichever connection answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, Push, PushReply, Welcome, WorkReply
from fairseq_async.worker.connection.compressor import Compressor


@dataclass
class JoinDetails:
    """What a worker tells of itself when it joins, besides its model and its method; the others go into its
    :class:`~fairseq_async.protocol.Hello`, which describes them.

    Attributes:
        moments: checksum of the moments that its optimizers have from steps before the run; empty where they have none.
    """

    untrained: str = ""
    buffers: str = ""
    unsaved: dict[str, list[float]] = field(default_factory=dict)
    moments: str = ""
    any_length: bool = False
    by_script: bool = False
    gpu: str = ""


class ServerConnection(Protocol):
    """The requests of one worker. Every method raises :class:`ExchangeError` when the server stays away, and
    :class:`RefusedError` when the server refuses the request.

    Attributes:
        worker: this worker's id.
        workers: number of workers that were announced.
        compressor: encodes this worker's updates; None where they are sent in fp32, and before :meth:`join`.
    """

    worker: int
    workers: int

    @property
    def compressor(self) -> Compressor | None: ...

    @property
    def slot(self) -> Tensor:
        """The flat tensor through which worker and server exchange: holds the update for a push, and the parameters
        after a pull where the server publishes none in shared memory."""
        ...

    @property
    def exchanged(self) -> Mapping[str, Tensor]:
        """The flat vectors through which worker and server exchange, by name: the slot, and published parameters."""
        ...

    def join(self, layout: Layout, spec: MethodSpec, details: JoinDetails) -> Welcome:
        """Introduces the worker; waits until the server has parameters, unless this is worker 0, which brings them."""
        ...

    def initialise(self, state: str | None, from_checkpoint: bool = False) -> Welcome:
        """Gives a new server the parameters in worker 0's slot, or a whole state in a file; a server on another machine
        must see the same disk. ``from_checkpoint`` says that worker 0 has begun from a checkpoint, which the other
        workers are to read too."""
        ...

    def prepare(self, write: Callable[[Tensor], object]) -> None:
        """Calls ``write(slot)`` ahead of a push; by that push, the slot may have been replaced by another."""
        ...

    def push(self, write: Callable[[Tensor], object], push: Push) -> PushReply:
        """Calls ``write(slot)`` with this worker's flat slot, then tells the server that the update is there. The
        answer comes when the update is applied."""
        ...

    def pull(
        self,
        copy: Callable[[Tensor], object],
        look_ahead: float = 0.0,
        starts: bool = False,
        fragment_of: int | None = None,
    ) -> int:
        """Calls ``copy(flat parameters)`` on one version, and returns the version; several workers may pull at once.

        Args:
            look_ahead: number of versions ahead of it, along the server's last step; only the server can compute these
                parameters.
            starts: work starts from these parameters: they may be ahead of the server's own where its rule looks ahead,
                and compressed. Otherwise they are the server's own, in fp32.
            fragment_of: number of an update of this worker: pulls only the fragment that this update is of, into its
                place in the slot. ``copy`` is still called on the whole slot.
        """
        ...

    def wait_for_work(self, for_end: bool = False) -> WorkReply:
        """Waits until there is work for this worker again, or the run is finished; with ``for_end`` for the latter
        alone, which it also is when no other worker is at work any more."""
        ...

    def on_any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on a rank of this worker."""
        ...

    def save_state(self, path: str) -> int:
        """Saves the server's whole state in a file; returns the version of the parameters. A server on another machine
        must see the same disk."""
        ...

    def leave(self, finished: bool) -> None:
        """Ends the connection, once; ``finished`` ends the run for every worker."""
        ...

    def close(self) -> None:
        """Closes the connection without a message: to the server, this worker has died and may come back."""
        ...
