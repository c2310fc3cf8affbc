"""The methods' options: one name for each in flags, JSON, logs and documents."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.place import split_address

OUTER = ("diloco", "nesterov", "buffered_nesterov", "delayed_nesterov", "sgd")


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LocalSGDOptions(_Options):
    """Local SGD (Liu et al. 2024, arXiv 2401.09135).

    Attributes:
        outer: what the server does with pseudo-gradients; ``diloco`` is synchronous.
        local_steps: H, of the fastest worker.
        outer_lr: ε, of as many arrivals as there are workers.
        outer_momentum: β; ``sgd`` has none.
        delay: N of ``delayed_nesterov``; the number of workers by default.
        c: the share of the momentum in each step of ``delayed_nesterov``, in [0, 1/delay].
        buffer_size: N of ``buffered_nesterov``; the number of workers by default.
        dynamic_local_steps: DyLU: a slower worker takes fewer steps.
        grace_period: seconds for which an update waits for others to start again together with; None waits for none.
        staleness_power: weight (1 + staleness)^power; the paper's polynomial weight is −0.5.
        staleness_limit: staler updates are dropped; the paper drops above 10.
        delay_compensation: λ of g + λ·g⊙g⊙(θ_now − θ_then).
        overlap: go on computing while the server's answer is on its way.
        total_steps: mean local steps of a worker in the whole run; 0 for no end.
        shards: parts of the training set that workers choose from by need, 0 for one a worker.
        max_refused: a worker ends after so many updates with NaN or Inf in a row.
        seed: of the choice of shards.
    """

    method: Literal["local_sgd"] = "local_sgd"
    outer: Literal["diloco", "nesterov", "buffered_nesterov", "delayed_nesterov", "sgd"] = "delayed_nesterov"
    local_steps: int = Field(50, ge=1)
    outer_lr: float = Field(0.7, gt=0)
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    delay: int | None = Field(None, ge=1)
    c: float = Field(0.0, ge=0)
    buffer_size: int | None = Field(None, ge=1)
    dynamic_local_steps: bool = False
    grace_period: float | None = Field(None, ge=0)
    staleness_power: float = Field(0.0, le=0)
    staleness_limit: int | None = Field(None, ge=0)
    delay_compensation: float = Field(0.0, ge=0)
    overlap: bool = False
    total_steps: int = Field(0, ge=0)
    shards: int = Field(0, ge=0)
    max_refused: int = Field(3, ge=1)
    seed: int = Field(1, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> "LocalSGDOptions":
        """An option that its method does not use is a mistake, not to be swallowed."""
        given = "outer_momentum" in self.model_fields_set and self.outer_momentum > 0
        foreign = {
            "outer_momentum": self.outer == "sgd" and given,
            "delay": self.outer != "delayed_nesterov" and self.delay is not None,
            "c": self.outer != "delayed_nesterov" and self.c > 0,
            "buffer_size": self.outer != "buffered_nesterov" and self.buffer_size is not None,
            "grace_period": self.outer == "diloco" and self.grace_period is not None,
            "dynamic_local_steps": self.outer == "diloco" and self.dynamic_local_steps,
            "staleness_power": self.outer == "diloco" and self.staleness_power < 0,
            "staleness_limit": self.outer == "diloco" and self.staleness_limit is not None,
            "delay_compensation": self.outer == "diloco" and self.delay_compensation > 0,
            "overlap": self.outer == "diloco" and self.overlap,
        }
        if self.overlap and self.grace_period is not None:
            raise ValueError("overlap and grace_period do not go together: a worker that waits for others cannot go on")
        for name, given in foreign.items():
            if given:
                raise ValueError(f"{name} is of no use with outer {self.outer}: leave it out")
        return self

    def describe(self, workers: int, shards: list[int]) -> dict[str, Any]:
        """The method in JSON's types, as the server builds it and all workers must have it.

        Raises:
            ConfigurationError: c does not go with the delay.
        """
        delay = self.delay or workers
        if self.c > 1 / delay:
            raise ConfigurationError(f"c is {self.c:g}: with delay {delay} it must be in [0, 1/{delay}]")
        waits = self.outer == "diloco" or self.grace_period is not None
        lateness = {
            "power": self.staleness_power,
            "limit": self.staleness_limit,
            "compensation": self.delay_compensation,
        }
        own = self.model_dump(exclude={"shards", "max_refused", "delay", "buffer_size"})
        return own | {
            "workers": workers,
            "delay": delay,
            "buffer_size": workers if self.outer == "diloco" else self.buffer_size or workers,
            "barrier": workers if waits else 0,
            "grace": self.grace_period,
            "waits_for_dead": False,
            "publishes": False,
            "lateness": lateness,
            "shards": shards,
        }


class HybridOptions(_Options):
    """Hybrid asynchronous SGD (Aji & Heafield 2019, arXiv 1906.03496).

    Attributes:
        updates_per_step: N gradients a step; the number of workers by default, 1 is plain asynchronous SGD.
        barrier: wait at each step for its gradients: synchronous.
        max_refused: a worker ends after so many gradients with NaN or Inf in a row.
        total_steps: applied updates in the whole run; 0 for no end.
        seed: of the order of the data.
    """

    method: Literal["hybrid_async"]
    updates_per_step: int | None = Field(None, ge=1)
    barrier: bool = False
    max_refused: int = Field(10, ge=1)
    total_steps: int = Field(0, ge=0)
    seed: int = Field(1, ge=0)

    def describe(self, workers: int, inner: dict[str, Any]) -> dict[str, Any]:
        """The method in JSON's types, with the ``inner`` optimizer's part of it.

        Raises:
            ConfigurationError: a barrier that would wait for more workers than there are.
        """
        updates = self.updates_per_step or workers
        if self.barrier and updates > workers:
            raise ConfigurationError(
                f"updates_per_step is {updates}: with barrier there are only {workers}, which would wait for ever"
            )
        limits = {"last_version": self.total_steps or None, "updates_per_step": updates}
        return {"method": self.method, "workers": workers, "barrier": updates if self.barrier else 0} | limits | inner


class AdasumOptions(_Options):
    """Adasum (Maleki et al. 2021, arXiv 2006.02924).

    Attributes:
        form: what is combined: every rank's ``gradient``, or the ``delta`` that its own optimizer's step has made of
            it; ``auto`` is the gradient for SGD and the delta for adaptive optimizers, as in the paper.
        hierarchy: ``node`` averages inside a node and combines across nodes; ``none`` combines all ranks.
        sync_state: in the delta form, steps between two averages of the ranks' optimizer states; 0 for never.
        clip_delta: in the delta form, the largest L2 norm of a step of all parameters together; 0 for any.
        total_steps: of the run; 0 for no end.
        seed: of the order of the data.
    """

    method: Literal["adasum"] = "adasum"
    form: Literal["gradient", "delta", "auto"] = "auto"
    hierarchy: Literal["none", "node"] = "none"
    sync_state: int = Field(0, ge=0)
    clip_delta: float = Field(0.0, ge=0)
    total_steps: int = Field(0, ge=0)
    seed: int = Field(1, ge=0)

    def form_for(self, optimizer: str, adaptive: bool) -> Literal["gradient", "delta"]:
        """The form that an optimizer gets.

        Raises:
            ConfigurationError: an option that this form does not use.
        """
        form = ("delta" if adaptive else "gradient") if self.form == "auto" else self.form
        for name in ("sync_state", "clip_delta"):
            if form == "gradient" and getattr(self, name):
                raise ConfigurationError(
                    f"adasum: {name} is of the delta form, and {optimizer} has the gradient form here: "
                    f"leave {name} out, or choose the delta form"
                )
        return form


class AdaScaleOptions(_Options):
    """AdaScale (Johnson et al. 2020, arXiv 2007.05105).

    Attributes:
        scale: S, single batches in a step; by default one for each gradient of a step.
        estimator: ``batches``, or ``differences`` of consecutive gradients, for a step with one gradient.
        smoothing: θ of the averages, in place of the paper's.
        interval: norms are taken in every ``interval``-th step.
        total_steps: scale-invariant steps of the run: the number of steps of the run with one batch; 0 for no end.
        seed: of the order of the data.
    """

    method: Literal["adascale"] = "adascale"
    scale: float | None = Field(None, ge=1, allow_inf_nan=False)
    estimator: Literal["batches", "differences"] = "batches"
    smoothing: float | None = Field(None, ge=0, lt=1)
    interval: int = Field(1, ge=1)
    total_steps: int = Field(0, ge=0)
    seed: int = Field(1, ge=0)

    def scale_of(self, gradients: int) -> float:
        """S of a step with so many gradients.

        Raises:
            ConfigurationError: there is one gradient, in which no noise can be seen, and no other estimator.
        """
        if gradients == 1 and self.estimator == "batches" and self.scale != 1:
            raise ConfigurationError(
                "adascale compares the gradients of a step's batches, and this step has one: use several ranks or "
                "gradient accumulation, or give the scale and the estimator differences, or scale 1 for plain training"
            )
        if gradients > 1 and self.estimator == "differences":
            raise ConfigurationError(
                f"adascale: the estimator differences is for a step with one gradient, and this step has {gradients}: "
                "leave it out"
            )
        if self.estimator == "differences" and self.interval > 1:
            raise ConfigurationError("adascale: interval is for the estimator batches: leave it out")
        if self.estimator == "differences" and self.scale is None:
            raise ConfigurationError("adascale: the estimator differences needs the scale, how many batches a step has")
        return float(gradients) if self.scale is None else self.scale


class RunOptions(_Options):
    """What every method with a server has besides its own options: where the server is, and what faults mean.

    Attributes:
        server: HOST:PORT at which worker 0 starts the server for workers on other machines.
        run_dir: for ``events.jsonl``, logs and snapshots.
        token_file: what all workers know and nobody else; needed where other machines can reach the server.
        worker_timeout: seconds without a word after which nobody waits for a worker.
        server_timeout: seconds for which a worker waits for a server that is gone.
        snapshot_seconds: between two snapshots, from which a server that dies goes on.
        snapshot_updates: take one also after this many applied updates; 0 for no such limit.
        max_update_norm_ratio: refuse an update whose norm is more than this many times the running median.
        record: keep in the run's directory what a replay needs; a checksum of the parameters for each change.
    """

    server: str | None = None
    run_dir: str = "async_training"
    token_file: str | None = None
    worker_timeout: float = Field(60.0, gt=0)
    server_timeout: float = Field(600.0, ge=0)
    snapshot_seconds: float = Field(60.0, gt=0)
    snapshot_updates: int = Field(0, ge=0)
    max_update_norm_ratio: float | None = Field(None, gt=1)
    record: bool = False

    @field_validator("server")
    @classmethod
    def _is_address(cls, server: str | None) -> str | None:
        if server is not None:
            split_address(server)
        return server

    def describe(self) -> dict[str, Any]:
        """The server's part, in JSON's types."""
        own = {"worker_timeout", "snapshot_seconds", "snapshot_updates", "max_update_norm_ratio", "record"}
        return self.model_dump(include=own)


class Section(RunOptions):
    """``"async_training"`` of a DeepSpeed configuration, beside the options of its method.

    Attributes:
        island_size: ranks that train synchronously among themselves and are one worker to the server.
    """

    island_size: int = Field(1, ge=1)


Method = Annotated[LocalSGDOptions | HybridOptions, Field(discriminator="method")]
_Model = TypeVar("_Model", bound=BaseModel)


def checked(
    model: type[_Model], values: dict[str, Any], where: str, spell: Callable[[str], str] = '"{}"'.format
) -> _Model:
    """The values as a model.

    Args:
        where: what to name in an error.
        spell: how a key is written there.

    Raises:
        ConfigurationError: an unknown key or a bad value, in one line.
    """
    try:
        return model(**values)
    except ValidationError as error:
        # a key that is misspelt may be missing, too
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        key = spell(".".join(map(str, first["loc"]))) + ": " if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            known = f"; known are {', '.join(sorted(model.model_fields))}" if len(first["loc"]) == 1 else ""
            raise ConfigurationError(f"{where}: unknown key {key.removesuffix(': ')}{known}") from error
        said = first["msg"].removeprefix("Value error, ")
        value = "" if not first["loc"] or first["type"] == "missing" else f" (it is {first['input']!r})"
        raise ConfigurationError(f"{where}: {key}{said}{value}") from error
