"""The experiment file: what is trained, by which methods, on which machines."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, model_validator

from fairseq_async.errors import ConfigurationError
from fairseq_async.method import methods
from fairseq_async.method.global_server import GlobalServer, global_server
from fairseq_async.options.compression import DQSGDOptions
from fairseq_async.options.config import HybridOptions, LocalSGDOptions
from fairseq_async.options.fragments import FragmentOptions
from fairseq_async.options.validation import checked
from fairseq_async.simulation.cluster import Cluster, StrictModel
from fairseq_async.simulation.ranks import RANKS_METHODS

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerOptions(StrictModel):
    """The optimizer: of each worker under local SGD, of the server where gradients are sent.

    Attributes:
        clip_norm: largest L2 norm of the gradient that is stepped with; 0 does not clip.
    """

    type: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> "OptimizerOptions":
        for name in _UNUSED[self.type]:
            if name in self.model_fields_set:
                raise ValueError(f"{name} is of no use with {self.type}: leave it out")
        return self


_UNUSED = {"sgd": ["betas"], "adam": ["momentum"], "adamw": ["momentum"]}


class ScheduleOptions(StrictModel):
    """The learning rate over the run's progress.

    Progress is the server's steps where gradients are sent, otherwise the mean local steps of a worker. A run of N
    gradients a step from k workers has ``steps``·k/N steps of the server.

    Attributes:
        warmup: steps of progress over which the rate grows from 0.
        minimum: share of the learning rate at the end of ``cosine``.
    """

    type: Literal["constant", "cosine", "inverse_sqrt"] = "constant"
    warmup: int = Field(0, ge=0)
    minimum: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _fits(self) -> "ScheduleOptions":
        if self.minimum and self.type != "cosine":
            raise ValueError(f"minimum is of no use with {self.type}: leave it out")
        return self


class Pretraining(StrictModel):
    """Training by one worker before all methods, so that these begin from the same trained parameters."""

    steps: int = Field(ge=1)
    lr: float | None = Field(None, gt=0)


class Target(StrictModel):
    """The target loss, to which the time is taken: a number, or the last loss of another method.

    Attributes:
        of: the other method, on the same cluster.
        within: how far a run may be above the target, as a share of it.
    """

    loss: float | None = Field(None, gt=0)
    of: str | None = None
    within: float = Field(0.0, ge=0)


class SimulatedAdasumOptions(StrictModel):
    """Synchronous ranks whose local steps are combined by Adasum (Maleki et al. 2021, arXiv 2006.02924): the delta
    form, which equals the gradient form after one local step of SGD without momentum and weight decay.

    Attributes:
        local_steps: number of local steps of each rank before they are combined.
    """

    method: Literal["adasum"]
    local_steps: int = Field(1, ge=1)


class SimulatedAdaScaleOptions(StrictModel):
    """Synchronous ranks with AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105); ``optimizer`` must be sgd.

    ``steps`` of the experiment are scale-invariant: the run ends when their number is reached.
    """

    method: Literal["adascale"]
    smoothing: float | None = Field(None, ge=0, lt=1)


Options = LocalSGDOptions | HybridOptions | SimulatedAdasumOptions | SimulatedAdaScaleOptions | BaseModel
# methods whose ranks are simulated in their own way
_SYNCHRONOUS: dict[str, type[BaseModel]] = {"adasum": SimulatedAdasumOptions, "adascale": SimulatedAdaScaleOptions}
# options that the experiment sets for all methods, or that a simulation does not have
_NOT_OF_A_METHOD = ("total_steps", "seed", "shards", "overlap", "upstream")


@dataclass(frozen=True)
class Method:
    """One method of an experiment, under its name there.

    Attributes:
        error_feedback: whether what a codec does not send is kept for later; only an experiment can switch it off.
        above: the global server above the regions' servers; None for one server of all workers.
    """

    name: str
    options: Options
    optimizer: OptimizerOptions
    error_feedback: bool = True
    above: GlobalServer | None = None


class _Head(StrictModel):
    """The keys of the file; the sections are checked one by one."""

    problem: dict[str, Any]
    methods: dict[str, dict[str, Any]] = Field(min_length=1)
    steps: int = Field(ge=1)
    batch_size: int = Field(8, ge=1)
    seed: int = Field(1, ge=0, lt=1 << 63)
    evaluate_every: Annotated[float, Field(gt=0)] | None = None
    optimizer: dict[str, Any] = {}
    schedule: dict[str, Any] = {}
    pretraining: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    clusters: dict[str, dict[str, Any]] | None = None
    target: dict[str, Any] | None = None
    device: str = "auto"
    bf16: bool = False


@dataclass(frozen=True)
class Experiment:
    """An experiment file.

    Attributes:
        steps: mean local steps (or gradients) of a worker, so that methods on one cluster see as much data.
        evaluate_every: mean steps of a worker between two evaluations.
        raw: the file as it was read, by which a simulation that is resumed is recognised.
    """

    path: Path
    head: _Head
    methods: tuple[Method, ...]
    clusters: dict[str, Cluster]
    schedule: ScheduleOptions
    optimizer: OptimizerOptions
    pretraining: Pretraining | None
    target: Target | None
    raw: dict[str, Any] = field(repr=False)

    @property
    def steps(self) -> int:
        return self.head.steps

    @property
    def seed(self) -> int:
        return self.head.seed

    @property
    def evaluate_every(self) -> float:
        return self.head.evaluate_every or max(1.0, self.steps / 20)


_MERGE = "tag:yaml.org,2002:merge"  # of <<, which may be repeated


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Refuses a key that is given twice: YAML takes the last, and a copied method would replace its original."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
        for number, key in enumerate(names):
            if any(key.value == other.value for other in names[:number]):
                raise yaml.composer.ComposerError(None, None, f'"{key.value}" is given twice', key.start_mark)
        return node


def read(path: Path) -> Experiment:
    """Reads an experiment from its file.

    Raises:
        ConfigurationError: the file cannot be read, or a key or value in it is wrong: one line that names it.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise ConfigurationError(f"{path}: an experiment is a mapping with the keys {', '.join(_Head.model_fields)}")
    head = checked(_Head, raw, str(path))
    if (head.cluster is None) == (head.clusters is None):
        raise ConfigurationError(f'{path}: give "cluster", or several with names as "clusters"')
    given = head.clusters or {"": head.cluster or {}}
    clusters = {
        name: checked(Cluster, values, _in(path, "cluster", name)).located(path.parent)
        for name, values in given.items()
    }
    optimizer = checked(OptimizerOptions, head.optimizer, f"{path}, optimizer")
    simulated = tuple(_method(path, name, values, head.optimizer) for name, values in head.methods.items())
    target = None if head.target is None else _target(path, head.target, list(head.methods))
    if head.bf16:
        _check_bf16(path, head, simulated)
    before = None if head.pretraining is None else checked(Pretraining, head.pretraining, f"{path}, pretraining")
    return Experiment(
        path=path,
        head=head,
        methods=simulated,
        clusters=clusters,
        schedule=checked(ScheduleOptions, head.schedule, f"{path}, schedule"),
        optimizer=optimizer,
        pretraining=before,
        target=target,
        raw=raw,
    )


