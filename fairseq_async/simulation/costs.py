"""The costs of one update of one worker, and the most updates per second that follow from them."""

import math
from dataclasses import dataclass, replace

_GIGABIT = 1e9 / 8  # bytes


@dataclass(frozen=True)
class NetworkLink:
    """A network between each worker and the server: Gbit/s in each direction, and the latency one way."""

    gigabits: float
    milliseconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.gigabits:g} Gbit/s" + (f", {self.milliseconds:g} ms" if self.milliseconds else "")


@dataclass(frozen=True)
class Costs:
    """The time that one update of one worker takes, in seconds.

    A worker computes for ``step``, then exchanges for ``exchange``; in that time the server is busy with this update
    alone for ``server``. Over a network the update goes out and the parameters come back, on the worker's link and on
    the server's.

    Attributes:
        step: time to compute the update.
        exchange: time from the end of computing to the new parameters, with a server of one process, where no other
            worker has to be waited for.
        server: the part of ``exchange`` that the server cannot spend on another worker at the same time.
        parameters: number of parameters, of 4 bytes each.
        link: bytes per second in each direction; infinite on one machine.
        latency: latency of a message over the link, one way: of the update, and of the answer that the parameters
            follow.
        push: bytes of an update, for each parameter.
        pull: bytes of the parameters that come back, for each parameter.
        shards: number of processes of the server, with equal parts of the parameters and a core each. They share the
            server's link.
        apart: each shard is on a machine of its own instead, with a link of its own. A worker tells the server of an
            update when the others have their parts, which takes one more round trip.
    """

    step: float
    exchange: float
    server: float
    parameters: int
    link: float = math.inf
    latency: float = 0.0
    push: float = 4.0
    pull: float = 4.0
    shards: int = 1
    apart: bool = False

    @property
    def links(self) -> int:
        """Number of the server's links."""
        return self.shards if self.apart else 1

    @property
    def ways(self) -> int:
        """How often a message crosses the link in an exchange."""
        return 4 if self.links > 1 else 2

    @property
    def alone(self) -> float:
        """Seconds from update to update of a single worker."""
        return self.step + self.exchanging

    @property
    def exchanging(self) -> float:
        """Seconds of an exchange of a single worker."""
        sent = self.pushing + self.pulling + self.ways * self.latency
        return max(0.0, self.exchange - self.server) + self.server / self.shards + sent

    @property
    def busiest(self) -> float:
        """Seconds per update of the bottleneck: the server's processor, or its link in one direction."""
        return max(self.server / self.shards, self.pushing / self.links, self.pulling / self.links)

    def updates_per_second(self, workers: int) -> float:
        """Returns the updates of all workers per second: as if each had the server alone, until the bottleneck is
        always busy.

        This is the asymptotic bound of a closed queue (Denning & Buzen 1978), which steady times reach.
        """
        return min(workers / self.alone, 1 / self.busiest)

    @property
    def workers_held(self) -> float:
        """The number of workers beyond which the server is the bottleneck and more workers add nothing."""
        return self.alone / self.busiest

    @property
    def pushing(self) -> float:
        """Seconds of an update on a worker's link."""
        return self.push * self.parameters / self.link

    @property
    def pulling(self) -> float:
        """Seconds of the parameters on a worker's link."""
        return self.pull * self.parameters / self.link

    def over(self, link: NetworkLink) -> "Costs":
        """Returns the same costs over a link."""
        return replace(self, link=link.gigabits * _GIGABIT, latency=link.milliseconds / 1000)

    def of_size(self, parameters: int) -> "Costs":
        """Returns the costs of another model, all in proportion to its parameters."""
        by = parameters / self.parameters
        return replace(self.of_part(by), parameters=parameters, step=self.step * by)

    def of_part(self, share: float) -> "Costs":
        """Returns the costs of an exchange of this share of the parameters, after the same step."""
        parameters = max(1, round(share * self.parameters))
        return replace(self, parameters=parameters, exchange=self.exchange * share, server=self.server * share)
