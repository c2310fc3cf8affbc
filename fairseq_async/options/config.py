"""The options of every method; fairseq's flags, DeepSpeed's keys, help and tables are all made from these models.

This module and those that read its models do not import torch, so that a mistake in the options shows at once.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from fairseq_async.errors import ConfigurationError, option
from fairseq_async.options.base import LONGEST, Buffers, Shown
from fairseq_async.options.base import Options as Options
from fairseq_async.options.compression import Compress, Compression
from fairseq_async.options.fragments import FragmentOptions
from fairseq_async.options.server import Section as Section
from fairseq_async.options.server import ServerOptions as ServerOptions
from fairseq_async.options.synchronous import AdaScaleOptions as AdaScaleOptions
from fairseq_async.options.synchronous import AdasumOptions as AdasumOptions
from fairseq_async.options.validation import split_address

_SECONDS: Shown = {"metavar": "S"}
_WORKERS: Shown = {"default": "number of workers"}  # shown in place of None, in help and tables
_AUTO: Shown = {"default": "auto"}

_COMPRESS: Shown = {"default": "none", "metavar": "NAME"}
_COMPRESS_HELP = (
    "send updates in fewer bytes: bf16, int8, e3m0, topk, adacomp or dqsgd, with parameters as in topk:keep=32,bits=4; "
    "pull=bf16, pull=int8 or pull=e3m0, alone or as in e3m0,pull=e3m0: parameters too"
)


class LocalSGDOptions(Options):
    """The options of local SGD that all outer rules share; a rule's own model extends this or
    :class:`AsyncLocalSGDOptions`.

    ``total_steps`` and ``seed`` are not flags of ours in fairseq, which has ``--max-update`` and ``--seed``.
    """

    method: Literal["local_sgd"] = "local_sgd"
    outer: str = Field("sgd", description="what the server does with the workers' local steps")
    local_steps: int = Field(
        50, ge=1, description="steps H that the fastest worker takes between two exchanges with the server"
    )
    total_steps: int = Field(0, ge=0, description="mean local steps of a worker in the whole run; 0 for no end")
    shards: int = Field(
        0, ge=0, description="parts of the training set that the server assigns by need; 0 for one a worker"
    )
    compress: Compression = Field(Compress(), description=_COMPRESS_HELP, json_schema_extra=_COMPRESS)
    seed: int = Field(1, ge=0, description="seed of the order of the data and of the choice of shards")
    buffers: Buffers = "own"
    upstream: str | None = Field(
        None,
        description="address of a global server, for which this run's server is a worker (HALoS), and its rule: "
        "HOST:PORT,region=1,updates=32,merge=0.25,outer=delayed_nesterov,outer_lr=0.15",
        json_schema_extra={"metavar": "HOST:PORT,..."},
    )

    @field_validator("upstream")
    @classmethod
    def _begins_with_address(cls, upstream: str | None) -> str | None:
        if upstream is not None:
            split_address(upstream.partition(",")[0])
        return upstream

    def for_workers(self, workers: int) -> "LocalSGDOptions":
        """Returns the options with the defaults that depend on the number of workers filled in.

        Raises:
            ConfigurationError: the options do not go with this number of workers.
        """
        return self


class AsyncLocalSGDOptions(LocalSGDOptions, FragmentOptions):
    """The options of asynchronous local SGD (Liu et al. 2024, arXiv 2401.09135), whose workers do not all wait for each
    other."""

    dynamic_local_steps: bool = Field(
        False,
        description="a slower worker takes fewer local steps: its share of H is that of its measured speed (DyLU)",
    )
    grace_period: float | None = Field(
        None,
        ge=0,
        le=LONGEST,
        description="seconds for which an update waits for others, to start again from the same parameters",
        json_schema_extra=_SECONDS,
    )
    staleness_power: float = Field(
        0.0, le=0, description="weight (1 + staleness)^power of a late update; the paper's polynomial weight is -0.5"
    )
    staleness_limit: int | None = Field(None, ge=0, description="drop updates of a higher staleness")
    delay_compensation: float = Field(
        0.0,
        ge=0,
        description="λ of g + λ·g⊙g⊙(θ_now − θ_then); the server keeps one more copy of the parameters a worker",
    )
    overlap: bool = Field(
        False,
        description="compute while the server's answer is on its way; not with a grace period or islands",
    )

    @model_validator(mode="after")
    def _waits_or_goes_on(self) -> "AsyncLocalSGDOptions":
        if self.overlap and self.grace_period is not None:
            raise ValueError(
                f"{option('overlap')} and {option('grace_period')} do not go together: a worker that waits for others "
                "cannot go on"
            )
        others = {
            "overlap": (self.overlap, f"{option('fragment_delay')} says how long a worker goes on"),
            "upstream": (self.upstream is not None, "a region merges the whole model"),
            "delay_compensation": (self.delay_compensation > 0, "fragments start from several versions"),
        }
        self.check_fragments(self.local_steps, others)
        return self


OuterLearningRate = Annotated[
    float,
    Field(
        gt=0,
        description="outer learning rate ε, of as many arrivals as there are workers; with mla and heloco "
        "of each arrival",
        json_schema_extra={"default": "1.2 with sgd; 0.3 with mla; else 0.7"},
    ),
]
Delay = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(
        description="arrivals N between two momentum steps; buffered_nesterov takes the mean of these",
        json_schema_extra=_WORKERS,
    ),
]
OuterMomentum = Annotated[float, Field(ge=0, lt=1, description="outer momentum β")]
StartAhead = Annotated[
    bool,
    Field(
        description="on or off: local steps start ahead of the parameters, where the momentum takes them: θ − εβm",
        json_schema_extra={"metavar": "on|off", "default": "on with mla and heloco, else off"},
    ),
]


class DiLoCoOptions(LocalSGDOptions):
    """``outer diloco``: one Nesterov step on the mean of all workers, which wait for each other."""

    outer: Literal["diloco"] = "diloco"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9


class NesterovOptions(AsyncLocalSGDOptions):
    """``outer nesterov``: one Nesterov step per arrival."""

    outer: Literal["nesterov"] = "nesterov"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9
    start_ahead: StartAhead = False


class BufferedNesterovOptions(AsyncLocalSGDOptions):
    """``outer buffered_nesterov``: one Nesterov step on the mean of N arrivals."""

    outer: Literal["buffered_nesterov"] = "buffered_nesterov"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9
    start_ahead: StartAhead = False
    delay: Delay = None

    def for_workers(self, workers: int) -> "BufferedNesterovOptions":
        return self.model_copy(update={"delay": self.delay or workers})


class DelayedNesterovOptions(AsyncLocalSGDOptions):
    """``outer delayed_nesterov``: a gradient step per arrival, a momentum step every N-th."""

    outer: Literal["delayed_nesterov"] = "delayed_nesterov"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9
    start_ahead: StartAhead = False
    delay: Delay = None
    c: float = Field(0.0, ge=0, description="share of the momentum in each step, in [0, 1/delay]")

    def for_workers(self, workers: int) -> "DelayedNesterovOptions":
        delay = self.delay or workers
        if self.c > 1 / delay:
            raise ConfigurationError(
                f"{option('c')} is {self.c:g}: with {option('delay')} {delay} it must be in [0, 1/{delay}]"
            )
        return self.model_copy(update={"delay": delay})


class OuterSGDOptions(AsyncLocalSGDOptions):
    """``outer sgd``: one plain step per arrival, the default: ``docs/results/outer_rules.md`` says why."""

    outer: Literal["sgd"] = "sgd"
    outer_lr: OuterLearningRate = 1.2


class MomentumLookAheadOptions(AsyncLocalSGDOptions):
    """``outer mla``: one step with an averaged momentum per arrival; workers start ahead along the momentum."""

    outer: Literal["mla"] = "mla"
    outer_lr: OuterLearningRate = 0.3  # at the paper's 0.7 five workers diverge where one is six times faster
    outer_momentum: OuterMomentum = 0.9
    start_ahead: StartAhead = True


class HeLoCoOptions(AsyncLocalSGDOptions):
    """``outer heloco``: MLA on updates that are turned towards the momentum, tensor by tensor."""

    outer: Literal["heloco"] = "heloco"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9
    start_ahead: StartAhead = True


def _word_or_number(value: object, words: dict[str, float | None], number: str) -> object:
    """Converts a word to its value, and the text of a flag to a number, so that an error shows it as one.

    YAML reads ``off`` as false. True is refused: it would count as 1.
    """
    if value is False and "off" in words:
        return words["off"]
    if isinstance(value, str):
        if value in words:
            return words[value]
        with suppress(ValueError):
            return int(value) if value.lstrip("-").isdigit() else float(value)
    elif not isinstance(value, bool):
        return value
    raise ValueError(f"must be {', '.join(words)} or {number}")


class HybridOptions(Options):
    """The options of hybrid asynchronous SGD (Aji & Heafield 2019, arXiv 1906.03496)."""

    removed = Options.removed | {"grace_period": "leave it out: a step waits about half a worker's own step"}
    method: Literal["hybrid_async"] = "hybrid_async"
    updates_per_step: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="gradients that the server sums before it steps; auto: those that come at about the same time; "
        "1 is plain asynchronous SGD",
        json_schema_extra=_AUTO | {"metavar": "N"},
    )
    look_ahead: Annotated[float, Field(ge=0, le=1024)] | None = Field(
        None,
        description="give a worker parameters so many versions ahead, along the server's last step; auto: as far as "
        "would have been best for its late gradients before; off: none",
        json_schema_extra=_AUTO | {"metavar": "X"},
    )
    barrier: bool = Field(
        False,
        description="hold the gradients until updates_per_step workers, by default all, have sent one, then step: "
        "with all workers, synchronous SGD",
    )
    micro_batches: int = Field(
        1, ge=1, le=1 << 16, description="batches of a worker in a step, on average of all workers"
    )
    shares: Literal["equal", "auto"] = Field(
        "equal",
        description="how the micro_batches of a step are divided among the workers; auto: by their speeds, so that "
        "all are done at about the same time",
        json_schema_extra={"default": "auto in fairseq and the Trainer, where a step closes early; else equal"},
    )
    compress: Compression = Field(Compress(), description=_COMPRESS_HELP, json_schema_extra=_COMPRESS)
    total_steps: int = Field(0, ge=0, description="steps of the server in the whole run; 0 for no end")
    seed: int = Field(1, ge=0, description="seed of the order of the data")

    @field_validator("updates_per_step", mode="before")
    @classmethod
    def _updates_in_words(cls, value: object) -> object:
        return _word_or_number(value, {"auto": None}, "a whole number of at least 1")

    @field_validator("look_ahead", mode="before")
    @classmethod
    def _look_ahead_in_words(cls, value: object) -> object:
        return _word_or_number(value, {"auto": None, "off": 0.0}, "a number of at least 0")

    @model_validator(mode="after")
    def _waits_for_somebody(self) -> "HybridOptions":
        if self.barrier and self.look_ahead:
            raise ValueError(f"{option('look_ahead')} is for runs without {option('barrier')}: leave it out")
        return self

    @property
    def closes_early(self) -> bool:
        """Whether a step takes the gradients that come at about the same time, instead of a fixed number."""
        return self.updates_per_step is None and not self.barrier

    def for_workers(self, workers: int) -> "HybridOptions":
        """Returns the options with the number of gradients that a barrier waits for filled in.

        Raises:
            ConfigurationError: a barrier would wait for more workers than there are, or a step is not of all workers.
        """
        updates = self.updates_per_step or workers
        if self.shares == "auto" and not (self.closes_early or self.barrier and updates == workers):
            raise ConfigurationError(
                f"{option('updates_per_step')} is {updates}: with {option('shares')} auto, a step is divided among all "
                "workers; leave it out"
            )
        if self.barrier and updates > workers:
            raise ConfigurationError(
                f"{option('updates_per_step')} is {updates}: with {option('barrier')} there are only {workers} "
                "workers, which would wait for ever; lower it, or start more"
            )
        return self.model_copy(update={"updates_per_step": updates}) if self.barrier else self


def divides_by_default(given: Mapping[str, object], micro_batches: int, workers: int) -> bool:
    """Whether ``shares`` is ``auto`` where it is not given, in a front end whose loop follows by itself.

    Behind a barrier it is ``equal``: such a run is to be repeated to the bit, and measured speeds differ between runs.

    Args:
        given: the options of ``hybrid_async`` that the user has given.
    """
    closes_early = not given.get("barrier") and given.get("updates_per_step") in (None, "auto")
    return "shares" not in given and closes_early and micro_batches > 1 and workers > 1
