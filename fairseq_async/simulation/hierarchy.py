"""HALoS under one virtual time: regional servers that are workers of a global server."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace

from torch import Tensor

from fairseq_async.algorithms import Region, Update
from fairseq_async.algorithms.rule import State
from fairseq_async.method.global_server import GlobalServer
from fairseq_async.method.spec import JsonObject, MethodSpec, local_sgd_spec
from fairseq_async.protocol import Receipt, Report, Status
from fairseq_async.server.build import build_server
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.simulation.cluster import Cluster
from fairseq_async.simulation.experiment import Experiment, Method
from fairseq_async.simulation.simulated_run import SimulatedRun
from fairseq_async.simulation.trial import Trial, Write
from fairseq_async.simulation.workers import SharedModel
from fairseq_async.worker.shards import ShardOrder

_OF_REGIONS = 1_000_003  # difference between the seeds of two regions, whose choices then differ


@dataclass(frozen=True, order=True)
class Message:
    """A message on its way between a region and the global server: a drift, or the global parameters.

    Attributes:
        time: time of arrival, in virtual seconds.
        number: place in the order of sending, which is the order of messages that arrive at the same time.
        values: the drift, or the global parameters.
        version: version of the global parameters that are sent, or from which the drift was computed.
        steps: number of local steps in the drift; None for the global parameters.
    """

    time: float
    number: int
    region: int = field(compare=False)
    values: Tensor = field(compare=False)
    version: int = field(compare=False)
    steps: int | None = field(compare=False)


@dataclass(eq=False)
class RegionalServer:
    """One region: its workers and their server, and its state as a worker of the global server.

    Attributes:
        number: number of the region, which is also its id as a worker of the global server.
        merging: says when a drift is due, computes it, and merges the global parameters into the region's.
        order: order of the region's samples, in its part of the shards.
        first: number of the region's first worker among all workers.
        version: version of the global parameters that the region merged last.
        sent: number of the region's updates that the global server has taken.
        reported: number of local steps in the updates that the region has sent, one on its way included.
    """

    number: int
    trial: Trial
    merging: Region
    order: ShardOrder
    first: int
    version: int = 0
    sent: int = 0
    reported: int = 0

    @property
    def due(self) -> bool:
        """Whether the region is to send a drift: after K updates, or with those left when its workers are done."""
        left = self.trial.finished and self.merging.count > 0 and not self.merging.waiting
        return self.merging.due or left

    def state_dict(self) -> State:
        own = {"version": self.version, "sent": self.sent, "reported": self.reported}
        return own | {"trial": self.trial.state_dict(), "level": self.merging.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.trial.load_state_dict(state["trial"])
        self.merging.load_state_dict(state["level"])
        self.version, self.sent, self.reported = state["version"], state["sent"], state["reported"]


class Hierarchy:
    """Runs one method on one cluster of several regions.

    Each region is a :class:`Trial` of its own, on its part of the shards, with its part of the steps. Its parameters
    are merged with the global ones as :class:`~fairseq_async.algorithms.Region` says. A message takes the time of an
    exchange with the first region, where the global server is, and nobody waits for it. The run is over when the last
    drift has arrived.

    Args:
        above: the global server. The other arguments are those of :class:`Trial`; ``method`` is the regions' method.

    Attributes:
        parameters: the global server's parameters.
    """

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        above: GlobalServer,
        cluster: Cluster,
        model: SharedModel,
        start: Tensor,
        write: Write,
    ) -> None:
        self.model, self.write, self.cluster = model, write, cluster
        self.parameters = start.clone()
        spec = local_sgd_spec(above.options, cluster.regions, [], None, {})
        rule, _ = local_sgd_main.build(spec, model.layout, self.parameters)
        self.server = build_server(spec, rule, self.parameters)
        size, per_region = 4 * model.layout.size, cluster.workers // cluster.regions
        self.seconds = [cluster.exchange_of(r * per_region).transfer(size) for r in range(cluster.regions)]
        self.now, self._messages, self._number = 0.0, list[Message](), 0
        self.regions = [*self._make_regions(experiment, method, above, start)]
        self.spec = self._description(spec, above)

    def _make_regions(
        self, experiment: Experiment, method: Method, above: GlobalServer, start: Tensor
    ) -> Iterator[RegionalServer]:
        whole, size = self.model.order, self.cluster.workers // self.cluster.regions
        for number in range(self.cluster.regions):
            seed = experiment.seed + _OF_REGIONS * number
            own = replace(experiment, head=experiment.head.model_copy(update={"seed": seed}))
            self.model.order = order = OrderOfRegion(whole, size * number, size)
            first, part = size * number, self.cluster.region(number)
            trial = Trial(own, method, part, self.model, start, self._writer(number), first)
            merging = Region(trial.parameters, above.updates, above.merge)
            yield RegionalServer(number, trial, merging, order, first)
        self.model.order = whole

    def _description(self, spec: MethodSpec, above: GlobalServer) -> MethodSpec:
        """Returns the description of a region's server, but for all workers, and with the global server's options."""
        options: JsonObject = spec.options | {"updates": above.updates, "merge": above.merge}
        framework: JsonObject = {"regions": self.cluster.regions, "global": options}
        shards = list(self.model.order.sizes)
        return replace(self.regions[0].trial.spec, workers=self.cluster.workers, shards=shards, framework=framework)

    @property
    def steps(self) -> int:
        return sum(region.trial.steps for region in self.regions)

    @property
    def tokens(self) -> float:
        return sum(region.trial.tokens for region in self.regions)

    @property
    def version(self) -> int:
        return self.server.version

    @property
    def sequences(self) -> dict[int, int]:
        return {
            region.first + worker: sequence
            for region in self.regions
            for worker, sequence in region.trial.sequences.items()
        }

    @property
    def finished(self) -> bool:
        drifts = any(message.steps is not None for message in self._messages)
        return self.diverged or (not drifts and all(region.trial.finished for region in self.regions))

    @property
    def diverged(self) -> bool:
        return any(region.trial.diverged for region in self.regions)

    def advance(self) -> bool:
        """Processes the next event, of a region or a message; returns False when there is none. At the same time
        messages come first."""
        going = [region for region in self.regions if not region.trial.finished]
        earliest = min(going, key=lambda region: region.trial.clock.upcoming, default=None)
        upcoming = math.inf if earliest is None else earliest.trial.clock.upcoming
        if self.finished or (upcoming == math.inf and not self._messages):
            return False
        if self._messages and self._messages[0].time <= upcoming:
            self._arrive(heapq.heappop(self._messages))
        elif earliest is not None:
            self.now, self.model.order = upcoming, earliest.order
            earliest.trial.advance()
            self._send_if_due(earliest)
        return True

    def evaluate(self) -> float:
        self.model.flat.copy_(self.parameters)
        return self.model.evaluate()

    # Between regions

    def _writer(self, number: int) -> Write:
        def write(time: float, receipt: Receipt, report: Report, extra: JsonObject) -> None:
            region = self.regions[number]
            if receipt.status is Status.APPLIED:
                region.merging.note_update()
            shard = None if report.shard is None else region.first + report.shard
            own = replace(receipt, worker=region.first + receipt.worker)
            self.write(time, own, replace(report, shard=shard), extra)

        return write

    def _send_if_due(self, region: RegionalServer) -> None:
        if region.due:
            steps, region.reported = region.trial.steps - region.reported, region.trial.steps
            drift = region.merging.send(region.trial.parameters)
            self._send(region.number, drift, region.version, steps)

    def _send(self, region: int, values: Tensor, version: int, steps: int | None = None) -> None:
        message = Message(self.now + self.seconds[region], self._number, region, values, version, steps)
        self._number += 1
        heapq.heappush(self._messages, message)

    def _arrive(self, message: Message) -> None:
        self.now, region = message.time, self.regions[message.region]
        if message.steps is not None:
            drift = Update(message.region, region.sent, message.version, float(message.steps), message.values)
            self.server.push(drift)
            region.sent += 1
            self._send(message.region, self.parameters.clone(), self.version)
        else:
            region.merging.merge(region.trial.parameters, message.values)
            region.trial.server.version += 1  # payloads are kept for each version: those for this one are out of date
            region.version = message.version

    # Stop and go on

    def state_dict(self) -> State:
        return {
            "server": self.server.state_dict(),
            "regions": [region.state_dict() for region in self.regions],
            "messages": [astuple(message) for message in self._messages],
            "number": self._number,
            "now": self.now,
        }

    def load_state_dict(self, state: State) -> None:
        self.server.load_state_dict(state["server"])
        for region, own in zip(self.regions, state["regions"], strict=True):
            region.load_state_dict(own)
        self._messages = [Message(*each) for each in state["messages"]]
        self._number, self.now = state["number"], state["now"]


class OrderOfRegion(ShardOrder):
    """The order of the samples in some of the shards, which are numbered from 0."""

    def __init__(self, whole: ShardOrder, first: int, shards: int) -> None:
        super().__init__(whole.sizes[first : first + shards], whole.seed)
        self._whole, self._first = whole, first

    def indices(self, shard: int, first: int, count: int) -> list[int]:
        """Returns the same samples as the order of all shards."""
        return self._whole.indices(self._first + shard, first, count)


def simulated_run(
    experiment: Experiment, method: Method, cluster: Cluster, model: SharedModel, start: Tensor, write: Write
) -> SimulatedRun:
    """Makes the run of a method on a cluster; arguments as of :class:`Trial`. One region has no global server."""
    if method.above is None or cluster.regions == 1:
        return Trial(experiment, method, cluster, model, start, write)
    return Hierarchy(experiment, method, method.above, cluster, model, start, write)
