"""The methods' options: one name for each in flags, JSON, logs and documents."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fairseq_async.errors import ConfigurationError

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
        return {"method": self.method, "barrier": updates if self.barrier else 0} | limits | inner


class Section(_Options):
    """``"async_training"`` of a DeepSpeed configuration, beside the options of its method.

    Attributes:
        island_size: ranks that train synchronously among themselves and are one worker to the server.
        server: HOST:PORT at which worker 0 starts the server for workers on other machines.
        run_dir: for ``events.jsonl`` and logs.
    """

    island_size: int = Field(1, ge=1)
    server: str | None = None
    run_dir: str = "async_training"


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
        first = error.errors()[0]
        key = spell(".".join(map(str, first["loc"]))) + ": " if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            known = f"; known are {', '.join(sorted(model.model_fields))}" if len(first["loc"]) == 1 else ""
            raise ConfigurationError(f"{where}: unknown key {key.removesuffix(': ')}{known}") from error
        said = first["msg"].removeprefix("Value error, ")
        value = "" if not first["loc"] else f" (it is {first['input']!r})"
        raise ConfigurationError(f"{where}: {key}{said}{value}") from error
