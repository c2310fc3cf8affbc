"""The named actor by which the processes of a run on Ray find each other."""

from dataclasses import dataclass, field

from fairseq_async.addresses import LOOPBACK
from fairseq_async.worker.rendezvous import ServerRequest


@dataclass(frozen=True)
class Place:
    """Where the server is.

    Attributes:
        host: the address of its node.
    """

    host: str
    port: int

    def address(self, host: str) -> str:
        """At which a worker on the node with this address reaches it: on its own node in shared memory."""
        return f"{LOOPBACK if host == self.host else self.host}:{self.port}"


@dataclass(frozen=True)
class Orders:
    """What the actor of a worker is to know.

    Attributes:
        address: of the server; empty while there is none.
        run_dir: the run's directory, once worker 0 has said it.
        leaves: the worker is to end.
    """

    address: str
    run_dir: str
    leaves: bool


@dataclass(frozen=True)
class Ended:
    """How a worker, or the server, has ended: with which exit code, and its last words."""

    code: int
    said: str = ""


@dataclass
class State:
    """What the driver is to know.

    Attributes:
        workers: numbers of those that the run is to have.
        placed: those that Ray has found a node for.
        request: the server that worker 0 asks for.
        node: of worker 0.
        place: where the server is.
    """

    workers: list[int]
    placed: set[int] = field(default_factory=set)
    request: ServerRequest | None = None
    node: str = ""
    place: Place | None = None


class Registry:
    """Has the run's secret and the server's address, and the workers that the run is to have.

    Args:
        token: what the processes of the run prove to each other.
        workers: how many there are to begin with.
    """

    def __init__(self, token: str, workers: int) -> None:
        self._token, self._state, self._next, self._over = token, State(list(range(workers))), workers, False
        self._server_began = False

    def token(self) -> str:
        """The run's secret."""
        return self._token

    def state(self) -> State:
        """All of it."""
        return self._state

    def check_in(self, worker: int, host: str, node: str, request: ServerRequest | None) -> Orders:
        """A worker's actor says where it is, and worker 0's what it asks for; the answer says what it is to do."""
        state = self._state
        state.placed.add(worker)
        if request is not None and state.request is None:
            state.request, state.node = request, node
        address = "" if state.place is None else state.place.address(host)
        run_dir = "" if state.request is None else state.request.run_dir
        return Orders(address, run_dir, self._over or worker not in state.workers)

    def begin_server(self) -> bool:
        """The server's actor begins; returns whether one has begun before."""
        before, self._server_began = self._server_began, True
        return before

    def serve(self, place: Place) -> None:
        """The server's actor says where it listens."""
        self._state.place = place

    def scale(self, change: int) -> str:
        """Adds workers, or takes those that were added last; returns what cannot be done, or nothing."""
        workers = self._state.workers
        if -change >= len(workers):
            return f"the run has {len(workers)} workers, and worker 0 stays"
        if change > 0:
            workers += range(self._next, self._next + change)
            self._next += change
        else:
            del workers[change:]
        return ""

    def end(self) -> None:
        """All workers are to end."""
        self._over = True
