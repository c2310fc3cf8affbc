"""The description of a run's method, on which its workers and its server agree."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Annotated, Literal

from pydantic import ConfigDict, FailFast, JsonValue, TypeAdapter, with_config

from fairseq_async.errors import ConfigurationError, option
from fairseq_async.method import methods
from fairseq_async.method.global_server import UpstreamOption, parse_upstream
from fairseq_async.method.option_checks import check_buffers, check_device, check_fragments, check_shards
from fairseq_async.options import compression
from fairseq_async.options.config import HybridOptions, LocalSGDOptions, Options, ServerOptions
from fairseq_async.options.fragments import FragmentOptions
from fairseq_async.options.validation import checked

JsonObject = dict[str, JsonValue]
_STRICT = ConfigDict(extra="forbid", strict=True)
_OF_REGIONS = "of_regions"
MOST_LOCAL_STEPS = 1 << 20  # that a region reports in one message; after a long absence, later messages have the rest
_RATES = "learning-rate schedule"
_STEPS = "number of steps (total_steps, --max-update, max_steps of a Trainer)"
_WORDS = {  # what a user calls that in which descriptions may differ, beside the options
    "workers": "number of workers",
    "total_steps": _STEPS,
    "last_version": _STEPS,
    "whole_steps": _STEPS,
    "max_epoch": "number of epochs",
    "shards": "training set",
    "clip_norm": "gradient clipping",
    "inner_optimizer": "inner optimizer",
    "lr_scheduler": _RATES,
    "scheduler": _RATES,
    "learning_rates": f"{_RATES} or {_STEPS}",
    "parameter_groups": "division into parameter groups, or options of them,",
    "optimizers": "list of optimizers",
    "update_freq": "--update-freq",
}
GRACE_SHARE = 0.5  # of a worker's step, for which a step that closes early waits for another gradient by default


@with_config(_STRICT)
@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server that do not depend on its method; each is explained by
    :class:`~fairseq_async.options.config.ServerOptions`."""

    worker_timeout: float = 60.0
    snapshot_seconds: float = 60.0
    max_update_norm_ratio: float | None = None
    server_shards: int = 1
    shard_hosts: str = ""
    server_device: Literal["cpu", "cuda", "auto"] = "cpu"
    record: bool = False

    @property
    def hosts(self) -> list[str]:
        """The addresses of the hosts of shards on other machines."""
        return self.shard_hosts.split(",") if self.shard_hosts else []

    @property
    def shards(self) -> int:
        """Number of shards, here and on other machines."""
        return self.server_shards + len(self.hosts)