def _check_bf16(path: Path, head: _Head, given: tuple[Method, ...]) -> None:
    for method in given:
        if not isinstance(method.options, HybridOptions):
            raise ConfigurationError(
                f'{_in(path, "method", method.name)}: "bf16" is simulated with hybrid_async: leave one of them out'
            )
    if head.pretraining is not None:
        raise ConfigurationError(f'{path}: "pretraining" is in fp32: leave it out, or "bf16"')


def _in(path: Path, section: str, name: str) -> str:
    return f"{path}, {section}" + (f" {name}" if name else "")


def _method(path: Path, name: str, given: dict[str, Any], common: dict[str, Any]) -> Method:
    where, values = _in(path, "method", name), dict(given)
    own, feedback = values.pop("optimizer", {}), values.pop("error_feedback", True)
    above = global_server(kind=values.get("method"), given=values.pop("global", None), where=f"{where}, global")
    kind = values.get("method")
    methods.import_plugins()
    known = [*methods.METHODS, *RANKS_METHODS]
    if kind not in known:
        what = " is missing" if kind is None else f": {kind}: there is no such method"
        raise ConfigurationError(f'{where}: "method"{what}; there are {", ".join(known)}')
    for key in _NOT_OF_A_METHOD:
        if key in values:
            raise ConfigurationError(f'{where}: "{key}" cannot be set for one method of a simulation: leave it out')
    if not isinstance(own, dict):
        raise ConfigurationError(f'{where}: "optimizer" is a mapping, as at the top of the file')
    options = _options(kind, values, where)
    if own.get("type", common.get("type")) != common.get("type"):
        common = {key: value for key, value in common.items() if key not in ("betas", "momentum")}
    if above is not None and isinstance(options, FragmentOptions) and options.in_fragments:
        raise ConfigurationError(f'{where}: "fragments" do not go with "global", whose regions exchange whole models')
    optimizer = checked(OptimizerOptions, common | own, f"{where}, optimizer")
    if kind == "adascale" and optimizer.type != "sgd":
        raise ConfigurationError(f'{where}: adascale is simulated with "optimizer": "type": sgd, not {optimizer.type}')
    return Method(name, options, optimizer, _error_feedback(feedback, options, where), above)


def _error_feedback(given: object, options: Options, where: str) -> bool:
    if not isinstance(given, bool):
        raise ConfigurationError(f'{where}: "error_feedback" is true or false (it is {given!r})')
    push = options.compress.push if isinstance(options, LocalSGDOptions | HybridOptions) else None
    if not given and (push is None or isinstance(push, DQSGDOptions)):
        raise ConfigurationError(f'{where}: "error_feedback" is of no use here: no "compress" keeps a residual')
    return given


def _options(kind: str, values: dict[str, Any], where: str) -> Options:
    ranks = _SYNCHRONOUS | {name: each.options for name, each in RANKS_METHODS.items()}
    if kind in ranks:
        return checked(ranks[kind], values, where)
    model: type[LocalSGDOptions] | type[HybridOptions] = LocalSGDOptions if kind == "local_sgd" else HybridOptions
    return methods.parse(model, values, where)


def _target(path: Path, given: dict[str, Any], names: list[str]) -> Target:
    target = checked(Target, given, f"{path}, target")
    if (target.loss is None) == (target.of is None):
        raise ConfigurationError(f'{path}, target: give "loss", or "of" with the name of a method')
    if target.of is not None and target.of not in names:
        raise ConfigurationError(
            f'{path}, target: "of": {target.of}: there is no such method; there are {", ".join(names)}'
        )
    return target
