"""The options of the synchronous methods, which have no server: Adasum and AdaScale."""

from typing import Literal

from pydantic import Field

from fairseq_async.errors import ConfigurationError, option_of
from fairseq_async.options.base import Options


class AdasumOptions(Options):
    """The options of Adasum (Maleki et al. 2021, arXiv 2006.02924)."""

    method: Literal["adasum"] = "adasum"
    form: Literal["gradient", "delta", "auto"] = Field(
        "auto",
        description="gradient: the ranks' gradients are combined, then all take the same step; delta: each rank's "
        "optimizer takes a step by its own gradient, and these steps are combined; auto: gradient for SGD, delta for "
        "adaptive optimizers, as in the paper",
    )
    hierarchy: Literal["none", "node"] = Field(
        "none", description="node averages inside a machine and combines across machines; none combines all ranks"
    )
    sync_state: int = Field(
        0, ge=0, description="delta form: average the ranks' optimizer states every so many steps; 0 for never"
    )
    clip_delta: float = Field(0.0, ge=0, description="delta form: largest L2 norm of a combined step; 0 for any")
    total_steps: int = Field(0, ge=0, description="steps of the run; 0 for no end")
    seed: int = Field(1, ge=0, description="seed of the order of the data")

    def form_for(self, optimizer: str, adaptive: bool) -> Literal["gradient", "delta"]:
        """Returns the form of Adasum for an optimizer.

        Raises:
            ConfigurationError: an option is given that this form does not use.
        """
        form = ("delta" if adaptive else "gradient") if self.form == "auto" else self.form
        for name in ("sync_state", "clip_delta"):
            if form == "gradient" and getattr(self, name):
                raise ConfigurationError(
                    f"{option_of('adasum', name)} is of the delta form, and {optimizer} has the gradient form here: "
                    f"leave it out, or give {option_of('adasum', 'form')} delta"
                )
        return form


class AdaScaleOptions(Options):
    """The options of AdaScale (Johnson et al. 2020, arXiv 2007.05105)."""

    method: Literal["adascale"] = "adascale"
    scale: float | None = Field(
        None,
        ge=1,
        allow_inf_nan=False,
        description="single batches S in a step, where a rank's batch is larger than that of the run whose learning "
        "rate you have",
        json_schema_extra={"default": "gradients in a step"},
    )
    estimator: Literal["batches", "differences"] = Field(
        "batches",
        description="batches, or differences of consecutive gradients for a step with one gradient, which needs scale",
    )
    smoothing: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="θ of the averages, in [0, 1)",
        json_schema_extra={"default": "the paper's"},
    )
    interval: int = Field(
        1, ge=1, description="take norms in every so many steps; the gain stays between: for Adam, where they cost most"
    )
    total_steps: int = Field(
        0, ge=0, description="scale-invariant steps of the run, the number of those with one batch; 0 for no end"
    )
    seed: int = Field(1, ge=0, description="seed of the order of the data")

    def scale_of(self, gradients: int) -> float:
        """Returns S, the number of single batches, of a step with this number of gradients.

        Raises:
            ConfigurationError: there is one gradient, in which no noise can be seen, and no other estimator; or the
                options do not go together.
        """
        scale, estimator = option_of("adascale", "scale"), option_of("adascale", "estimator")
        if gradients == 1 and self.estimator == "batches" and self.scale != 1:
            raise ConfigurationError(
                "adascale compares the gradients of a step's batches, and this step has one: use several ranks or "
                f"gradient accumulation, or give {scale} and {estimator} differences, or {scale} 1 for plain training"
            )
        if gradients > 1 and self.estimator == "differences":
            raise ConfigurationError(
                f"{estimator} differences is for a step with one gradient, and this step has {gradients}: leave it out"
            )
        if self.estimator == "differences" and self.interval > 1:
            raise ConfigurationError(f"{option_of('adascale', 'interval')} is for {estimator} batches: leave it out")
        if self.estimator == "differences" and self.scale is None:
            raise ConfigurationError(f"{estimator} differences needs {scale}, how many batches a step has")
        return float(gradients) if self.scale is None else self.scale