@with_config(_STRICT)
@dataclass(frozen=True)
class MethodSpec:
    """A method with the options of one run. Worker 0 sends it to the server; every other worker must send an equal one.

    Attributes:
        method: name of the method, as in ``--optimizer`` and ``"method"``.
        workers: number of workers that were announced.
        options: the method's own options, as its model dumps them, defaults filled in; :attr:`hybrid` and
            :attr:`local_sgd` have them typed.
        server: timeouts, snapshots, recording.
        framework: settings that the front end's server needs: inner optimizer, learning-rate schedule, clipping.
        barrier: number of updates in a round, which are applied together; 0 applies each update when it arrives.
        closes_early: whether a round closes when no other worker is near, with the updates that have arrived by then.
        grace_period: seconds for which a round stays open after its first update; None keeps it open until it is
            complete. For a round that closes early, see
            :class:`~fairseq_async.server.rounds.near_arrivals.NearArrivals`.
        grace_share: the same as a share of a worker's step.
        look_ahead: versions ahead at which workers start; 0 for none, None for as many as their updates are stale.
        quorum: number of updates at which the grace period of a round begins; all updates of the round are one step of
            the rule. 0 where the rule decides which updates are a step.
        counts_in_rounds: whether updates that are applied together count as 0, 1, 2, … stale in the staleness weights.
        waits_for_dead: whether a round waits ``worker_timeout`` also for a worker whose connection has closed.
        publishes: whether the server publishes parameters in shared memory, where workers read them at any time.
        last_version: the run ends at this version of the parameters; None for no such limit.
        micro_batches: how many of them a worker's gradient is of on average, where the server assigns them by speed;
            0 where it does not.
        whole_steps: where steps may be partial, the run ends after this number of whole steps; 0 for no such limit.
        max_epoch: the run ends after so many passes over the data by all workers together; 0 for no such limit.
        shards: number of samples in each shard of the training set; empty where workers bring their own data.
        staleness_power, staleness_limit, delay_compensation: see
            :class:`~fairseq_async.algorithms.StalenessPolicy`.
    """

    method: str
    workers: int
    options: JsonObject = field(default_factory=dict)
    server: ServerSettings = ServerSettings()
    framework: JsonObject = field(default_factory=dict)
    barrier: int = 0
    closes_early: bool = False
    grace_period: float | None = None
    grace_share: float = GRACE_SHARE
    look_ahead: float | None = 0.0
    quorum: int = 0
    counts_in_rounds: bool = False  # the value of older recordings, which do not have this field
    waits_for_dead: bool = True
    publishes: bool = True
    last_version: int | None = None
    micro_batches: int = 0
    whole_steps: int = 0
    max_epoch: int = 0
    shards: Annotated[list[int], FailFast()] = field(default_factory=list)
    staleness_power: float = 0.0
    staleness_limit: int | None = None
    delay_compensation: float = 0.0

    @property
    def name(self) -> str:
        """The method in words, such as ``local_sgd with outer diloco``."""
        outer = self.options.get("outer")
        return f"{self.method} with outer {outer}" if outer else self.method

    @property
    def full_rounds(self) -> bool:
        """Whether updates wait in rounds of a fixed size."""
        return self.barrier > 0 and not self.closes_early and not self.quorum

    @cached_property
    def _parsed(self) -> Options:
        """The options as their model, parsed once; without any of its own for a method that only a simulation has.

        Raises:
            ConfigurationError: there is no such rule, or a value is out of its range.
        """
        methods.import_plugins()  # in the server too, for which a user may have registered a rule
        model: type[Options] = Options
        if self.method == "hybrid_async":
            model = HybridOptions
        elif self.method == "local_sgd":
            model = methods.outer_rule(str(self.options.get("outer", "sgd"))).options
        own = {name: value for name, value in self.options.items() if name in model.model_fields}
        return checked(model, own, "the run's method")  # without what descriptions of before have besides

    @property
    def hybrid(self) -> HybridOptions:
        """The options of a run of hybrid asynchronous SGD; raises a ConfigurationError if they are not valid."""
        assert isinstance(self._parsed, HybridOptions)
        return self._parsed

    @property
    def local_sgd(self) -> LocalSGDOptions:
        """The options of a run of local SGD, as the model of its rule; raises a ConfigurationError if there is no such
        rule, or a value is out of its range."""
        assert isinstance(self._parsed, LocalSGDOptions)
        return self._parsed

    @cached_property
    def upstream(self) -> UpstreamOption | None:
        """The global server above this run's own server, and this run's region; None where there is none."""
        given = getattr(self._parsed, "upstream", None)
        return None if given is None else parse_upstream(given)

    @property
    def of_regions(self) -> bool:
        """Whether this is a global server's run, whose workers are the servers of regions."""
        return bool(self.framework.get(_OF_REGIONS))

    @property
    def fragments(self) -> int:
        """Number of fragments in which the model is exchanged."""
        return self._parsed.fragments if isinstance(self._parsed, FragmentOptions) else 1

    def of_a_fragment(self) -> "MethodSpec":
        """Returns the description of the same method for one fragment as if it was the whole model: ``local_steps`` is
        then the number of steps between the exchanges of two fragments."""
        if self.fragments == 1:
            return self
        steps = self.local_sgd.local_steps // self.fragments
        turn: JsonObject = {"fragments": 1, "fragment_delay": 0, "local_steps": steps}
        return replace(self, options=self.options | turn)

    @property
    def compress(self) -> compression.Compress:
        """The codecs of updates and parameters."""
        given = getattr(self._parsed, "compress", None)
        return given if isinstance(given, compression.Compress) else compression.Compress()

    @property
    def total_steps(self) -> int:
        """Number of mean local steps of a worker, or of steps of the server, after which the run ends; 0 for no end."""
        given = self.options.get("total_steps", 0)
        assert isinstance(given, int)
        return self.last_version or self.whole_steps or given

    def as_long_as(self, other: "MethodSpec") -> "MethodSpec":
        """Returns the same method with another's number of steps, and its learning rates if the numbers differ."""
        if self.total_steps == other.total_steps:
            return self
        both = self.options.keys() & other.options & {"total_steps"}
        options = self.options | {name: other.options[name] for name in both}
        both = self.framework.keys() & other.framework & {"learning_rates"}
        framework = self.framework | {name: other.framework[name] for name in both}
        same = replace(self, options=options, framework=framework)
        return replace(same, last_version=other.last_version, whole_steps=other.whole_steps)

    def difference(self, other: "MethodSpec") -> str | None:
        """Returns in words the first difference of a worker's description from that of the others, in the options that
        its user has given; None if they are equal."""
        ours, theirs = asdict(self), asdict(other)
        for part in ("options", "server"):
            own, given = ours.pop(part), theirs.pop(part)
            for name in sorted(own.keys() | given.keys()):
                if own.get(name) != given.get(name):
                    return f"{_WORDS.get(name) or option(name)} than the others"
        ours |= ours.pop("framework")
        theirs |= theirs.pop("framework")
        ours["fused"] = theirs["fused"] = None  # worker 0 chooses the server's kernels: others may be on other devices
        differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        return f"{_WORDS.get(differing[0], differing[0])} than the others" if differing else None

    def to_json(self) -> JsonObject:
        """Returns a JSON object from which :meth:`from_json` makes an equal description."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: JsonObject) -> "MethodSpec":
        """Reads a description from ``run.json`` or a snapshot; in version 0.1 these had all options at one level."""
        current = _renamed(given if "options" in given else _from_version_0_1(dict(given)))
        return _adapter().validate_json(json.dumps(current))  # as JSON: from Python, strict mode wants a MethodSpec


def hybrid_spec(
    options: HybridOptions,
    workers: int,
    server: ServerOptions | None,
    framework: JsonObject,
    total_steps: int,
    max_epoch: int = 0,
) -> MethodSpec:
    """Returns the description of a run of hybrid asynchronous SGD.

    Args:
        server: the server's options; None where no server runs, in a simulation.
        total_steps: number of the server's steps; 0 for no limit. A partial step counts as its part of a step.

    Raises:
        ConfigurationError: the options do not go with this number of workers, or with a server in shards.
    """
    filled = options.for_workers(workers)
    if filled.shares == "auto" and filled.micro_batches == 1:
        raise ConfigurationError(
            f"{option('shares')} is auto: give {option('micro_batches')} of at least 2 to be divided"
        )
    check_shards(options, server)
    check_device(options, server)
    return MethodSpec(
        method=filled.method,
        workers=workers,
        options=filled.model_dump(exclude={"barrier", "total_steps"}),
        server=_settings(server),
        framework=framework,
        barrier=(filled.updates_per_step or workers) if filled.barrier or filled.closes_early else 0,
        closes_early=filled.closes_early,
        look_ahead=0.0 if filled.barrier else filled.look_ahead,
        waits_for_dead=not filled.closes_early,
        micro_batches=filled.micro_batches if filled.shares == "auto" else 0,
        last_version=None if filled.closes_early else total_steps or None,
        whole_steps=total_steps if filled.closes_early else 0,
        max_epoch=max_epoch,
    )


def local_sgd_spec(
    options: LocalSGDOptions,
    workers: int,
    shards: Sequence[int],
    server: ServerOptions | None,
    framework: JsonObject,
    max_epoch: int = 0,
) -> MethodSpec:
    """Returns the description of a run of local SGD; see :func:`hybrid_spec`."""
    if options.upstream is not None:
        above = parse_upstream(options.upstream).above.options  # a mistake is to show before anything starts
        check_shards(above, server)  # the global server has as many shards
    filled = options.for_workers(workers).model_dump(exclude={"shards"})
    check_fragments(options, server)
    check_shards(options, server)
    check_buffers(options, server)
    check_device(options, server)
    quorum, grace_period = filled.get("quorum", 0), filled.get("grace_period")
    waits = methods.outer_rule(options.outer).synchronous or quorum > 0 or grace_period is not None
    return MethodSpec(
        method=options.method,
        workers=workers,
        options=filled,
        server=_settings(server),
        framework=framework,
        barrier=workers if waits else 0,
        grace_period=grace_period or 0.0 if quorum else grace_period,
        quorum=quorum,
        counts_in_rounds=waits,
        waits_for_dead=False,
        publishes=False,
        max_epoch=max_epoch,
        shards=list(shards),
        **{name: filled[name] for name in _STALENESS.values() if name in filled},
    )


def global_spec(spec: MethodSpec, upstream: UpstreamOption, regions: int) -> MethodSpec:
    """Returns the description of the global server's run, in which the run of ``spec`` is one region; it is equal in
    all regions.

    The global run ends with the number of local steps that all regions together are to take.
    """
    above = upstream.above
    counted = {"local_steps": MOST_LOCAL_STEPS, "total_steps": spec.local_sgd.total_steps * spec.workers}
    framework: JsonObject = {_OF_REGIONS: True, "updates": above.updates, "merge": above.merge}
    described = local_sgd_spec(above.options.model_copy(update=counted), regions, [], None, framework)
    # a region that dies comes back: the server must not end while all regions are away for a moment
    return replace(described, server=spec.server, waits_for_dead=True)


def _settings(server: ServerOptions | None) -> ServerSettings:
    if server is None:
        return ServerSettings()
    given = server.model_dump(include=set(_SERVER))
    shards = {"server_shards": server.shard_processes, "shard_hosts": server.shard_hosts}
    return ServerSettings(**given | shards)


_SERVER = tuple(each.name for each in fields(ServerSettings))


@cache
def _adapter() -> TypeAdapter[MethodSpec]:
    return TypeAdapter(MethodSpec)


OPTIMIZER_OVERRIDES = "optimizer_overrides"  # key of ``framework``: options that replace those of a saved optimizer
_FRAMEWORK = ("inner_optimizer", "lr_scheduler", "clip_norm", "update_freq", "synchronous", "optimizer", "scheduler")
_REMOVED = ("snapshot_updates", "server_threads", "gradient_rule")  # in descriptions of before
_RENAMED = {"grace": "grace_period", "grace_seconds": "grace_period"}
_STALENESS = {"power": "staleness_power", "limit": "staleness_limit", "compensation": "delay_compensation"}


def _renamed(given: JsonObject) -> JsonObject:
    """Returns a description of before with the names that its fields and options have now, without what is gone."""
    spec = {_RENAMED.get(key, key): value for key, value in given.items()}
    for level in ("options", "server"):
        if isinstance(found := spec.get(level), dict):
            spec[level] = {key: value for key, value in found.items() if key not in _REMOVED}
    options = spec["options"]
    if spec["method"] == "local_sgd" and isinstance(options, dict):
        if "look_ahead" in options:
            options["start_ahead"] = options.pop("look_ahead")
        if "buffer_size" in options and options.get("outer") == "buffered_nesterov":
            options["delay"] = options["buffer_size"]
    return spec


def _from_version_0_1(flat: JsonObject) -> JsonObject:
    staleness = flat.pop("lateness", {})
    assert isinstance(staleness, dict)
    known = {each.name for each in fields(MethodSpec)}
    spec: JsonObject = {_STALENESS[key]: value for key, value in staleness.items()}
    both = {key: flat[key] for key in (*_STALENESS.values(), "grace_period") if key in flat}  # spec and options
    spec["server"] = {key: flat.pop(key) for key in _SERVER if key in flat}
    spec["framework"] = {key: flat.pop(key) for key in _FRAMEWORK if key in flat}
    for key in list(flat):
        if _RENAMED.get(key, key) in known and not (key == "max_epoch" and flat[key] is None):
            spec[_RENAMED.get(key, key)] = flat.pop(key)
    return spec | {"options": {"method": spec["method"], **both, **flat}}
