"""The registry, a named actor through which the processes of a run on Ray find each other."""

from dataclasses import dataclass, field

from fairseq_async.options.addresses import LOOPBACK
from fairseq_async.server.membership import JOINERS
from fairseq_async.worker.start.rendezvous import ServerRequest


@dataclass(frozen=True)
class NodeAddress:
    """Where the server listens.

    Attributes:
        host: the address of the server's node.
    """

    host: str
    port: int

    def address(self, host: str) -> str:
        """Returns the server's address for a worker on this host: on the server's own node the loopback address, so
        that they share memory."""
        return f"{LOOPBACK if host == self.host else self.host}:{self.port}"


@dataclass(frozen=True)
class Orders:
    """The registry's answer to a worker's actor.

    Attributes:
        address: the server's address; empty while there is no server.
        run_dir: the run's directory; empty until worker 0 has told it.
        leaves: whether the worker is to end.
    """

    address: str
    run_dir: str
    leaves: bool


@dataclass(frozen=True)
class Ended:
    """How a worker or the server has ended: its exit code and its last words."""

    code: int
    said: str = ""


@dataclass
class State:
    """The registry's state, which the driver polls.

    Attributes:
        workers: numbers of the workers that the run is to have.
        placed: numbers of the workers for which Ray has found a node.
        request: the server that worker 0 asks for; None until it asks.
        node: the node of worker 0.
        place: where the server listens; None until it does.
        shards: where the shards on other nodes listen, by their numbers.
    """

    workers: list[int]
    placed: set[int] = field(default_factory=set)
    request: ServerRequest | None = None
    node: str = ""
    place: NodeAddress | None = None
    shards: dict[int, NodeAddress] = field(default_factory=dict)


class Registry:
    """Holds the run's secret, the server's address, and the numbers of the workers that the run is to have.

    Args:
        token: the secret that the processes of the run prove to each other.
        workers: number of workers at the beginning.
    """

    def __init__(self, token: str, workers: int) -> None:
        self._token, self._state, self._next, self._over = token, State(list(range(workers))), workers, False
        self._server_began, self._announced = False, workers

    def token(self) -> str:
        """Returns the run's secret."""
        return self._token

    def state(self) -> State:
        """Returns the whole state."""
        return self._state

    def check_in(self, worker: int, host: str, node: str, request: ServerRequest | None) -> Orders:
        """Called by a worker's actor: records that it has a node, and what worker 0 requests; returns the actor's
        orders."""
        state = self._state
        state.placed.add(worker)
        if request is not None and state.request is None:
            state.request, state.node = request, node
        address = "" if state.place is None else state.place.address(host)
        run_dir = "" if state.request is None else state.request.run_dir
        return Orders(address, run_dir, self._over or worker not in state.workers)

    def begin_server(self) -> bool:
        """Called when the server's actor begins; returns whether one has begun before."""
        before, self._server_began = self._server_began, True
        return before

    def record_server(self, place: NodeAddress) -> None:
        """Called by the server's actor: records where the server listens."""
        self._state.place = place

    def record_shard(self, shard: int, place: NodeAddress) -> None:
        """Called by a shard's actor: records where the shard listens."""
        self._state.shards[shard] = place

    def place_of_shard(self, shard: int) -> NodeAddress | None:
        """Returns where a shard's actor before has listened; None for the first."""
        return self._state.shards.get(shard)

    def scale(self, change: int) -> str:
        """Adds workers, or removes those that were added last; returns why this is refused, or an empty text."""
        workers = self._state.workers
        if -change >= len(workers):
            return f"the run has {len(workers)} workers, and worker 0 stays"
        added = sum(number >= self._announced for number in workers)
        if added + change > JOINERS:  # the server takes no more, also where workers of the beginning were removed
            return f"at most {JOINERS} workers can be added to a run, and {added} were added"
        if change > 0:
            workers += range(self._next, self._next + change)
            self._next += change
        else:
            del workers[change:]
        return ""

    def end(self) -> None:
        """Orders all workers to end."""
        self._over = True
