"""A server above those of regions (HALoS): ``upstream`` of a real run, ``global`` in the simulator's file."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from fairseq_async import methods
from fairseq_async.config import MOST_STREAMS, AsyncLocalSGDOptions, LocalSGDOptions
from fairseq_async.errors import ConfigurationError, option
from fairseq_async.validation import checked

_RULE = "delayed_nesterov"  # the paper's, where none is named
_ALSO_OF_REGIONS = {"outer", "staleness_power", "staleness_limit"}
_OF_WORKERS = ({*AsyncLocalSGDOptions.model_fields} | {"look_ahead"}) - _ALSO_OF_REGIONS


@dataclass(frozen=True)
class GlobalServer:
    """A server above those of the regions, which are its workers (HALoS; Kim et al. 2025, arXiv 2506.04531).

    Attributes:
        options: its outer rule.
        updates: K, of a region's workers, after which the region sends how far they have moved its parameters.
        merge: α, the share of the global parameters in those with which a region goes on.
    """

    options: LocalSGDOptions
    updates: int
    merge: float


class _Keys(BaseModel):
    """The keys beside those of the outer rule."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    updates: int = Field(32, ge=1)
    merge: float = Field(0.25, ge=0, le=1)


def global_server(kind: object, given: object, where: str) -> GlobalServer | None:
    """A rule that takes what comes at once: the server above waits for no region, and assigns no steps.

    Args:
        kind: the method of the regions.
        given: the section; None where there is none.
        where: what to name in an error.

    Raises:
        ConfigurationError: the section is not possible.
    """
    if given is None:
        return None
    if kind != "local_sgd" or not isinstance(given, dict):
        raise ConfigurationError(f"{where}: is a mapping, with an outer rule, of method local_sgd")
    keys = checked(_Keys, {key: given[key] for key in given if key in _Keys.model_fields}, where)
    rule = {"outer": _RULE} | {key: value for key, value in given.items() if key not in _Keys.model_fields}
    for key in rule:
        if key in _OF_WORKERS:
            raise ConfigurationError(f'{where}: "{key}" is for workers, not for regions: leave it out')
    options = methods.parse(LocalSGDOptions, rule, where)
    if methods.outer_rule(options.outer).synchronous or "quorum" in type(options).model_fields:
        raise ConfigurationError(f'{where}: "outer": {options.outer} waits, and regions do not: take another')
    return GlobalServer(options, keys.updates, keys.merge)


SERVER, REGIONS_SERVER = "fairseq_async.server.local_sgd_main", "fairseq_async.worker.regional_main"


def local_sgd_server(upstream: str | None) -> str:
    """The module that is the server of a run of local SGD, which may be a worker of another server."""
    return SERVER if upstream is None else REGIONS_SERVER


@dataclass(frozen=True)
class Upstream:
    """What ``upstream`` says: which server is above this run's own, and what this run is to it.

    Attributes:
        address: HOST:PORT of the global server.
        region: number of this region, from 0, and of this worker of the global server.
        streams: connections to it, each of which carries a piece of every large tensor.
        above: the global server's rule, the same in all regions.
    """

    address: str
    region: int
    streams: int
    above: GlobalServer


class _Region(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    region: int = Field(0, ge=0)
    streams: int = Field(1, ge=1, le=MOST_STREAMS)


def parse_upstream(text: str) -> Upstream:
    """``HOST:PORT,region=1,updates=32,merge=0.25,outer=delayed_nesterov,outer_lr=0.15``; each key may be left out.

    Raises:
        ConfigurationError: it is written in another way, or one of the keys is not possible.
    """
    where, (address, *pairs) = option("upstream"), text.split(",")
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or name in values:
            raise ConfigurationError(f"{where} {text}: write HOST:PORT,region=1,outer_lr=0.15, each key once")
        values[name] = value.strip()
    own = checked(_Region, {key: values.pop(key) for key in _Region.model_fields if key in values}, where)
    above = global_server("local_sgd", values, where)
    assert above is not None  # values are given
    return Upstream(address, own.region, own.streams, above)
