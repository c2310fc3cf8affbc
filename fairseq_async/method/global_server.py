"""The options of a global server above the servers of regions (HALoS): ``upstream`` in a real run, ``global`` in the
simulator's file."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from fairseq_async.errors import ConfigurationError, option
from fairseq_async.method import methods
from fairseq_async.options.config import AsyncLocalSGDOptions, LocalSGDOptions
from fairseq_async.options.validation import checked

_RULE = "delayed_nesterov"  # the paper's rule, where the section names none
_ALSO_OF_REGIONS = {"outer", "staleness_power", "staleness_limit"}
_OF_WORKERS = ({*AsyncLocalSGDOptions.model_fields} | {"start_ahead"}) - _ALSO_OF_REGIONS


@dataclass(frozen=True)
class GlobalServer:
    """The global server, whose workers are the servers of the regions (HALoS; Kim et al. 2025, arXiv 2506.04531).

    Attributes:
        options: the options of its outer rule.
        updates: K: after so many updates of its workers, a region sends how far they have moved its parameters.
        merge: α: share of the global parameters in the merged parameters with which a region goes on.
    """

    options: LocalSGDOptions
    updates: int
    merge: float


class _Keys(BaseModel):
    """The keys of a global server other than those of its outer rule."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    updates: int = Field(32, ge=1)
    merge: float = Field(0.25, ge=0, le=1)


def global_server(kind: object, given: object, where: str) -> GlobalServer | None:
    """Parses the section of a global server. Its rule must apply each update at once: a global server waits for no
    region, and assigns no steps.

    Args:
        kind: the method of the regions.
        given: the section; None where there is none.
        where: name of the section in an error.

    Raises:
        ConfigurationError: the section is not valid.
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


SERVER, REGIONS_SERVER = "fairseq_async.server.programs.local_sgd_main", "fairseq_async.regions.regional_main"


def local_sgd_server(upstream: str | None) -> str:
    """Returns the module of the server of a run of local SGD, which is a region's server if ``upstream`` is given."""
    return SERVER if upstream is None else REGIONS_SERVER


@dataclass(frozen=True)
class UpstreamOption:
    """The parsed option ``upstream``: the global server above this run's own server, and this run's region.

    Attributes:
        address: HOST:PORT of the global server.
        region: number of this region, from 0, which is also its worker id on the global server.
        above: the global server's options, the same in all regions.
    """

    address: str
    region: int
    above: GlobalServer


class _Region(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    region: int = Field(0, ge=0)


def parse_upstream(text: str) -> UpstreamOption:
    """Parses ``HOST:PORT,region=1,updates=32,merge=0.25,outer=delayed_nesterov,outer_lr=0.15``; each key is optional.

    Raises:
        ConfigurationError: the text has another form, or one of the keys is not valid.
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
    return UpstreamOption(address, own.region, above)
